"""Threads that ship: the age of a line that waits, requests and bytes that it costs, and what an end brings."""

import threading
import time
from random import Random

import pytest
from fakes.clock import VirtualClock
from fakes.objects import Objects
from test_home_stream import HOME, RUN, files, home_at, mirrored, say

from muster.core.event_log import cadence
from muster.storage.home.bucket import LOOK_S as STEP_S
from muster.storage.home.bucket import BucketSync
from muster.storage.home.shipper import Shipper

PLANNED_WRITES = 20_098


def sync_of(home, writer, clock):
    return BucketSync(home, writer, RUN, now_s=lambda: clock.now_s)


@pytest.mark.parametrize("put_s", [0.06, 0.3])
def test_a_line_is_in_the_home_within_five_seconds(tmp_path, put_s):
    clock, rng = VirtualClock(), Random(7)
    store = Objects(took=lambda method: clock.sleep(put_s))
    home = home_at(tmp_path / "a", store, clock)
    log = home.open_log(RUN, "pod-0", 1, clock)
    sync = sync_of(home, "pod-0", clock)
    path = log.path
    written = {}
    oldest_s = 0.0
    while clock.now_s < 300:
        if rng.random() < 0.4:
            say(log, "x")
            written[path.stat().st_size] = clock.now_s
        clock.sleep(STEP_S)
        sync.seal_events()
        held = sum(len(stored.data) for stored in store.held.values())
        for size in [size for size in written if size <= held]:
            oldest_s = max(oldest_s, clock.now_s - written.pop(size))
    assert 3 < oldest_s <= 5.0, oldest_s
    assert store.counts["put"] > 300 / 6


def test_after_a_failure_it_is_tried_again_soon(tmp_path):
    clock, store = VirtualClock(), Objects()
    home = home_at(tmp_path / "a", store, clock)
    sync = sync_of(home, "pod-0", clock)
    say(home.open_log(RUN, "pod-0", 1, clock), "x")
    store.down = True
    while clock.now_s < 10:
        sync.seal_events()
        clock.sleep(STEP_S)
    asked, store.down = store.requests, False
    assert "429" in sync.trouble
    assert asked < 30
    while clock.now_s < 11.5:
        sync.seal_events()
        clock.sleep(STEP_S)
    assert store.uris(f"{HOME}/events")
    assert sync.trouble is None


def test_what_another_process_wrote_is_shipped_too(tmp_path):
    """An agent that was killed: whoever is left in its pod ships its last lines."""
    store, clock = Objects(), VirtualClock()
    agent = home_at(tmp_path / "a", store, clock).open_log(RUN, "pod-0", 1)
    say(agent, "the last words")
    agent.close()
    sync = sync_of(home_at(tmp_path / "a", store, clock), "pod-0", clock)
    sync.seal_events()
    assert not store.uris(f"{HOME}/events")
    clock.sleep(cadence.SEAL_S)
    sync.seal_events()
    assert mirrored(store, tmp_path / "b") == files(tmp_path / "a" / "events")


def test_an_hour_of_sixteen_hosts_asks_for_no_more_than_is_priced(tmp_path):
    """One writer's hour is played, with a line and output in every second; the others' are alike."""
    clock = VirtualClock()
    counted, uploaded = {}, {}
    for writer in ("pod-0", "supervisor"):
        store = Objects()
        home = home_at(tmp_path / writer, store, clock)
        log = home.open_log(RUN, writer, 1, clock)
        sync = sync_of(home, writer, clock)
        sync.seek_supervisor(False)
        (home.local / "logs").mkdir()
        until_s = clock.now_s + 3600
        with open(home.local / "logs" / "rank-0.a1.log", "w") as output:
            while clock.now_s < until_s:
                if clock.now_s % 1 == 0:
                    say(log, "x")
                    print("x", file=output, flush=True)
                sync.seal_events()
                sync.ship_files()
                clock.sleep(STEP_S)
        counted[writer], uploaded[writer] = store, store.uploaded
    writes = 16 * counted["pod-0"].class_a + counted["supervisor"].class_a
    # The lease and the status are the supervisor's own, not the thread's.
    others = 3600 / cadence.LEASE_RENEWAL_S + 3600 / cadence.STATUS_LEAST_S
    assert 0.8 * PLANNED_WRITES < writes + others <= cadence.writes_an_hour(16) * 1.01
    assert abs(cadence.writes_an_hour(16) - PLANNED_WRITES) < 250
    assert 16 * counted["pod-0"].counts["get"] <= cadence.reads_an_hour(16) * 1.01
    assert 17 * uploaded["pod-0"] <= cadence.uploaded_bytes_an_hour(16) * 1.01


def test_the_supervisor_has_read_nearly_all_when_the_run_ends(tmp_path):
    """Reading a week's events at once takes longer than a lease lasts."""
    clock, store = VirtualClock(), Objects()
    host = home_at(tmp_path / "pod-0", store, clock)
    log = host.open_log(RUN, "pod-0", 1, clock)
    home = home_at(tmp_path / "a", store, clock)
    sync, most = sync_of(home, "supervisor", clock), 0
    while clock.now_s < 3 * cadence.MIRROR_S + 60:
        say(log, "x")
        host.shipper(RUN, "pod-0").ship()
        before = store.counts["get"]
        sync.ship_files()
        most = max(most, store.counts["get"] - before)
        clock.sleep(cadence.SEAL_S)
    before = store.counts["get"]
    assert home.heads(RUN)[log.name] == log.head
    assert store.counts["get"] - before == 1
    assert 0 < most * 6 <= cadence.reads_an_hour(1) - 3600 / cadence.LEASE_COPY_S


