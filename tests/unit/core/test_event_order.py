"""Events keep their order when somebody steps a wall clock: forwards, backwards, before a file begins or within it."""

from dataclasses import replace

import pytest

from muster.core import event_log
from muster.core.event_log import EventLog
from muster.core.event_log.order import merge_by_monotonic_clock
from muster.core.events import Event

SECOND = 1_000_000_000
HOUR = 3600 * SECOND
WALL = 1_790_000_000 * SECOND
#: What host-1's monotonic clock is behind the supervisor's.
BEHIND = 40_000 * SECOND


class Pen:
    """Writes events at moments of true time; each host has a monotonic clock, and a wall clock that can be stepped."""

    def __init__(self):
        self.files, self.stepped, self.behind = {}, {}, {"host-1": BEHIND}
        self.truth = {}

    def add(self, file, at_s, kind, *, host="host-0", **detail):
        events = self.files.setdefault(file, [])
        at = int(at_s * SECOND)
        who = "host-0" if file.startswith("supervisor") else host
        event = Event(run_id="r", attempt=1, seq=len(events), mono_ns=at - self.behind.get(who, 0),
                      wall_ns=WALL + at + self.stepped.get(who, 0), host=host, kind=kind, detail=detail)  # fmt: skip
        events.append(event)
        self.truth[(file, event.seq)] = at

    def offset(self, file, at_s, host):
        self.add(file, at_s, "clock.offset", host=host, offset_ns=self.behind.get(host, 0) + 300, error_ns=500)

    def errors_s(self):
        """How far each event is from the truth on the one clock."""
        merged = merge_by_monotonic_clock(self.files)
        return [abs(at - WALL - self.truth[(name, event.seq)]) / SECOND for at, name, event in merged]

    def order_is_true(self):
        found = [self.truth[(name, event.seq)] for _, name, event in merge_by_monotonic_clock(self.files)]
        return found == sorted(found)


def play(pen, *, host, by, at_s=5.0):
    """A run of two attempts on two hosts; a wall clock is stepped on the way."""
    pen.add("supervisor.1.jsonl", 0, "supervisor.started", term=1)
    for name in ("host-0", "host-1"):
        pen.add(f"{name}.0.jsonl", 1, "agent.started", host=name)
        pen.offset("supervisor.1.jsonl", 1.1, name)
    for attempt, begins in ((1, 2), (2, 8)):
        pen.add("supervisor.1.jsonl", begins, "attempt.started")
        for step in range(1, 5):
            if begins + step >= at_s and host not in pen.stepped:
                pen.stepped[host] = by
            for name in ("host-0", "host-1"):
                pen.add(f"{name}.{attempt}.jsonl", begins + step, "step", host=name, n=step)
    pen.add("supervisor.1.jsonl", 13, "run.finished")


@pytest.mark.parametrize("by", [HOUR, -HOUR, 0])
@pytest.mark.parametrize("host", ["host-0", "host-1"])  # the supervisor's, and another
def test_a_step_in_mid_run_bends_nothing(host, by):
    pen = Pen()
    play(pen, host=host, by=by)
    assert pen.order_is_true() and max(pen.errors_s()) < 0.001


def test_without_an_offset_wall_clocks_stand():
    pen = Pen()
    pen.add("supervisor.1.jsonl", 0, "supervisor.started", term=1)
    pen.stepped["host-1"] = HOUR
    pen.add("host-1.1.jsonl", 1, "step", host="host-1")
    assert [round(each) for each in pen.errors_s()] == [0, 3600]


def test_a_host_that_was_booted_again_goes_by_its_new_clock():
    pen = Pen()
    pen.add("supervisor.1.jsonl", 0, "supervisor.started", term=1)
    pen.add("host-1.0.jsonl", 1, "agent.started", host="host-1")
    pen.offset("supervisor.1.jsonl", 1.1, "host-1")
    pen.behind["host-1"] = 90_000 * SECOND
    pen.add("host-1.0.jsonl", 60, "agent.started", host="host-1")
    pen.offset("supervisor.1.jsonl", 60.1, "host-1")
    pen.stepped["host-1"] = -HOUR
    pen.add("host-1.0.jsonl", 61, "agent.ended", host="host-1")
    assert pen.order_is_true() and max(pen.errors_s()) < 0.001


@pytest.mark.parametrize("by", [HOUR, -HOUR])
def test_terms_follow_each_other_whatever_the_clock_says(by):
    """The order holds; how long nobody supervised is the wall clock's word."""
    pen = Pen()
    play(pen, host="host-0", by=by)
    pen.add("supervisor.2.jsonl", 20, "supervisor.started", term=2)
    pen.add("supervisor.2.jsonl", 22, "run.message", text="here")
    bosses = [event.kind for _, name, event in merge_by_monotonic_clock(pen.files) if name.startswith("supervisor.")]
    assert bosses[-3:] == ["run.finished", "supervisor.started", "run.message"]


def test_a_run_is_read_in_order_and_as_it_was_written(tmp_path):
    log = EventLog("r", tmp_path, "host-0", 1)
    wall = WALL
    for number in range(4):
        wall += HOUR if number == 2 else 0
        log.append("run.message", detail={"text": str(number)}, mono_ns=number * SECOND, wall_ns=wall + number * SECOND)
    log.close()
    assert [event.wall_ns for event in event_log.merged(tmp_path)] == [
        WALL, WALL + SECOND, WALL + HOUR + 2 * SECOND, WALL + HOUR + 3 * SECOND,
    ]  # fmt: skip
    files = {name: [event for _, event in event_log.read(tmp_path)] for name, _ in event_log.read(tmp_path)}
    assert [at - WALL for at, _, _ in merge_by_monotonic_clock(files)] == [0, SECOND, 2 * SECOND, 3 * SECOND]


def test_what_is_not_bent_stays_as_it_is():
    pen = Pen()
    play(pen, host="host-1", by=SECOND // 2)
    events = {(name, event.seq): event for name, found in pen.files.items() for event in found}
    assert all(at == events[(name, event.seq)].wall_ns for at, name, event in merge_by_monotonic_clock(pen.files))
    assert all(event == replace(events[(name, event.seq)]) for _, name, event in merge_by_monotonic_clock(pen.files))
