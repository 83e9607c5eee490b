"""The node's condition in the agent's loop: a real program's words, its end, what the supervisor is told."""

import sys
import time
from datetime import UTC, datetime, timedelta

import pytest
from test_kernel_log_follower import on_host  # noqa: F401 (a fixture)

from muster.agent.hardware import node_condition_follower
from muster.protocol.codec import encode
from muster.protocol.pipes import NodeCondition


def stamp(**ago):
    return (datetime.now(UTC) - timedelta(**ago)).strftime("%Y-%m-%dT%H:%M:%SZ")


def condition(*numbers, since=None):
    inside = ",".join(f'"{number}":true' for number in numbers)
    return NodeCondition(status="True", reason=f"{{{inside}}}", since=since or stamp(seconds=-5))


@pytest.fixture
def following(on_host, tmp_path, monkeypatch):  # noqa: F811
    """A host that may not read its kernel log, and whose watcher says these words."""
    import subprocess

    def start(*words, environ=None, lasts=True, **more):
        lines = "".join(word if isinstance(word, str) else encode(word).decode() + "\n" for word in words)
        script = f"import sys, time; print({lines!r}, end='', flush=True); {'sys.stdin.read()' if lasts else ''}"
        started = []

        def start_program(log, module, *arguments, **streams):
            started.append((module, arguments))
            return subprocess.Popen([sys.executable, "-c", script], **streams)

        host = on_host(
            kmsg=str(tmp_path / "missing"), follow=("no-such-dmesg",), start_program=start_program,
            environ={"MUSTER_NODE": "gke-1", **(environ or {})}, **more,
        )  # fmt: skip
        host.follower.start()
        assert started == [(node_condition_follower.WATCHER, ("gke-1",))]
        assert "kernel log not readable" in host.notes[0] and "of node gke-1" in host.notes[0]
        return host

    return start


def test_a_number_that_appears_is_a_fault_of_the_host(following):
    host = following(NodeCondition(), condition(48))
    host.until(lambda: host.sent)
    (fault,) = host.sent
    assert (fault.verdict, fault.resettable) == ("reset", ()), "which GPU it was nobody says"
    assert "Xid 48" in fault.evidence and host.follower.standing() == fault
    assert host.follower.since(0, time.monotonic() - 60)[0].verdict.value == "reset", "in a hang's evidence, too"


def test_what_stood_there_before_is_not_judged_and_a_graver_one_beside_it_is(following):
    old = stamp(hours=3)
    host = following(condition(48, since=old), condition(48, 79, since=old))
    host.until(lambda: host.sent)
    (fault,) = host.sent
    assert fault.verdict == "replace" and "Xid 79" in fault.evidence
    assert any("from before this agent, not judged" in note for note in host.notes)


def test_a_programs_own_error_costs_no_host(following):
    host = following(condition(31))
    host.until(lambda: len(host.notes) == 2)
    assert not host.sent and "the program's own" in host.notes[1]


def test_a_refusal_and_a_torn_reason_are_said_and_nobody_is_called_faulty(following):
    refused = NodeCondition(problem='nodes "gke-1" is forbidden')
    host = following(refused, NodeCondition(status="True", reason="torn {"), "no message\n", condition(79))
    host.until(lambda: host.sent)
    assert "not seen: nodes" in host.notes[1] and "needs get on nodes" in host.notes[1]
    assert "cannot be read" in host.notes[2] and "a word of" in host.notes[3] and len(host.sent) == 1


def test_a_watcher_that_ends_is_said_once(following):
    host = following(NodeCondition(), lasts=False)
    host.until(lambda: len(host.notes) == 2)
    for _ in range(3):
        host.hub.run_once(0.01)
    assert len(host.notes) == 2 and "ended, so an Xid of a GPU is not seen" in host.notes[1]


def test_of_gpus_that_others_use_too_no_fault_is_ours(following):
    host = following(condition(48), environ={"NVIDIA_VISIBLE_DEVICES": "0,1"})
    host.until(lambda: len(host.notes) == 2)
    assert not host.sent and "a GPU that is not named, of which this run uses some" in host.notes[1]


def test_outside_gke_no_program_is_started(on_host, tmp_path):  # noqa: F811
    host = on_host(kmsg=str(tmp_path / "missing"), follow=("no-such-dmesg",), start_program=None)
    host.follower.start()
    assert host.notes[0].endswith("so an Xid of a GPU is not seen")
