"""What a policy may ask for beside replacing ranks: a reset of the hardware, another batch in another world."""

import os
from pathlib import Path

import pytest
from chaos import Judged
from cluster import spec_of
from fakes.metadata import change, metadata

from muster.protocol.client import HealthReport

pytestmark = [pytest.mark.live, pytest.mark.timeout(240)]

#: Stands in for NVIDIA's tool, which needs a GPU: notes what it was asked, and answers as told.
NVIDIA_SMI = """#!/bin/sh
echo "$@" >> "{note}"
pgrep -f "muster.rank.fork_server" > /dev/null && echo "GPU 00000000:0F:00.0 was successfully reset."
exit {code}
"""


def put_nvidia_smi(folder: Path, monkeypatch, code: int) -> Path:
    note = folder / "asked.txt"
    tool = folder / "nvidia-smi"
    tool.write_text(NVIDIA_SMI.format(note=note, code=code))
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    return note


@pytest.mark.parametrize("code, expected", [(0, ["reset"]), (1, ["reset", "swap"])], ids=["heals", "fails"])
def test_a_health_verdict_leads_to_a_reset_and_only_then_to_a_swap(tmp_path, monkeypatch, code, expected):
    note = put_nvidia_smi(tmp_path, monkeypatch, code)
    changes = {"resources.hosts": 2, "resources.ranks_per_host": 1, "resources.spare_hosts": 1, "training.steps": 40}
    with Judged(tmp_path / "run", spec_of(**changes)) as run:
        run.start()
        run.wait_for_spare()
        run.wait_for_step(10)
        sick = run.ranks()[1][1]
        run.tell(HealthReport(host=sick, evidence="Xid 79 on GPU 0", resettable=(0,)))
        run.ended()
        assert run.recoveries() == expected, run.story()
        assert note.read_text() == "--gpu-reset -i 0\n"
        (reset,) = run.events("host.reset")
        assert reset.host == sick and reset.detail["ok"] == (code == 0) and reset.detail["gpus"] == [0]
        assert (sick in run.events("attempt.started")[-1].detail["hosts"]) == (code == 0)
        assert all(event.detail["redone_steps"] <= 2 for event in run.events("incident.resolved")), run.story()


POLICY = """
from muster.policy.builtin import SHIPPED

decide = SHIPPED["default"].decide


def adjust(world):
    share = world.num_hosts / world.wanted_hosts
    return {"global_batch_size": round(world.global_batch_size * share), "learning_rate_scale": share}
"""


def test_a_users_policy_makes_the_batch_smaller_in_a_smaller_world(tmp_path):
    (tmp_path / "policy.py").write_text(POLICY)
    changes = {"resources.hosts": 3, "resources.min_hosts": 2, "resources.ranks_per_host": 1, "training.steps": 40,
               "recovery.policy": str(tmp_path / "policy.py"), "training.optimizer.schedule": "constant",
               "training.optimizer.warmup_steps": 0}  # fmt: skip
    with Judged(tmp_path / "run", spec_of(**changes)) as run:
        run.start()
        run.wait_for_step(10)
        run.signal_host("host-1")
        run.ended()
        first = run.events("attempt.started")[-1].detail["batch_schedule"][0]["first_step"]
        rate = run.spec.training.optimizer.learning_rate
        steps = {event.step: event.detail for event in run.events("step")}
        assert {steps[step]["rows"] for step in steps if step < first} == {12}
        assert {steps[step]["rows"] for step in steps if step >= first} == {8}
        assert steps[first - 1]["learning_rate"] == pytest.approx(rate)
        assert steps[40]["learning_rate"] == pytest.approx(rate * 2 / 3)


def test_the_clouds_notice_saves_and_leaves_with_75(tmp_path, monkeypatch):
    """As the metadata server of a Spot machine gives it, seconds before the machine goes."""
    with metadata() as (server, url):
        monkeypatch.setenv("MUSTER_METADATA", url)
        changes = {"resources.hosts": 1, "resources.ranks_per_host": 2, "training.steps": 2000}
        with Judged(tmp_path / "run", spec_of(**changes)) as run:
            run.start()
            run.wait_for_step(10)
            change(server, "preempted", "TRUE")
            run.ended(75)
            assert [event.detail["tier"] for event in run.events("checkpoint.committed")] == ["disk"]
            assert run.events("run.finished")[-1].detail["outcome"] == "preempted"
