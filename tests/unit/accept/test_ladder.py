"""The ladder: it stops at the first failure, clears up in every case, and never passes its budget, also where
everything takes as long as it may."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from muster.accept.ladder import CLEARING_S, Level, Meter, NotHere, climb
from muster.core.errors import MusterError


class Clock:
    def __init__(self):
        self.now_s = 0.0

    def sleep(self, seconds):
        self.now_s += seconds

    def monotonic_ns(self):
        return int(self.now_s * 1e9)

    wall_ns = monotonic_ns


def meter(budget):
    return Meter(budget=budget, clock=Clock())


def rung(name, *, act=lambda meter: "fine", usd=0.0, limit_s=60.0):
    return Level(name=name, title=name, act=act, per_hour=usd, limit_s=limit_s)


def fails(meter):
    raise MusterError("no such zone")


def test_it_stops_at_the_first_failure_and_clears_up():
    cleared = []
    clear = rung("down", act=lambda meter: cleared.append(1) or "nothing is left")
    climbed = climb([rung("a"), rung("b", act=fails), rung("c")], clear, meter(1), lambda text: None)
    assert [(one.name, one.outcome) for one in climbed] == [("a", "passed"), ("b", "failed"), ("down", "passed")]
    assert climbed[1].said == "no such zone" and cleared


def test_what_a_place_does_not_have_is_passed_over():
    def not_here(meter):
        raise NotHere("slurm has nothing to make")

    climbed = climb([rung("up", act=not_here), rung("train")], rung("down"), meter(1), lambda text: None)
    assert [one.outcome for one in climbed] == ["skipped", "passed", "passed"]


def test_our_own_mistake_still_clears_up():
    cleared = []

    def broken(meter):
        raise ZeroDivisionError

    clear = rung("down", act=lambda meter: cleared.append(1) or "")
    with pytest.raises(ZeroDivisionError):
        climb([rung("a", act=broken)], clear, meter(1), lambda text: None)
    assert cleared


def test_a_rung_that_might_be_too_dear_is_not_begun():
    begun = []
    climbed = climb(
        [rung("train", act=lambda meter: begun.append(1) or "", usd=20.0, limit_s=3600.0)], rung("down"), meter(29.0),
        lambda text: None,
    )  # fmt: skip
    assert [one.outcome for one in climbed] == ["budget", "passed"] and not begun
    assert "$30.00" in climbed[0].said and "$29.00" in climbed[0].said


def test_a_wait_that_never_ends_is_ended_by_the_budget_before_it_is_passed():
    """Broken on purpose: the rung says an hour, and its programs wait for ever."""
    of = meter(20.0)

    def waits(meter):
        meter.wait(lambda: False, "step 5", 1e9)

    climbed = climb([rung("train", act=waits, usd=10.0, limit_s=3600.0)], rung("down", act=slow), of, lambda text: None)
    assert [one.outcome for one in climbed] == ["budget", "passed"]
    assert 19.9 < climbed[-1].spent <= 20.0, "all of it is used, and none is passed"


def slow(meter):
    """As long as clearing up may take."""
    meter.clock.sleep(CLEARING_S)
    return "nothing is left"


@given(
    budget=st.floats(0, 50),
    rows=st.lists(st.tuples(st.floats(0, 40), st.floats(1, 7200), st.floats(0, 20000)), max_size=6),
)
def test_never_more_than_the_budget(budget, rows):
    of = meter(budget)

    def act_for(needs_s):
        def act(meter):
            until = meter.clock.now_s + needs_s
            meter.wait(lambda: meter.clock.now_s >= until, "something", 1e9)
            return "there"

        return act

    rungs = [rung(str(n), act=act_for(needs), usd=usd, limit_s=limit) for n, (usd, limit, needs) in enumerate(rows)]
    climbed = climb(rungs, rung("down", act=slow), of, lambda text: None)
    assert climbed[-1].spent <= budget + 1e-6
