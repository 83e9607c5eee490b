"""A stopped rank is found within the silence that is allowed, by looks at its process; nothing else wakes anybody."""

import math

import pytest
from fakes.host import VirtualHost, spec_of

from muster.agent.ranks import hangs
from muster.agent.values.actions import Look
from muster.agent.values.events import ForkServerMessage, PeerLost, RankMessage, SupervisorConnected
from muster.protocol.fork_server import ChildStopped
from muster.protocol.rank_agent import RankBeat, RankProgress
from muster.protocol.to_supervisor import RankHang, RanksProgress

LIMIT_S = 0.4


class Rank:
    """One that says something every ``step_s``, and may be stopped; its agent wakes for messages and deadlines.

    ``told``: it has a parent that reports stops; ``parent_tells``: and that one does."""

    parent_tells = True

    def __init__(self, step_s, told=False, limit_s=LIMIT_S, step_timeout_s=30.0):
        recovery = {"heartbeat_timeout_s": limit_s, "step_timeout_s": step_timeout_s, "warm_standby": False}
        self.host = VirtualHost(spec=spec_of(recovery=recovery)).supervised()
        if told:
            self.host.with_fork_server()
        self.host.now_s = 0.0
        self.rank, self.step_s, self.stops, self.told = self.host.rank(), step_s, set(), told
        self.wakes, self.speaks_s = 0, step_s

    @property
    def looks(self):
        return self.host.did(Look)

    def found_s(self, until_s):
        """When it is named; None: it was not, until then."""
        host = self.host
        while host.now_s < until_s:
            silent = any(begin <= self.speaks_s for begin, end in self.stops if end == math.inf)
            told_s = min((begin for begin, _ in self.stops if begin > host.now_s), default=math.inf)
            told_s = told_s if self.told and self.parent_tells else math.inf
            host.now_s = min(hangs.due_s(host.state), math.inf if silent else self.speaks_s, told_s)
            host.stopped = {99} if any(begin <= host.now_s < end for begin, end in self.stops) else set()
            if host.now_s == told_s:
                host.give(ForkServerMessage(ChildStopped(pid=99)))
            self.wakes += 1
            if host.now_s == self.speaks_s and not silent:
                host.give(RankMessage(1, RankProgress(attempt=0, rank=0)))
                self.speaks_s += self.step_s
            host.tick()
            if host.of(RankHang):
                return host.now_s
        return None


@pytest.mark.parametrize("told", [False, True], ids=["looked at", "told"])
@pytest.mark.parametrize("step_s", [0.1, 0.4, 0.55, 3.0, 50.0])
@pytest.mark.parametrize("at_s", [2.0, 2.09, 2.21, 2.33, 2.37, 2.5])
def test_one_that_is_stopped_is_found_within_the_limit(step_s, at_s, told):
    rank = Rank(step_s, told)
    rank.stops.add((at_s, math.inf))
    assert at_s < rank.found_s(60.0) <= at_s + LIMIT_S + 1e-9


@pytest.mark.parametrize("step_s", [0.4, 0.55, 50.0])
def test_a_stop_that_no_parent_tells_of_is_found_within_three_seconds(step_s):
    """A debugger's: the kernel tells the debugger."""
    rank = Rank(step_s, told=True)
    rank.parent_tells = False
    rank.stops.add((2.21, math.inf))
    assert 2.21 < rank.found_s(60.0) <= 2.21 + 3.0 + 1e-9


def test_a_rank_whose_parent_tells_costs_a_look_in_two_seconds_at_most():
    rank = Rank(0.45, told=True)
    assert rank.found_s(20.0) is None and rank.looks == [] and rank.wakes in (44, 45, 46)
    rank = Rank(50.0, told=True)
    assert rank.found_s(40.0) is None and 10 < len(rank.looks) < 20
    assert Rank(0.45).found_s(20.0) is None


@pytest.mark.parametrize("at_s", [5.0, 6.1, 7.23, 8.41])
@pytest.mark.parametrize("share", [0.3, 0.6, 0.9])
def test_one_that_is_told_and_goes_on_within_the_limit_is_no_hang(at_s, share):
    """It was silent long before, so that the first look of one that nobody tells of might fall anywhere."""
    rank = Rank(50.0, told=True)
    rank.stops.add((at_s, at_s + share * LIMIT_S))
    assert rank.found_s(40.0) is None


