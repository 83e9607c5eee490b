"""Random scripts for the host program and for what decided on Vertex AI before it: the same starts, signals and ends.

Differences, each on purpose: a lease that a process of this host left is free at once (both sides here); a home that
did not answer yet says nothing about the run; a supervisor that starts when the job's time is up is asked to save; more
programs are shipped for; the agent is signalled before the supervisor; an agent of another version waits for longer;
the end of an agent does not shorten a supervisor's back-off; whether a race for the lease was lost is decided once the
home answers.
"""

import contextlib
import io
import random
import signal

import pytest
from fakes.clock import VirtualClock
from fakes.host_program import Children, Home, OneHost
from oracles.vertex_keeper import NOTICE_S, Keeper, Program
from thorough import usually

from muster.backends.host.loop import LONGEST_WAIT_S
from muster.backends.host.state import AGENT, RESUME, SUPERVISOR, LeaveAt, Noticed, Outcome
from muster.backends.vertex.host import rules


class OldHome(Home):
    """As the keeper reads it."""

    def held_s(self):
        return super().held_s() if self.answers else 3.0

    def held_by(self):
        return self.pid

    def ended(self):
        return self.end

    def catch_up(self):
        pass


class Old(Keeper):
    not_before_s = 0.0

    def _supervisor_ended(self, code, now):
        super()._supervisor_ended(code, now)
        self._next_stop_s = min(self._next_stop_s, now)
        if self._noticed_s is None:
            self._crash = code

    def _watch_run(self, now):
        looks = not self.supervises and now >= self._next_look_s and self.state.answers
        if looks and self._crash == 1 and self.state.held_s() > 0:
            self._crash = None
        super()._watch_run(now)

    def _crashed(self, code, now):
        super()._crashed(code, now)
        self.not_before_s = self._next_look_s

    def _take_over_where_due(self, now):
        if self._crash is None and self._noticed_s is None and now < self.not_before_s:
            self._next_look_s = self.not_before_s
        else:
            super()._take_over_where_due(now)


class Pair:
    """Both, with the same things happening to them."""

    def __init__(self, rank, whole, leave_at_s):
        self.clock = VirtualClock()
        self.new = OneHost(rules(rank, whole_job_goes=whole), clock=self.clock)
        if leave_at_s is not None:
            self.new.program.post(LeaveAt(at_s=leave_at_s))
        self.children, self.asked = Children(), []
        self.home = OldHome(self.clock, self.children)
        program = Program(argv=["x"], env={})
        self.old = Old(
            index=rank, agent=program, supervisor=program, children=self.children, state=self.home, clock=self.clock,
            stop_run=self.stop_run, whole_job_goes=whole, leave_at_s=leave_at_s,
        )  # fmt: skip
        self.homes = (self.home, self.new.home)

    def stop_run(self, reason):
        self.asked.append("notice" if "SIGTERM" in reason else "time")
        return self.new.reached

    def happens(self, rng):
        x, running = rng.random(), self.children.running
        if x < 0.012 and AGENT in running:
            self.end(AGENT, rng.choice([0, 1, 76, 75, 137]))
        elif x < 0.03 and SUPERVISOR in running:
            self.end(SUPERVISOR, rng.choice([0, 1, 1, 2, 2, 2, 3, 6, 75, 130, 137]))
            if rng.random() < 0.7:
                self.set(until_s=0.0)
        elif x < 0.034 and self.is_early():
            self.old.notice()
            self.new.program.post(Noticed())
        elif x < 0.046 and self.old._was_held:
            self.set(answers=rng.random() < 0.5)
        elif x < 0.05:
            self.set(end=rng.choice([RESUME, RESUME, RESUME, None, None, 0, 1, 130]))
        elif x < 0.06:
            self.new.reached = rng.random() < 0.5
        elif x < 0.066:
            self.set(until_s=self.clock.now_s + rng.choice([5.0, 60.0]), pid=7)

    def is_early(self):
        """Another notice means nothing: the old loop forgot one of the moment at which the first was over."""
        noticed_s = self.old._noticed_s
        return noticed_s is None or self.clock.now_s - noticed_s < NOTICE_S - 5

    def end(self, name, code):
        self.children.end(name, code)
        self.new.children.end(name, code)

    def set(self, **fields):
        for home in self.homes:
            for name, value in fields.items():
                setattr(home, name, value)

    def renew(self):
        for home, children in zip(self.homes, (self.children, self.new.children), strict=True):
            if SUPERVISOR in children.running and not (home.pid == 7 and home.held_s()):
                home.until_s, home.pid = self.clock.now_s + 10.0, children.pid(SUPERVISOR)

    def turn(self):
        with contextlib.redirect_stderr(io.StringIO()):
            for turn in (self.old.turn, self.new.program.turn):
                turn()
                turn()  # what ended by a signal of the first one is noticed at the same time by both
        self.clock.sleep(LONGEST_WAIT_S)

    def seen(self):
        """What either has done, and whether it goes on."""
        yield from (
            (self.children.log, self.new.children.log),
            (sorted(self.children.running), sorted(self.new.children.running)),
            (self.home.withdrawn, self.new.home.withdrawn),
            (self.asked, self.new.asked),
            (self.old.said, None if self.new.leaving is None else self.new.leaving[0] is Outcome.RUN_ENDED),
        )
        sent = [[one for one in each.sent if one[1] != signal.SIGALRM] for each in (self.children, self.new.children)]
        yield sorted(sent[0]), sorted(sent[1])


@pytest.mark.parametrize("block", range(4))
def test_the_same_starts_signals_and_ends(block):
    starts = 0
    for seed in range(block, usually(120, nightly=3000), 4):
        rng = random.Random(seed)
        pair = Pair(rng.choice([0, 0, 1, 3]), rng.random() < 0.5, rng.choice([None, None, 300.0]))
        for turn in range(int(8 * NOTICE_S)):
            if rng.random() < 0.9:
                pair.renew()
            pair.happens(rng)
            pair.turn()
            for old, new in pair.seen():
                assert old == new, f"seed {seed}, turn {turn}, {pair.clock.now_s} s"
            if pair.old.said is not None:
                break
        starts += len(pair.children.log)
    assert starts > 50
