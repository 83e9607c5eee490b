"""Five ways to stand still on gloo, one after the other in one run: each is named, with its line, before its ranks are
ended, and the run goes on."""

import pytest
from cluster import LiveRun

from muster.config.spec import RunSpec

pytestmark = [pytest.mark.live, pytest.mark.timeout(240)]

#: Rank 1 stands still in the next way after every third step of an attempt, until all ways have been taken.
SCRIPT = """
import ctypes, os, queue, signal, sys, threading, time
from pathlib import Path
import torch
import torch.distributed as dist
import muster.run as muster

HERE, WAYS = Path(__file__).parent, sys.argv[1].split(",")
dist.init_process_group("gloo")
rank = dist.get_rank()


class Rows(torch.utils.data.IterableDataset):
    def __iter__(self):
        yield 1
        time.sleep(600)  # line: loader
        yield 2


def stand_still(way):
    if way == "code":
        time.sleep(600)  # line: code
    elif way == "gil":
        ctypes.PyDLL(None).sleep(600)  # line: gil
    elif way == "mismatch":
        dist.broadcast(torch.zeros(4), src=0)  # line: mismatch
    elif way == "loader":
        for _ in torch.utils.data.DataLoader(Rows(), batch_size=1):
            pass
    elif way == "stopped":
        os.kill(os.getpid(), signal.SIGSTOP)  # line: stopped


state = {"weights": torch.zeros(4)}
step = first = muster.restore(state)
while True:
    step += 1
    taken = [way for way in WAYS if (HERE / way).exists()]
    if rank == 1 and step == first + 3 and len(taken) < len(WAYS):
        way = WAYS[len(taken)]
        (HERE / way).touch()
        stand_still(way)
    dist.all_reduce(state["weights"])  # line: wait
    time.sleep(0.02)
    muster.save(step, state)
    muster.heartbeat(step, loss=0.0)
    if step == first + 10 or muster.should_stop():
        break
muster.finish(step, state)
dist.destroy_process_group()
"""


def line_of(mark):
    return next(number for number, line in enumerate(SCRIPT.splitlines(), 1) if line.endswith(f"# line: {mark}"))


def test_each_of_five_hangs_is_named_with_its_line_before_the_kill(tmp_path):
    ways = ["code", "mismatch", "loader", "gil", "stopped"]
    script = tmp_path / "hangs.py"
    script.write_text(SCRIPT)
    spec = RunSpec.model_validate(
        {
            "name": "hangs",
            "command": [str(script), ",".join(ways)],
            "checkpoint": {"every_steps": 0},
            "resources": {"device": "cpu", "ranks_per_host": 3, "threads_per_rank": 1},
            "recovery": {"heartbeat_timeout_s": 2.0, "step_timeout_s": 3.0},
        }
    )
    with LiveRun(tmp_path / "run", spec) as run:
        run.start()
        assert run.wait() == 0, run.story()
        gathered = run.events("evidence.gathered")
        detected = run.troubles()
        assert [event.detail.get("culprit") for event in gathered] == ways, run.story()
        for way, evidence, incident in zip(ways, gathered, detected, strict=True):
            said = f"{way}: {evidence.detail}"
            assert incident.rank == 1 and incident.detail["incident_id"] == evidence.detail["incident_id"], said
            assert incident.detail["culprit"] == way and "noticed as: rank" in incident.detail["evidence"], said
            assert evidence.detail["victims"] == 2, said
            place = evidence.detail.get("place")
            from_outside = way in ("gil", "stopped")  # only py-spy tells its line: where it is, and has had the time
            assert place == f"{script}:{line_of(way)}" or (from_outside and place is None), said
            if way == "mismatch":
                assert evidence.detail["other_place"] == f"{script}:{line_of('wait')}", said
        assert run.recoveries() == ["restart"] * 5, run.story()
        ended = run.events("rank.exited")
        for evidence in gathered:
            later = [event.wall_ns > evidence.wall_ns for event in ended if event.attempt == evidence.attempt]
            assert later and all(later), "before the kill"