def test_damage_of_one_host_is_said_once_and_holds_up_no_end(tmp_path, capsys):
    store, clock = Objects(), VirtualClock()
    sync = sync_of(home_at(tmp_path / "a", store, clock), "supervisor", clock)
    store.put(f"{HOME}/events/pod-0/pod-0.1.jsonl/000000000000", b"of another program\n")
    for _ in range(3):
        clock.sleep(cadence.MIRROR_S + 1)
        sync.ship_files()
    assert sync.trouble is None
    assert capsys.readouterr().err.count("events of pod-0") == 1


def test_threads_ship_and_the_end_brings_all(tmp_path):
    store = Objects()
    home = home_at(tmp_path / "a", store)
    home.now_s = time.monotonic
    (home.local / "logs").mkdir()
    (home.local / "tokenizer").mkdir()
    (home.local / "tokenizer" / "vocab.json").write_text("{}")
    store.put(f"{HOME}/lease.json", b'{"term":1}')
    caught = []
    before = set(threading.enumerate())  # an earlier test's may not have ended yet
    sync = home.start("pod-0")
    log = home.open_log(RUN, "pod-0", 1)
    say(log, "x")
    (home.local / "logs" / "agent-pod-0.log").write_text("hello, half a li")
    deadline = time.monotonic() + 5
    while not (home.local / "lease.json").exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert (home.local / "lease.json").read_bytes() == b'{"term":1}'
    assert sync.stop(10.0), caught
    assert sync.trouble is None
    reader = home_at(tmp_path / "b", store)
    assert reader.mirror(reader.local) > 0
    assert reader.mirror(reader.local, what="logs") == 16
    assert reader.mirror(reader.local, what="outputs") == 2
    assert [reader.mirror(reader.local, what=what) for what in ("events", "logs", "outputs")] == [0, 0, 0]
    assert files(reader.local / "events") == files(home.local / "events")
    assert (reader.local / "logs" / "agent-pod-0.log").read_text() == "hello, half a li"
    assert (reader.local / "tokenizer" / "vocab.json").read_text() == "{}"
    assert not [thread for thread in set(threading.enumerate()) - before if thread.name.startswith("home-")]


def test_an_end_without_a_store_is_in_time_and_says_no(tmp_path):
    store = Objects()
    home = home_at(tmp_path / "a", store)
    home.now_s = time.monotonic
    sync = home.start("pod-0")
    log = home.open_log(RUN, "pod-0", 1)
    store.down = True
    say(log, "x")
    began = time.monotonic()
    assert not sync.stop(1.5)
    assert time.monotonic() - began < 3
    assert "429" in sync.trouble


def test_who_was_replaced_ends_at_once(tmp_path):
    """What is left of a supervisor that another one followed: nothing of it can be shipped, however long one waits."""
    store = Objects()
    home = home_at(tmp_path / "a", store)
    say(home.open_log(RUN, "supervisor", 1), "x")
    home_at(tmp_path / "b", store).end_earlier(RUN, "supervisor", 2)
    sync = home.start("supervisor")
    began = time.monotonic()
    assert not sync.stop(20.0)
    assert time.monotonic() - began < 5
    assert "ended by a later process" in sync.trouble


def test_after_an_end_another_process_of_the_folder_ships(tmp_path):
    store = Objects()
    first, second = home_at(tmp_path / "a", store), home_at(tmp_path / "a", store)
    log = first.open_log(RUN, "supervisor", 1)
    sync = first.start("supervisor")
    say(log, "x")
    assert sync.stop(10.0)
    say(log, "y")
    log.close()
    again = second.open_log(RUN, "supervisor", 1)
    assert again.sync()
    assert mirrored(store, tmp_path / "b") == files(first.local / "events")


def test_a_thread_that_stumbles_says_so_and_goes_on(tmp_path, monkeypatch, capsys):
    store = Objects()
    home = home_at(tmp_path / "a", store)
    home.now_s = time.monotonic
    real, healed = Shipper.look, threading.Event()

    def look(stream):
        if not healed.is_set():
            raise ZeroDivisionError("a mistake of ours")
        real(stream)

    monkeypatch.setattr(Shipper, "look", look)
    sync = home.start("pod-0")
    say(home.open_log(RUN, "pod-0", 1), "x")
    deadline = time.monotonic() + 10
    while sync.trouble is None and time.monotonic() < deadline:
        time.sleep(0.02)
    heard = sync.trouble
    healed.set()
    assert "a mistake of ours" in heard
    assert sync.stop(5.0)
    assert store.uris(f"{HOME}/events")
    assert "ZeroDivisionError" in capsys.readouterr().err


def test_output_of_one_name_from_two_hosts_stays_apart(tmp_path):
    store, clock = Objects(), VirtualClock()
    for host in ("pod-0", "pod-1"):
        home = home_at(tmp_path / host, store, clock)
        (home.local / "logs").mkdir()
        (home.local / "logs" / "prepare.log").write_text(f"of {host}\n")
        home.output(host).ship()
    reader = home_at(tmp_path / "b", store)
    for _ in range(2):
        reader.mirror(reader.local, what="logs")
        found = {path.name: path.read_text() for path in (reader.local / "logs").glob("*.log")}
        assert found == {"prepare.log": "of pod-0\n", "prepare@pod-1.log": "of pod-1\n"}
