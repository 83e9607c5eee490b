"""Snapshots in memory survive a run that ends without a save: its hosts write them, and the next start continues."""

import pytest
from cluster import LiveRun, spec_of

pytestmark = [pytest.mark.live, pytest.mark.timeout(240)]


def test_a_run_that_fails_leaves_its_last_applied_step_on_the_disk(tmp_path):
    changes = {"resources.hosts": 2, "resources.ranks_per_host": 1, "recovery.policy": "none"}
    with LiveRun(tmp_path, spec_of(**changes)) as run:
        run.start()
        run.wait_for_step(10)
        run.kill_rank(0)
        assert run.wait() == 1, run.story()
        (finished,) = run.events("run.finished")
        assert "was written from memory" in finished.detail["reason"], run.story()
        (committed,) = run.events("checkpoint.committed")
        # A kill between a rank's update and its snapshot (milliseconds) leaves the step before.
        assert committed.step >= 9 and committed.step >= run.step() - 1 and committed.rank is None, run.story()
    with LiveRun(tmp_path, spec_of(**{"training.steps": committed.step + 5})) as run:  # both ranks on one host
        run.start()
        assert run.wait() == 0, run.story()
        restored = run.events("checkpoint.restored")
        assert {(event.step, event.detail["tier"]) for event in restored} == {(committed.step, "disk")}, run.story()
        steps = [event.step for event in run.events("step")]
        assert max(steps) == committed.step + 5, run.story()
        assert sum(steps.count(step) - 1 for step in set(steps)) <= 1, "nothing applied was lost"
