"""Logs of AI-Hypercomputer/resiliency: its own definition of goodput, and ours."""

import json
from datetime import datetime, timedelta
from pathlib import Path

import pytest

from muster.core.errors import UsageError
from tools import resiliency_log

LOG = Path(__file__).parents[3].parent / "shared" / "data" / "oracles" / "goodput" / "event_log.log"
BEGIN = datetime(2025, 4, 2, 6, 0, 0)


def line(minute, kind, **given):
    return json.dumps(
        {"timestamp": (BEGIN + timedelta(minutes=minute)).isoformat(), "event_type": kind, "job_name": "j", **given}
    )


def test_the_example_of_its_own_documentation():
    """200 minutes, 50 steps of 2 minutes: 50 %."""
    lines = [
        line(0, "user_scheduled"),
        line(5, "job_started", node_rank=0),
        line(10, "checkpoint_loaded", step=0),
        line(100, "checkpoint_saved", step=25),
        line(150, "checkpoint_loaded", step=25),
        line(190, "checkpoint_saved", step=50),
        line(200, "user_terminated"),
    ]
    assert resiliency_log.measure(resiliency_log.parse(lines), 120.0).google_goodput == pytest.approx(0.5)


def test_an_impossible_step_time_is_refused():
    lines = [
        line(0, "job_started", node_rank=0),
        line(1, "checkpoint_loaded", step=0),
        line(10, "checkpoint_saved", step=10),
    ]
    with pytest.raises(UsageError, match="impossible"):
        resiliency_log.measure(resiliency_log.parse(lines), 61.0)
    with pytest.raises(UsageError, match="above 0"):
        resiliency_log.measure(resiliency_log.parse(lines), 0.0)


def test_not_such_a_log():
    with pytest.raises(UsageError, match="line 1 is not an event"):
        resiliency_log.parse(["{}", "{}"])
    with pytest.raises(UsageError, match="no events"):
        resiliency_log.parse([""])
    with pytest.raises(UsageError, match="nothing to count"):
        resiliency_log.measure(resiliency_log.parse([line(0, "job_started", node_rank=0)]), 8.0)


def test_a_torn_last_line_is_left_out():
    lines = [line(0, "job_started", node_rank=0), line(1, "checkpoint_loaded", step=0), '{"timestamp": "2025-']
    assert len(resiliency_log.parse(lines)) == 2


@pytest.fixture(scope="module")
def found():
    if not LOG.is_file():
        pytest.skip(f"the 112-node log is not here ({LOG})")
    return resiliency_log.measure(resiliency_log.parse(LOG.read_text().splitlines()), 8.0).to_json()


def test_the_112_node_log_by_its_own_calculator(found):
    """The calculator's own test expects 43.43365004195837 % from 193 counted events at 8 s a step."""
    assert found["google_goodput"] == pytest.approx(0.4343365004195837, rel=1e-12)
    assert found["google"]["events"] == 7798
    assert found["google"]["events_counted"] == 193
    assert found["google"]["steps"] == 1920
    assert found["google"]["runtime_s"] == pytest.approx(35364.285491)
    assert found["google"]["rank_0_alone"] == pytest.approx(0.43631, abs=1e-5)


def test_the_112_node_log_by_ours(found):
    ours = found["goodput"]
    assert ours["nodes_seen"] == [112, 108, 104, 100]
    assert (ours["loads"], ours["loads_without_a_save"]) == (44, 22)
    assert ours["step_s"] == pytest.approx(8.01, abs=0.01)
    assert sum(ours["wall_s"].values()) == pytest.approx(found["google"]["runtime_s"], rel=1e-9)
    assert ours["wall_s"]["warmup"] / 22 == pytest.approx(130, abs=3)
    assert 0.40 < ours["active"] < ours["time"] < found["google_goodput"]
    assert len(found["differences"]) >= 4


def test_the_112_node_log_with_an_impossible_step_time():
    if not LOG.is_file():
        pytest.skip("the 112-node log is not here")
    with pytest.raises(UsageError, match=r"103\.2%"):
        resiliency_log.measure(resiliency_log.parse(LOG.read_text().splitlines()), 19.0)