@pytest.mark.parametrize("told", [True, False])
def test_a_longer_limit_than_three_seconds_stays_what_it_is(told):
    rank = Rank(500.0, told, limit_s=8.0)
    rank.stops.add((100.0, math.inf))
    found_s = rank.found_s(400.0)
    assert 102.0 <= found_s <= 108.0 and len(rank.looks) <= 20


def test_one_that_goes_on_again_is_no_longer_looked_at_often():
    rank = Rank(50.0, told=True)
    rank.stops.add((5.0, 5.02))
    assert rank.found_s(20.0) is None and len(rank.looks) < 15 and not rank.rank.watch.stop_reported


@pytest.mark.parametrize("told", [False, True], ids=["looked at", "told"])
def test_one_that_is_held_for_a_moment_is_no_hang(told):
    rank = Rank(50.0, told)
    rank.stops |= {(number * 0.16, number * 0.16 + 0.05) for number in range(1, 180)}
    assert rank.found_s(29.0) is None and (told or len(rank.looks) > 80)


def test_short_steps_cost_no_look_and_no_wake_of_their_own():
    rank = Rank(0.1)
    assert rank.found_s(10.0) is None
    assert rank.looks == [] and rank.wakes in (100, 101)


def test_a_rank_of_which_nothing_is_known_yet_is_not_late():
    """It starts: the supervisor watches that."""
    rank = Rank(500.0)
    assert rank.found_s(400.0) is None
    rank.rank.steps.first, rank.rank.steps.stepped = 0, True
    rank.rank.watch.progress_s = 400.0
    assert rank.found_s(500.0) == pytest.approx(430.0, abs=0.4)


# ---------------------------------------------------------------- progress


def stuck(limit_s=1.0, **steps):
    """A supervised host whose rank is in ``steps``, seen just now."""
    recovery = {"heartbeat_timeout_s": 60.0, "step_timeout_s": limit_s, "start_timeout_s": 60.0}
    host = VirtualHost(spec=spec_of(recovery=recovery)).supervised()
    return host, host.rank(99, 1, 2, **steps)


def test_progress_resets_the_step_watchdog_and_a_beat_does_not():
    host, rank = stuck(stepped=True)
    for _ in range(3):
        host.now_s += 0.9
        host.says(rank, RankProgress(attempt=2, rank=1)).tick()
    assert host.of(RankHang) == []
    for _ in range(3):
        host.now_s += 0.4
        host.says(rank, RankBeat(step=rank.steps.step, micro=rank.steps.micro)).tick()  # alive, and nothing more
    assert len(host.of(RankHang)) == 1


def test_progress_of_an_attempt_that_is_over_is_ignored():
    host, rank = stuck()
    before = rank.watch.progress_s
    host.now_s += 5.0
    host.says(rank, RankProgress(attempt=1, rank=1))
    assert rank.watch.progress_s == before and host.sent == []


def test_the_supervisor_is_told_once_a_second():
    host, rank = stuck()
    for _ in range(10):
        host.now_s += 0.5
        host.says(rank, RankProgress(attempt=2, rank=1))
    assert host.sent == [RanksProgress(attempt=2)] * 5


@pytest.mark.parametrize(
    ("steps", "after_s", "limit_s", "hangs"),
    [
        ({}, 10_000.0, 30.0, False),  # the supervisor watches the start
        ({"first": 1}, 59.0, 30.0, False),
        ({"first": 1}, 61.0, 30.0, True),
        ({"first": 1}, 89.0, 90.0, False),  # nor less than a step
        ({"first": 1, "stepped": True}, 31.0, 30.0, True),
    ],
)
def test_a_rank_in_its_first_step_is_given_as_long_as_a_start(steps, after_s, limit_s, hangs):
    host, _ = stuck(limit_s, **steps)
    host.tick(after_s)
    assert bool(host.of(RankHang)) == hangs


def test_a_hang_is_reported_once_to_each_supervisor_and_not_in_between():
    host, rank = stuck(first=1, stepped=True)
    host.give(PeerLost(2000)).tick(100.0)
    assert host.sent == [] and not rank.watch.hang_reported
    for count in (1, 2):
        host.give(SupervisorConnected(2000)).tick().tick()
        assert len(host.of(RankHang)) == count
        host.give(PeerLost(2000)).tick()
