"""Which faulty machines a run keeps from other work, and what is said where it may not."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest

from muster import backends
from muster.app.run.take_out import TakeOut, machines_taken_out
from muster.core.errors import AccessError, BackendError
from muster.core.event_log import EventLog
from muster.core.events import Event
from muster.health.machine.fleet import taking_out


class Cluster:
    def __init__(self, folder: Path) -> None:
        self.asked: list[tuple[str, str]] = []
        self.said: list[str] = []
        self.refusal: Exception | None = None
        command = partial(taking_out, "slurm")
        self.sink = TakeOut("run-1", folder, self.act, command, self.said.append)

    def act(self, node: str, reason: str) -> str:
        self.asked.append((node, reason))
        if self.refusal is not None:
            raise self.refusal
        return f"{node} drains"

    def tell(self, kind: str, detail: dict[str, Any], host: str = "host-2") -> None:
        self.sink.event(
            Event(run_id="run-1", attempt=1, seq=0, mono_ns=0, wall_ns=0, host=host, kind=kind, detail=detail)
        )

    def looked(self, node: str) -> None:
        self.tell("host.check", {"part": "passive", "verdict": "healthy", "node": node})

    def see(self, verdict: str | None, evidence: str = "GPU 3: Xid 79\n gone") -> None:
        told = {} if verdict is None else {"verdict": verdict}
        self.tell("host.health", {"incident": "host_unhealthy", "evidence": evidence, "resettable": [], **told})


@pytest.fixture
def cluster(tmp_path: Path) -> Cluster:
    return Cluster(tmp_path)


def test_a_machine_is_taken_out_once_with_what_was_seen(cluster):
    cluster.looked("node3")
    cluster.see("replace")
    cluster.see("drain")
    assert cluster.asked == [("node3", "muster run run-1: GPU 3: Xid 79 gone")]
    assert cluster.said == ["host-2: node3 drains"]
    cluster.looked("node4")  # another machine has the host's name now
    cluster.see("drain")
    assert [node for node, _ in cluster.asked] == ["node3", "node4"]


@pytest.mark.parametrize("verdict", ["reset", None])
def test_what_a_reset_heals_and_what_others_report_costs_no_machine(cluster, verdict):
    cluster.looked("node3")
    cluster.see(verdict)
    assert cluster.asked == [] and cluster.said == []


def test_a_new_supervisor_knows_the_machine_from_the_log(cluster, tmp_path):
    log = EventLog("run-1", tmp_path, "supervisor", 1)
    for node in ("node2", "node3"):
        log.append("host.check", host="host-2", detail={"part": "passive", "verdict": "healthy", "node": node})
    log.close()
    cluster.see("replace")
    assert [node for node, _ in cluster.asked] == ["node3"]


def test_of_a_machine_that_nobody_has_named_nothing_is_done(cluster):
    cluster.see("replace")
    assert cluster.asked == [] and cluster.said == []


def test_where_it_is_not_allowed_the_command_is_said(cluster):
    cluster.looked("node3")
    cluster.refusal = AccessError("scontrol: slurm_update error: Invalid user id")
    cluster.see("replace", "GPU 3 is gone")
    typed = "scontrol update nodename=node3 state=drain reason='muster run run-1: GPU 3 is gone'"
    assert f"by an administrator: {typed}" in cluster.said[0]
    assert "account may not: scontrol: slurm_update error: Invalid user id" in cluster.said[0]
    cluster.looked("node5")
    cluster.refusal = BackendError("no scontrol on this machine")
    cluster.see("replace")
    assert "it could not be done: no scontrol" in cluster.said[1]


@pytest.mark.parametrize(("backend", "allowed", "count"), [("slurm", True, 1), ("slurm", False, 0), ("local", True, 0)])
def test_only_clusters_are_told_and_only_where_the_run_file_allows_it(tmp_path, monkeypatch, backend, allowed, count):
    class Supervisor:
        run_dir = tmp_path
        note = print

    class Spec:
        class check:
            take_out = allowed

    Spec.backend = backend  # type: ignore[attr-defined]
    monkeypatch.setattr("muster.app.run.take_out.read_spec", lambda _: Spec)
    monkeypatch.setattr("muster.app.run.take_out.read_run_id", lambda _: "run-1")
    assert len(machines_taken_out(Supervisor())) == count  # type: ignore[arg-type]


def test_every_back_end_that_has_a_command_does_it_itself_too():
    for name in backends.BACKENDS.names():
        assert (backends.get(name).provisioning.drain is None) == (taking_out(name, "node", "why") is None), name
