"""A stopped rank is found within the silence that is allowed, by looks at its process; nothing else wakes anybody."""

import math

import pytest

from muster.agent.ranks import hang_detector
from muster.agent.ranks.hang_detector import Limits, due_s, find_hung_ranks
from muster.agent.ranks.rank_process import Worker
from muster.core.heartbeat_timing import HeartbeatTiming

LIMITS = Limits(timing=HeartbeatTiming(0.4), step_s=30.0)
#: Of ranks whose parent tells of stops.
TOLD = Limits(timing=HeartbeatTiming(0.4), step_s=30.0, reports_stops=lambda _: True)


class Rank:
    """One that says something every ``step_s``, and may be stopped; its agent wakes for messages and deadlines.

    ``parent_tells``: of stops, by a message that wakes the agent (with ``TOLD``)."""

    parent_tells = True

    def __init__(self, monkeypatch, step_s, limits=LIMITS):
        self.limits = limits
        self.worker, self.step_s, self.stopped, self.looks = (
            Worker(pid=1, rank=0, attempt=1, peer=None, pidfd=1),
            step_s,
            set(),
            [],
        )
        monkeypatch.setattr(hang_detector, "is_stopped", self.is_stopped)
        self.now_s, self.wakes = 0.0, 0
        self.speaks_s = step_s

    def is_stopped(self, _pid):
        self.looks.append(self.now_s)
        return any(begin <= self.now_s < end for begin, end in self.stopped)

    def found_s(self, until_s):
        """When it is named; None: it was not, until then."""
        while self.now_s < until_s:
            silent = any(begin <= self.speaks_s for begin, end in self.stopped if end == math.inf)
            told_s = min((begin for begin, _ in self.stopped if begin > self.now_s), default=math.inf)
            told_s = told_s if self.limits is TOLD and self.parent_tells else math.inf
            self.now_s = min(due_s([self.worker], self.limits), math.inf if silent else self.speaks_s, told_s)
            if self.now_s == told_s:
                self.worker.on_stop_reported(self.now_s)
            self.wakes += 1
            if self.now_s == self.speaks_s and not silent:
                self.worker.heard(self.now_s)
                self.speaks_s += self.step_s
            if find_hung_ranks([self.worker], self.limits, host="h", now_s=self.now_s):
                return self.now_s
        return None


@pytest.mark.parametrize("limits", [LIMITS, TOLD], ids=["looked at", "told"])
@pytest.mark.parametrize("step_s", [0.1, 0.4, 0.55, 3.0, 50.0])
@pytest.mark.parametrize("at_s", [2.0, 2.09, 2.21, 2.33, 2.37, 2.5])
def test_one_that_is_stopped_is_found_within_the_limit(monkeypatch, step_s, at_s, limits):
    rank = Rank(monkeypatch, step_s, limits)
    rank.stopped.add((at_s, math.inf))
    assert at_s < rank.found_s(60.0) <= at_s + LIMITS.timing.timeout_s + 1e-9


@pytest.mark.parametrize("step_s", [0.4, 0.55, 50.0])
def test_a_stop_that_no_parent_tells_of_is_found_within_three_seconds(monkeypatch, step_s):
    """A debugger's: the kernel tells the debugger."""
    rank = Rank(monkeypatch, step_s, TOLD)
    rank.parent_tells = False
    rank.stopped.add((2.21, math.inf))
    assert 2.21 < rank.found_s(60.0) <= 2.21 + 3.0 + 1e-9


def test_a_rank_whose_parent_tells_costs_a_look_in_two_seconds_at_most(monkeypatch):
    rank = Rank(monkeypatch, 0.45, TOLD)
    assert rank.found_s(20.0) is None and rank.looks == [] and rank.wakes in (44, 45, 46)
    rank = Rank(monkeypatch, 50.0, TOLD)
    assert rank.found_s(40.0) is None and 10 < len(rank.looks) < 20
    assert Rank(monkeypatch, 0.45).found_s(20.0) is None


@pytest.mark.parametrize("at_s", [5.0, 6.1, 7.23, 8.41])
@pytest.mark.parametrize("share", [0.3, 0.6, 0.9])
def test_one_that_is_told_and_goes_on_within_the_limit_is_no_hang(monkeypatch, at_s, share):
    """It was silent long before, so that the first look of one that nobody tells of might fall anywhere."""
    rank = Rank(monkeypatch, 50.0, TOLD)
    rank.stopped.add((at_s, at_s + share * TOLD.timing.timeout_s))
    assert rank.found_s(40.0) is None


@pytest.mark.parametrize("is_reported", [True, False])
def test_a_longer_limit_than_three_seconds_stays_what_it_is(monkeypatch, is_reported):
    rank = Rank(
        monkeypatch, 500.0, Limits(timing=HeartbeatTiming(8.0), step_s=math.inf, reports_stops=lambda _: is_reported)
    )
    rank.stopped.add((100.0, math.inf))
    found_s = rank.found_s(400.0)
    assert 102.0 <= found_s <= 108.0 and len(rank.looks) <= 20


def test_one_that_goes_on_again_is_no_longer_looked_at_often(monkeypatch):
    rank = Rank(monkeypatch, 50.0, TOLD)
    rank.stopped.add((5.0, 5.02))
    assert rank.found_s(20.0) is None and len(rank.looks) < 15 and not rank.worker.stop_reported


@pytest.mark.parametrize("limits", [LIMITS, TOLD], ids=["looked at", "told"])
def test_one_that_is_held_for_a_moment_is_no_hang(monkeypatch, limits):
    rank = Rank(monkeypatch, 50.0, limits)
    rank.stopped |= {(number * 0.16, number * 0.16 + 0.05) for number in range(1, 180)}
    assert rank.found_s(29.0) is None and (limits is TOLD or len(rank.looks) > 80)


def test_short_steps_cost_no_look_and_no_wake_of_their_own(monkeypatch):
    rank = Rank(monkeypatch, 0.1)
    assert rank.found_s(10.0) is None
    assert rank.looks == [] and rank.wakes in (100, 101)


def test_a_rank_of_which_nothing_is_known_yet_is_not_late(monkeypatch):
    """It starts: the supervisor watches that."""
    rank = Rank(monkeypatch, 500.0)
    assert rank.found_s(400.0) is None
    rank.worker.first_step, rank.worker.stepped = 0, True
    rank.worker.progress_s = 400.0
    assert rank.found_s(500.0) == pytest.approx(430.0, abs=0.4)
