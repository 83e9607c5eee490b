"""A snapshot that changes in memory is noticed when it is to be restored, and an older one is taken."""

import os
import signal

import pytest
from chaos import Judged
from cluster import spec_of
from frozen import freeze

pytestmark = [pytest.mark.live, pytest.mark.timeout(300)]


def test_a_rotten_snapshot_is_passed_over(tmp_path):
    with Judged(tmp_path, spec_of(**{"training.steps": 120, "recovery.heartbeat_timeout_s": 30.0})) as run:
        run.start()
        run.wait_for_step(8)
        pids = [pid for pid, _ in run.ranks().values()]
        ring = freeze(run)
        rotten, older = ring.versions()
        ring.slot(rotten.slot)[1000] ^= 0x10
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
        run.ended()
        assert f"step {rotten.step} of attempt {rotten.attempt} of rank 1 does not match its checksum" in run.story()
        starts = [event.detail.get("resume_step") for event in run.events("attempt.started")]
        assert starts[1:] == [rotten.step, older.step], run.story()
        assert set(run.recoveries()) == {"restart"} and run.step() == 120, run.story()


def test_two_rotten_versions_in_a_row_are_both_passed_over(tmp_path):
    """Each is chosen once; then there is none in memory, and the run goes on from the disk."""
    changes = {"training.steps": 150, "recovery.heartbeat_timeout_s": 30.0, "checkpoint.every_steps": 60}
    with Judged(tmp_path, spec_of(**changes)) as run:
        run.start()
        run.wait_until(lambda: run.events("checkpoint.committed"), "a checkpoint on the disk")
        run.wait_for_step(run.step() + 2)
        pids = [pid for pid, _ in run.ranks().values()]
        ring = freeze(run)
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
        assert set(run.recoveries()) == {"restart"} and run.step() == 150, run.story()
