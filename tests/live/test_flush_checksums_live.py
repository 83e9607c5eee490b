"""A snapshot that changed in memory is not saved at a run's end: an older one with a valid checksum is."""

import os
import signal
import time

import pytest
from cluster import LiveRun, spec_of

from muster.checkpoint_format.snapshot_ring import Ring, file_name

pytestmark = [pytest.mark.live, pytest.mark.timeout(240)]


def test_a_rotten_snapshot_is_not_written_at_the_end(tmp_path):
    changes = {"recovery.policy": "none", "recovery.heartbeat_timeout_s": 30.0, "training.steps": 500}
    with LiveRun(tmp_path, spec_of(**changes)) as run:
        run.start()
        run.wait_for_step(8)
        pids = [pid for pid, _ in run.ranks().values()]
        run.wait_until(lambda: stopped_with_two_versions(run), "a moment at which both ranks hold two versions")
        ring, rotten = sealed(run)[:2]
        ring.slot(rotten.slot)[1000] ^= 0x10
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
        assert run.wait() == 1, run.story()
        (committed,) = run.events("checkpoint.committed")
        assert 0 < committed.step < rotten.step, run.story()
        (finished,) = run.events("run.finished")
        assert f"step {committed.step} was written from memory" in finished.detail["reason"], run.story()
        assert f"step {rotten.step} could not be" in finished.detail["reason"]
        assert "does not match its checksum" in finished.detail["reason"]


def stopped_with_two_versions(run):
    """Whether both ranks are stopped, and hold a checksummed version and an older one; else they are resumed."""
    run.kill_rank(0, signal.SIGSTOP)  # its peer comes to wait for it
    time.sleep(0.2)
    run.kill_rank(1, signal.SIGSTOP)
    if sealed(run) and sealed(run)[2]:
        return True
    for rank in (1, 0):
        run.kill_rank(rank, signal.SIGCONT)
    return False


def sealed(run):
    """(rank 1's ring, the newest version that both ranks hold, whether they hold an older one); None: no seal yet."""
    folder = run.memory()
    other, ring = (Ring.open(folder / file_name("own", "r1s2t1p1c1e1", rank), writable=True) for rank in (0, 1))
    both = [each for each in ring.versions() if other.find(each.step, each.attempt)]
    return (ring, both[0], len(both) > 1) if both and ring.checksum(both[0]) is not None else None
