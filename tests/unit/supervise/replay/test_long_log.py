"""A log of weeks: a takeover reads it in order, and holds a few of its events at a time."""

import gc
import tracemalloc
from random import Random

import pytest
from fakes.event_details import random_detail

from muster.core.event_details.kinds import KINDS
from muster.core.event_log import EventLog
from muster.core.event_log.order import merge_by_monotonic_clock
from muster.core.event_log.reader import EventReader
from muster.core.events import Event
from muster.supervise.replay.event_replay import EventReplay

DETAIL = random_detail(KINDS["step"], Random(1))


def write(folder, steps, hosts=2):
    logs = [EventLog("r", folder, f"host-{host}", 1) for host in range(hosts)]
    for step in range(steps):
        logs[step % hosts].append("step", step=step, rank=step % hosts, detail=DETAIL)
    for log in logs:
        log.close()


def living():
    return sum(isinstance(each, Event) for each in gc.get_objects())


def replay(folder):
    found = EventReplay(folder)
    found.read_new_events()
    return found


def test_few_events_live_at_a_time(tmp_path):
    write(tmp_path, 4000)
    gc.collect()
    before = living()
    past = replay(tmp_path)
    counts = [living() - before]
    for number, event in enumerate(past.in_order()):
        assert event.step == number
        if number % 500 == 0:
            counts.append(living() - before)
    assert len(counts) == 9 and max(counts) < 20


def test_each_event_costs_some_numbers(tmp_path):
    write(tmp_path, 8000)
    tracemalloc.start()
    try:
        past = replay(tmp_path)
        for _ in past.in_order():
            pass
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak / 8000 < 500, f"{peak / 8000:.0f} bytes an event; an event that is held is 2,800"


def test_it_is_the_order_of_all_events_at_once(tmp_path):
    """Two hosts, files of two attempts, and a clock that is set back between two processes that wrote one file."""
    write(tmp_path, 300)
    for kind in ("agent.started", "run.message"):
        log = EventLog("r", tmp_path, "host-0", 1)
        detail = {"pid": 1, "ranks": 1} if kind == "agent.started" else {"text": "on another clock"}
        for number in range(40):
            log.append(kind, detail=detail, mono_ns=number * 10**9, wall_ns=(1000 - number % 7) * 10**9)
        log.close()
    files = {}
    for name, event in EventReader(tmp_path).read():
        files.setdefault(name, []).append(event)
    wanted = merge_by_monotonic_clock(files)
    past = replay(tmp_path).in_order()
    for _ in range(2):
        assert [(each.seq, each.host, each.wall_ns) for each in past] == [(e.seq, e.host, at) for at, _, e in wanted]
    assert past.newest_ns == max(at for at, _, _ in wanted)


@pytest.mark.parametrize("left", [0, 1000])
def test_a_file_that_is_cut_between_is_said_and_stops_nobody(tmp_path, left):
    write(tmp_path, 40)
    past, said = replay(tmp_path), []
    path = tmp_path / "host-1.1.jsonl"
    path.write_bytes(path.read_bytes()[:left])
    found = [event.step for event in past.in_order(said.append)]
    assert set(range(0, 40, 2)) <= set(found) and len(found) <= 23
    assert len(said) == 1 and said[0].startswith("host-1.1.jsonl: event")
    assert said[0].endswith(f"; nor are {39 - len(found)} more of it")


def test_all_who_want_it_are_told_by_one_reading(tmp_path):
    write(tmp_path, 10)
    first, second = [], []
    events = list(replay(tmp_path).in_order().telling(first.append, second.append))
    assert first == second == events and len(events) == 10


def test_a_file_that_was_cut_meanwhile_is_said_once(tmp_path):
    write(tmp_path, 20_000, hosts=1)
    found, told = replay(tmp_path), []
    (path,) = tmp_path.glob("host-0*")
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    count = sum(1 for _ in found.in_order(told.append))
    assert 9_000 < count < 11_000 and len(told) == 1
    assert told[0].startswith(f"{path.name}: event {count + 1} was there and is not now: ")
    assert told[0].endswith(f"; nor are {20_000 - count - 1} more of it")
