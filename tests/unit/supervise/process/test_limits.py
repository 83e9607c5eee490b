"""When the run file's limits end a run: a fold over purchases."""

from datetime import UTC, datetime

import pytest

from muster.config.spec import Limits
from muster.core.events import Event
from muster.supervise.process.limits import LimitsGuard

NS = 1_000_000_000
HOUR = 3600 * NS


def guard(*events, grace_s=30.0, **limits):
    found = LimitsGuard(limits=Limits(**limits), grace_s=grace_s)
    for at_h, kind, host, *price in events:
        detail = {"gpus": 8, "role": "active", **({"usd_per_hour": price[0]} if price else {})}
        found.add(Event(run_id="r", attempt=0, seq=0, mono_ns=0, wall_ns=int(at_h * HOUR), host=host, kind=kind,
                        detail=detail if kind == "host.allocated" else {"reason": "x"}))  # fmt: skip
    return found


def due_h(found, at_h=0.0):
    reached = found.next(int(at_h * HOUR))
    return None if reached is None else reached.at_wall_ns / HOUR


def test_no_limit_is_never_reached():
    assert guard((0, "host.allocated", "a", 10.0)).next(HOUR) is None


def test_hours_count_while_hosts_are_held():
    """An hour, a pause without hosts, and what is left of two; the save is done before."""
    spans = [
        (0, "host.allocated", "a"),
        (0.5, "host.allocated", "b"),
        (1, "host.released", "a"),
        (1, "host.released", "b"),
    ]
    assert due_h(guard(*spans, max_hours=2)) is None, "nothing is held"
    again = guard(*spans, (5, "host.allocated", "a"), max_hours=2)
    assert due_h(again) == pytest.approx(6 - 30 / 3600)
    assert "limits.max_hours 2" in again.next(0).reason


def test_a_short_limit_is_not_eaten_up_by_the_grace():
    assert due_h(guard((0, "host.allocated", "a"), max_hours=0.01)) == pytest.approx(0.009)


def test_dollars_of_all_hosts_that_are_held():
    one = guard((0, "host.allocated", "a", 10.0), max_usd=100, grace_s=0)
    assert due_h(one) == pytest.approx(10)
    two = guard((0, "host.allocated", "a", 10.0), (4, "host.allocated", "b", 10.0), max_usd=100, grace_s=0)
    assert due_h(two, at_h=4) == due_h(two, at_h=6) == pytest.approx(7), "60 left at 20 an hour"
    assert two.spent_usd(6 * HOUR) == pytest.approx(80)
    gone = guard((0, "host.allocated", "a", 10.0), (4, "host.allocated", "b", 10.0), (5, "host.released", "a"),
                 max_usd=100, grace_s=0)  # fmt: skip
    assert due_h(gone, at_h=5) == pytest.approx(9)


def test_what_has_no_price_cannot_be_kept_and_is_named():
    unknown = guard((0, "host.allocated", "a"), max_usd=100)
    assert due_h(unknown) is None and unknown.unpriced == ["a"]
    free = guard((0, "host.allocated", "a", 0.0), max_usd=100)
    assert due_h(free) is None and free.unpriced == []


def test_a_deadline_leaves_the_grace_and_the_first_limit_counts():
    at = datetime(1970, 1, 1, 3, 0, tzinfo=UTC).isoformat()
    found = guard((0, "host.allocated", "a", 10.0), max_usd=1000, max_hours=50, deadline=at)
    assert due_h(found) == pytest.approx(3 - 30 / 3600)
    assert "limits.deadline" in found.next(0).reason
    assert "max_usd" in guard((0, "host.allocated", "a", 10.0), max_usd=10, max_hours=50, deadline=at).next(0).reason
