"""A snapshot that changed in memory is not saved at a run's end: an older one with a valid checksum is."""

import os
import signal

import pytest
from cluster import LiveRun, spec_of
from frozen import freeze

pytestmark = [pytest.mark.live, pytest.mark.timeout(240)]


def test_a_rotten_snapshot_is_not_written_at_the_end(tmp_path):
    changes = {"recovery.policy": "none", "recovery.heartbeat_timeout_s": 30.0, "training.steps": 500}
    with LiveRun(tmp_path, spec_of(**changes)) as run:
        run.start()
        run.wait_for_step(8)
        pids = [pid for pid, _ in run.ranks().values()]
        ring = freeze(run)
        rotten, older = ring.versions()
        ring.slot(rotten.slot)[1000] ^= 0x10
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
        assert run.wait() == 1, run.story()
        (committed,) = run.events("checkpoint.committed")
        assert committed.step == older.step, run.story()
        (finished,) = run.events("run.finished")
        assert f"step {committed.step} was written from memory" in finished.detail["reason"], run.story()
        assert f"step {rotten.step} could not be" in finished.detail["reason"]
        assert "does not match its checksum" in finished.detail["reason"]
