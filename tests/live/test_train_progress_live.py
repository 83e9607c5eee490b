"""The step watchdog tells something long from a rank that does nothing."""

import pytest
from chaos import SCRIPT_LOSS, Judged, script_spec

pytestmark = [pytest.mark.live, pytest.mark.timeout(300)]


def test_an_evaluation_longer_than_the_step_limit_is_no_hang(tmp_path):
    """3 s in which no step is taken and progress is told, at a limit of 1.5 s."""
    with Judged(tmp_path / "run", script_spec(tmp_path, "evaluate", step_timeout_s=1.5)) as run:
        run.start()
        run.ended()
        assert run.troubles() == [], run.story()
        steps = {event.step: event.mono_ns for event in run.events("step")}
        assert steps[12] - steps[11] >= 3e9, "it was longer than the limit"
        assert run.events("step")[-1].detail["loss"] == pytest.approx(SCRIPT_LOSS, rel=1e-12)
