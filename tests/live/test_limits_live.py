"""A limit of the run file ends a real run: saved, with exit code 130 and the limit as its reason."""

import pytest
from cluster import LiveRun, spec_of

from muster.report import api

pytestmark = [pytest.mark.live, pytest.mark.timeout(150)]


def test_dollars_end_a_run_with_a_save(tmp_path):
    """A host at $360 an hour is 10 cents a second: three dollars are half a minute."""
    spec = spec_of(**{"training.steps": 1_000_000, "limits.max_usd": 3.0, "resources.usd_per_host_hour": 360.0})
    with LiveRun(tmp_path, spec) as run:
        run.start()
        assert run.wait(120) == 130, run.story()
        (finished,) = run.events("run.finished")
        (notice,) = run.events("termination.notice")
        document = api.load(run.dir).to_json()
    print(f"ended at ${document['cost']['usd']:.2f}: {finished.detail['reason']}")
    assert finished.detail["outcome"] == "stopped"
    assert notice.detail["source"] == "limits.max_usd 3"
    assert finished.detail["reason"].startswith("limits.max_usd 3: saved and left")
    assert 1.0 < document["cost"]["usd"] < 6.0, "it stopped before the limit; a busy machine takes its time to save"
    assert run.events("checkpoint.committed"), "what was trained can be resumed"
