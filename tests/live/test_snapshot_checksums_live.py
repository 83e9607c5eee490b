"""A snapshot that changes in memory is noticed when it is to be restored, and an older one is taken."""

import os
import signal
import time

import pytest
from chaos import Judged
from cluster import spec_of

from muster.checkpoint_format.snapshot_ring import Ring, file_name

pytestmark = [pytest.mark.live, pytest.mark.timeout(300)]


def test_a_rotten_snapshot_is_passed_over(tmp_path):
    with Judged(tmp_path, spec_of(**{"training.steps": 60, "recovery.heartbeat_timeout_s": 30.0})) as run:
        run.start()
        run.wait_for_step(8)
        pids = [pid for pid, _ in run.ranks().values()]
        run.kill_rank(0, signal.SIGSTOP)  # its peer comes to wait for it
        time.sleep(0.2)
        run.wait_until(lambda: rings(run)[2] is not None, "the seal of the newest version that both hold")
        run.kill_rank(1, signal.SIGSTOP)
        ring, rotten, _ = rings(run)
        ring.slot(rotten.slot)[1000] ^= 0x10
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
        run.ended()
        assert f"step {rotten.step} of attempt {rotten.attempt} of rank 1 does not match its checksum" in run.story()
        starts = [event.detail.get("resume_step") for event in run.events("attempt.started")]
        assert starts[1] == rotten.step and 0 < starts[2] < rotten.step, run.story()
        assert set(run.actions()) == {"restart"} and run.step() == 60, run.story()


def test_two_rotten_versions_in_a_row_are_both_passed_over(tmp_path):
    """Each is chosen once; then there is none in memory, and the run goes on from the disk."""
    changes = {"training.steps": 40, "recovery.heartbeat_timeout_s": 30.0, "checkpoint.every_steps": 8}
    with Judged(tmp_path, spec_of(**changes)) as run:
        run.start()
        run.wait_for_step(10)
        pids = [pid for pid, _ in run.ranks().values()]
        ring = frozen_with_equal_versions(run)
        rotten = [version.step for version in ring.versions()]
        for version in ring.versions():
            ring.slot(version.slot)[1000] ^= 0x10
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
        run.ended()
        rejected = [event.step for event in run.events("snapshot.rejected")]
        assert len(rejected) == len(set(rejected)) > 0 and set(rejected) <= set(rotten), run.story()
        starts = [event.detail.get("resume_step") for event in run.events("attempt.started")]
        assert starts[1:3] == sorted(rotten, reverse=True)[:2] and len(starts) == 4, run.story()
        (restored,) = [event for event in run.events("checkpoint.restored") if event.detail["tier"] == "disk"][:1]
        assert 0 < restored.step < min(rotten), run.story()
        assert set(run.actions()) == {"restart"} and run.step() == 40, run.story()


def frozen_with_equal_versions(run):
    """Both ranks stand still and hold the same versions; rank 1's ring. Rank 0 may stop before it has copied a step."""
    for _ in range(20):
        step = run.step()
        run.kill_rank(0, signal.SIGSTOP)  # its peer comes to wait for it
        time.sleep(0.2)
        run.kill_rank(1, signal.SIGSTOP)
        ring, _, _ = rings(run)
        other = Ring.open(run.memory() / file_name("own", "r1s2t1p1c1e1", 0))
        if all(other.find(version.step, version.attempt) for version in ring.versions()):
            return ring
        for rank in (0, 1):
            run.kill_rank(rank, signal.SIGCONT)
        run.wait_for_step(step + 2)
    raise AssertionError(f"never the same versions: {run.story()}")


def rings(run):
    """(rank 1's ring, the newest version that both ranks hold, its seal)."""
    folder = run.memory()
    other, ring = (Ring.open(folder / file_name("own", "r1s2t1p1c1e1", rank), writable=True) for rank in (0, 1))
    version = next(each for each in ring.versions() if other.find(each.step, each.attempt))
    return ring, version, ring.checksum(version)
