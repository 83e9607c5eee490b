"""A host program in virtual time: its programs end when a test says so, its home holds what a test put there."""

import signal

from fakes.clock import VirtualClock

from muster.backends.host.loop import LONGEST_WAIT_S, HostProgram
from muster.backends.host.place import Place, Program
from muster.backends.host.state import AGENT, NEVER, RESUME, SUPERVISOR, Lease, Looked


class Children:
    """Programs that end when they are signalled (where they ``obey``), or when a test says so."""

    def __init__(self):
        self.running, self.over, self.log, self.sent, self.next_pid = {}, [], [], [], 100
        self.obey = True

    def start(self, name, argv, env, log):
        assert name not in self.running, "one of each at a time"
        self.next_pid += 1
        self.running[name] = self.next_pid
        self.log.append(name)
        return self.next_pid

    def pid(self, name):
        return self.running.get(name)

    def ended(self):
        over, self.over = self.over, []
        return over

    def end(self, name, code):
        del self.running[name]
        self.over.append((name, code))

    def send(self, name, number):
        if name in self.running:
            self.sent.append((name, number))
            if number == signal.SIGKILL or self.obey:
                self.end(name, 128 + number)


class Home:
    """Who holds the run's lease until when, and how the run ended."""

    def __init__(self, clock, children):
        self.clock, self.children = clock, children
        self.until_s, self.pid, self.end = 0.0, None, None
        self.answers, self.shipped, self.withdrawn = True, [], 0
        self.says = None
        """What ``look`` answers, where a test says so."""

    def held_s(self):
        """0 where the holder was ours and has ended: what it left is free at once."""
        ours = self.pid is not None and 100 < self.pid <= self.children.next_pid
        if ours and self.pid not in self.children.running.values():
            return 0.0
        return max(0.0, self.until_s - self.clock.now_s)

    def look(self, ended_pid):
        if self.says is not None:
            return self.says
        if not self.answers:
            return Looked(lease=Lease(kind="unknown"))
        if (left_s := self.held_s()) > 0:
            return Looked(lease=Lease(kind="held", left_s=left_s))
        return Looked(lease=Lease(kind="free"), end=self.end)

    def withdraw_end(self, code):
        assert self.end == code == RESUME
        self.end, self.withdrawn = None, self.withdrawn + 1

    def ship(self, writer, timeout_s):
        self.shipped.append(writer)


class VirtualPlace(Place):
    """Answers as the test's ``OneHost`` says."""

    host = None

    def save(self, reason):
        self.host.asked.append(reason)
        return self.host.reached

    def notice_scope(self):
        return self.host.scope

    def requeue(self):
        return self.host.requeued.pop(0)

    def time_left_s(self):
        self.host.asked.append("time left")
        return self.host.time_left_s

    def end_here(self):
        self.host.asked.append("end here")


class OneHost:
    """``HostProgram`` under ``rules``; its threads answer at once."""

    def __init__(self, rules, programs=(AGENT, SUPERVISOR), clock=None):
        self.clock = clock or VirtualClock()
        self.children, self.asked, self.said = Children(), [], []
        self.home = Home(self.clock, self.children)
        self.reached, self.scope, self.requeued, self.time_left_s = True, None, [], NEVER
        place = VirtualPlace(home=self.home)
        place.host = self
        self.program = HostProgram(
            place=place, rules=rules, children=self.children, clock=self.clock, say=self.said.append,
            programs={name: Program(argv=["x"], env={}, home=self.home, writer=name) for name in programs},
            in_thread=lambda call, name: call(),
        )  # fmt: skip

    @property
    def state(self):
        return self.program.state

    @property
    def leaving(self):
        """(outcome, code) once the program is about to exit."""
        leaving = self.state.leaving
        return (leaving.outcome, leaving.code) if leaving is not None else None

    def lasts(self, seconds, *, renewed_by=None):
        """Turns for so long; ``renewed_by``: the process that keeps the lease meanwhile."""
        until = self.clock.now_s + seconds
        while self.clock.now_s < until and self.leaving is None:
            self.turn(renewed_by)

    def ends(self, limit_s=3600.0):
        """Turns until the program exits; how."""
        until = self.clock.now_s + limit_s
        while self.program.ended is None and self.clock.now_s < until:
            self.turn()
        return self.program.ended

    def turn(self, renewed_by=None):
        if renewed_by is not None:
            self.home.until_s, self.home.pid = self.clock.now_s + 10.0, renewed_by
        self.program.turn()
        self.clock.sleep(LONGEST_WAIT_S)

    def holds(self):
        """Its supervisor has taken the lease."""
        self.lasts(2)
        self.lasts(5, renewed_by=self.children.pid(SUPERVISOR))
        return self
