"""What only memory holds outlives a run that ends without a save: its hosts write it, and the next start goes on."""

import json

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
        assert committed.step >= 10 and committed.step >= run.step() - 1
    with LiveRun(tmp_path, spec_of(**changes, **{"training.steps": committed.step + 5})) as run:
        run.start()
        assert run.wait() == 0, run.story()
        restored = [event for event in run.events("checkpoint.restored") if event.step == committed.step]
        assert restored and restored[0].detail["tier"] == "disk", json.dumps([e.to_json() for e in restored])
