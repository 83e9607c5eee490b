"""Times that follow from ``heartbeat_timeout_s``: their values, and that every reader takes them from one place."""

import ast
from pathlib import Path

import pytest

from muster.core.heartbeat_timing import CONFIRM_SHARE, EARLY_SHARE, LOOK_SHARE, HeartbeatTiming

SOURCE = Path(__file__).parents[3] / "src" / "muster"
pytestmark = pytest.mark.reads("src/**")


#: What is expected at a timeout of 0.3, 3, 30 and 20,000 s.
TABLE = {
    "interval_s": (0.075, 0.75, 7.5, 3600.0),
    "unacknowledged_s": (1.0, 4.5, 45.0, 21_600.0),
    "own_pause_s": (0.03, 0.3, 3.0, 2000.0),
    "replicator_stopped_after_s": (3.0, 3.0, 30.0, 20_000.0),
    "cut_off_after_s": (6.0, 9.0, 90.0, 60_000.0),
}


@pytest.mark.parametrize("name", TABLE)
def test_each_time_at_four_timeouts(name):
    values = [getattr(HeartbeatTiming(timeout_s), name) for timeout_s in (0.3, 3.0, 30.0, 20_000.0)]
    assert values == pytest.approx(TABLE[name])


@pytest.mark.parametrize(
    ("timeout_s", "adoption_s", "bucket_s", "reported_s"),
    [(0.3, 5.0, 15.0, 3.0), (3.0, 5.0, 15.0, 3.0), (30.0, 30.0, 30.0, 30.0), (20_000.0, 20_000.0, 20_000.0, 20_000.0)],
)
def test_times_that_depend_on_more_than_the_timeout(timeout_s, adoption_s, bucket_s, reported_s):
    timing = HeartbeatTiming(timeout_s)
    assert (timing.adoption_s(in_bucket=False), timing.adoption_s(in_bucket=True)) == (adoption_s, bucket_s)
    assert timing.rank_silence_s(reports_stops=True) == reported_s
    assert timing.rank_silence_s(reports_stops=False) == timeout_s
    assert timing.host_lost_after_s(timing.interval_s) == timeout_s
    assert timing.first_heartbeat_after_s(timing.interval_s) == 10 * timeout_s


def test_a_watchdog_that_keeps_a_longer_interval_is_waited_for():
    timing = HeartbeatTiming(0.3)
    assert timing.host_lost_after_s(0.5) == 1.5 and timing.first_heartbeat_after_s(0.5) == 15.0
    assert timing.shortest_s([0.1, 0.5]) == 1.5 and timing.shortest_s([]) == 0.0


@pytest.mark.parametrize("timeout_s", [0.3, 3.0, 14_000.0])
def test_one_late_heartbeat_loses_no_host(timeout_s):
    """The next one but one arrives within the limit, whatever the first of them does."""
    timing = HeartbeatTiming(timeout_s)
    assert 2 * timing.interval_s < timing.host_lost_after_s(timing.interval_s)


def test_a_process_that_stays_stopped_is_confirmed_within_its_limit():
    assert LOOK_SHARE + CONFIRM_SHARE == 1 and EARLY_SHARE < LOOK_SHARE


def test_nothing_else_derives_from_the_timeout():
    """The key is read by ``Recovery.timing`` alone, and nothing computes with ``timing.timeout_s`` elsewhere."""
    readers, computing = set(), set()
    for path in SOURCE.rglob("*.py"):
        text, name = path.read_text(), path.relative_to(SOURCE).as_posix()
        if "heartbeat_timeout_s" not in text and "timing" not in text:
            continue
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.Attribute) and node.attr == "heartbeat_timeout_s":
                readers.add(name)
            if isinstance(node, ast.BinOp) or (isinstance(node, ast.Call) and ast.unparse(node.func) in ("max", "min")):
                computing |= {name for part in ast.walk(node) if ast.unparse(part).endswith("timing.timeout_s")}
    assert readers == {"config/spec.py"} and computing == set()
