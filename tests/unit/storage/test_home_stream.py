"""Sealed segments: the home holds a beginning of the files, whatever is killed or lost, and of one writer only."""

import contextlib
import json
import os
import threading
import time
from pathlib import Path

import pytest
from fakes.clock import VirtualClock
from fakes.objects import Killed, Objects
from hypothesis import given, settings
from hypothesis import strategies as st

from muster.core import event_log
from muster.core.errors import BusyError, ConflictError, MusterError, UsageError
from muster.storage.home import HOME_FILE, BucketHome, FolderHome, open_home
from muster.storage.home.merging import Tidier, merge_own
from muster.storage.home.segments import Header, Part, Segment

RUN = "run-1"
HOME = "gs://bucket/runs/run-1"


def home_at(local, store, clock=None):
    local.mkdir(parents=True, exist_ok=True)
    (local / "run_id").write_text(RUN + "\n")
    clock = clock or VirtualClock()
    return BucketHome(local, HOME, store, store, now_s=lambda: clock.now_s)


def say(log, *texts):
    for text in texts:
        log.append("run.message", detail={"text": text})


def files(folder: Path):
    return {path.name: path.read_bytes() for path in sorted(folder.glob("*.jsonl"))}


def mirrored(store, folder):
    """What somebody else gets to see."""
    home_at(folder, store).mirror(folder)
    return files(folder / "events")


def test_the_file_home_decides(tmp_path):
    assert isinstance(open_home(tmp_path), FolderHome)
    (tmp_path / HOME_FILE).write_text(HOME + "\n")
    home = open_home(tmp_path)
    assert (home.uri, home.is_folder, home.uri_of("lease.json")) == (HOME, False, f"{HOME}/lease.json")
    for wrong in ("/shared/run", "", "gs://a b", "gs://a\nmore"):
        (tmp_path / HOME_FILE).write_text(wrong)
        with pytest.raises(UsageError, match="home"):
            open_home(tmp_path)


def test_what_is_synced_is_in_the_home_and_nothing_else(tmp_path):
    store = Objects()
    log = home_at(tmp_path / "a", store).open_log(RUN, "supervisor", 1)
    say(log, "one", "two")
    assert not store.held
    assert log.sync()
    say(log, "three")
    sealed = log.path.read_bytes().splitlines(keepends=True)[:2]
    assert mirrored(store, tmp_path / "b") == {"supervisor.1.jsonl": b"".join(sealed)}
    line = store.held[f"{HOME}/events/supervisor.1/0-0000000000"].data.partition(b"\n")[0]
    header = json.loads(line.partition(b" ")[2])
    assert header["parts"][0]["lines"] == 2
    assert header["parts"][0]["prev"] == event_log.genesis(RUN, "supervisor.1.jsonl")


def test_attempts_of_a_host_share_a_stream_and_a_successor_goes_on(tmp_path):
    store = Objects()
    home = home_at(tmp_path / "a", store)
    first, second = home.open_log(RUN, "pod-0", 1), home.open_log(RUN, "pod-0", 2)
    say(first, "a")
    say(second, "b")
    assert first.sync()
    say(second, "c")  # not sealed when the agent is killed
    first.close()
    second.close()
    home.stream(RUN, "pod-0").release()
    again = home_at(tmp_path / "a", store)
    third = again.open_log(RUN, "pod-0", 3)
    say(third, "d")
    assert third.sync()
    assert mirrored(store, tmp_path / "b") == files(tmp_path / "a" / "events")
    assert len(store.names(f"{HOME}/events")) == 2
    assert all(not verdict.problem for verdict in event_log.check_directory(tmp_path / "b/events", run_id=RUN).values())


def test_an_ended_stream_takes_nothing_more(tmp_path):
    store = Objects()
    zombie = home_at(tmp_path / "a", store).open_log(RUN, "supervisor", 1)
    say(zombie, "decided")
    assert zombie.sync()
    successor = home_at(tmp_path / "b", store)
    successor.end_earlier(RUN, "supervisor", 3)  # term 2 died before it wrote anything
    before = mirrored(store, tmp_path / "b")
    say(zombie, "decided too late")
    with pytest.raises(ConflictError, match=r"ended by supervisor\.3"):
        zombie.sync()
    with pytest.raises(ConflictError):
        zombie.sync()
    assert mirrored(store, tmp_path / "b") == mirrored(store, tmp_path / "c") == before
    second = home_at(tmp_path / "d", store).open_log(RUN, "supervisor", 2)
    say(second, "x")
    with pytest.raises(ConflictError):
        second.sync()
    held = len(store.held)
    successor.end_earlier(RUN, "supervisor", 4)
    assert len(store.held) == held + 1  # supervisor.3 alone was not ended yet


def test_what_was_merged_since_lets_no_zombie_in(tmp_path):
    """Its last answer was lost, it was away while its successor ended and merged its log, and it has more lines now."""
    store = Objects()
    home = home_at(tmp_path / "a", store)
    zombie = home.open_log(RUN, "supervisor", 1)
    for number in range(3):
        say(zombie, f"{number}")
        assert zombie.sync()
    say(zombie, "sealed, but its writer does not know")
    store.faults[store.requests] = "lost"
    assert not zombie.sync()
    home_at(tmp_path / "b", store).end_earlier(RUN, "supervisor", 2)
    tidier = Tidier(store, f"{HOME}/events", RUN, lambda: 0.0)
    for _ in range(2):
        tidier.tidy("supervisor.1")
    assert len(store.names(f"{HOME}/events/supervisor.1")) == 3
    before = mirrored(store, tmp_path / "c")
    say(zombie, "decided too late")
    with pytest.raises(ConflictError, match=r"ended by supervisor\.2"):
        zombie.sync()
    assert mirrored(store, tmp_path / "d") == before


def test_ending_costs_little_however_many_terms_there_were(tmp_path):
    store = Objects()
    for term in range(1, 30):
        home = home_at(tmp_path / f"{term}", store)
        log = home.open_log(RUN, "supervisor", term)
        say(log, "mine")
        assert log.sync()
        store.counts.clear()
        home_at(tmp_path / "next", store).end_earlier(RUN, "supervisor", term + 1)
        assert store.requests and sum(store.counts.values()) <= 5, term
    store.held.pop(f"{HOME}/ended/supervisor")  # it spares requests, no more
    store.counts.clear()
    home_at(tmp_path / "next", store).end_earlier(RUN, "supervisor", 30)
    assert store.counts["list"] == 1
    for wrong in (b"nonsense", b""):
        store.put(f"{HOME}/ended/supervisor", wrong)
        home_at(tmp_path / "next", store).end_earlier(RUN, "supervisor", 30)
    ended = [name for name in store.held if "/events/" in name]
    assert len(ended) == 2 * 29


def test_a_stream_that_changes_all_the_time_is_ended_or_given_up(tmp_path):
    """A writer that seals between our list and our write; the next list is of this stream alone."""
    store = Objects()
    log = home_at(tmp_path / "a", store).open_log(RUN, "supervisor", 1)
    put, left = store.put_if_absent, [3]

    def raced(uri, data):
        if b'"ended":"' in data and left[0] > 0:
            left[0] -= 1
            store.put_if_absent = put
            say(log, "quick")
            assert log.sync()
            store.put_if_absent = raced
        return put(uri, data)

    store.put_if_absent = raced
    successor = home_at(tmp_path / "b", store)
    successor.end_earlier(RUN, "supervisor", 2)
    assert left == [0]
    say(log, "too late")
    with pytest.raises(ConflictError, match="ended by"):
        log.sync()
    log = home_at(tmp_path / "c", store).open_log(RUN, "supervisor", 2)
    left[0] = 1000
    with pytest.raises(BusyError, match="changes while it is ended"):
        successor.end_earlier(RUN, "supervisor", 3)


def test_two_writers_of_one_stream(tmp_path):
    """The client on two machines: the second one goes on where the first was; whoever does not know that is refused."""
    store = Objects()
    home = home_at(tmp_path / "a", store)
    first = home.open_log(RUN, "client", 0)
    say(first, "submitted")
    assert first.sync()
    other = home_at(tmp_path / "b", store).open_log(RUN, "client", 0)
    say(other, "submitted again")
    assert other.sync()
    assert mirrored(store, tmp_path / "c") == files(tmp_path / "b" / "events")
    say(first, "behind the other's back")
    with pytest.raises(ConflictError):
        first.sync()
    assert mirrored(store, tmp_path / "c") == files(tmp_path / "b" / "events")
    other.close()
    third = home_at(tmp_path / "d", store).open_log(RUN, "client", 0)
    say(third, "from a third machine")
    assert third.sync()
    third.close()
    fourth = home_at(tmp_path / "b", store)
    with contextlib.closing(fourth.open_log(RUN, "client", 0)) as log:  # this machine again
        assert log.head == third.head


def test_a_file_here_that_is_something_else_is_kept_aside_and_brought_anew(tmp_path):
    store = Objects()
    log = home_at(tmp_path / "a", store).open_log(RUN, "supervisor", 1)
    say(log, "one")
    assert log.sync()
    say(log, "two, three, four")
    assert log.sync()
    reader = home_at(tmp_path / "b", store)
    (reader.local / "events").mkdir()
    for wrong in (b"x" * 20 + b"\n", b"y" * (log.path.stat().st_size - 9) + b"\n"):
        (reader.local / "events" / log.name).write_bytes(wrong)
        assert reader.mirror(reader.local) == log.path.stat().st_size
        assert files(reader.local / "events")[log.name] == log.path.read_bytes()
        assert (reader.local / "events" / f"{log.name}.damaged").read_bytes() == wrong
        (reader.local / "events" / ".mirror.json").unlink()


def test_two_commands_mirror_one_folder_at_once(tmp_path, monkeypatch):
    store, pread = Objects(), os.pread

    def slow(*given):
        time.sleep(0.01)  # between looking at a file and adding to it
        return pread(*given)

    monkeypatch.setattr(os, "pread", slow)
    log = home_at(tmp_path / "a", store).open_log(RUN, "supervisor", 1)
    for number in range(20):
        say(log, f"{number}")
        assert log.sync()
    readers = [home_at(tmp_path / "b", store) for _ in range(4)]
    threads = [threading.Thread(target=reader.mirror, args=(reader.local,)) for reader in readers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert files(tmp_path / "b" / "events") == files(tmp_path / "a" / "events")


def test_a_damaged_or_missing_segment_is_named_and_the_rest_comes(tmp_path):
    store = Objects()
    for host in ("pod-0", "pod-1"):
        log = home_at(tmp_path / host, store).open_log(RUN, host, 1)
        for text in ("one", "two", "three"):
            say(log, text)
            assert log.sync()
    second = f"{HOME}/events/pod-0/0-0000000001"
    kept = store.held.pop(second)
    with pytest.raises(MusterError, match=r"events of pod-0: segments 1 to 1 are missing"):
        mirrored(store, tmp_path / "b")
    assert files(tmp_path / "b" / "events") == files(tmp_path / "pod-1" / "events")
    store.put(second, kept.data[:-5])
    with pytest.raises(MusterError, match=r"0-0000000001 is damaged"):
        mirrored(store, tmp_path / "b")
    store.put(second, kept.data)
    mirrored(store, tmp_path / "b")
    assert files(tmp_path / "b/events") == files(tmp_path / "pod-0/events") | files(tmp_path / "pod-1/events")


def test_damage_of_one_host_stops_nobody_but_is_told(tmp_path):
    store = Objects()
    for writer in ("pod-0", "pod-1", "pod-2", "supervisor"):
        log = home_at(tmp_path / writer, store).open_log(RUN, writer, 1)
        say(log, "one")
        assert log.sync()
    store.put(f"{HOME}/events/pod-0/0-0000000001", b"of somebody else")
    store.held.pop(f"{HOME}/events/pod-1/0-0000000000")
    store.put(f"{HOME}/events/pod-1/0-0000000007", b"{}")
    long = Part(name=f"{'x' * 300}.1.jsonl", start=0, size=1)
    header = Header(run_id=RUN, level=0, first=0, last=0, parts=(long,))
    store.put(f"{HOME}/events/pod-3/0-0000000000", Segment(header, b"\n").encode())
    reader, told = home_at(tmp_path / "b", store), []
    assert reader.mirror(reader.local, on_damage=told.append) > 0
    assert sorted(line.split(":")[0] for line in told) == [f"events of pod-{number}" for number in (0, 1, 3)]
    assert set(files(reader.local / "events")) == {"pod-0.1.jsonl", "pod-2.1.jsonl", "supervisor.1.jsonl"}
    assert reader.heads(RUN, on_damage=told.append)["supervisor.1.jsonl"] and len(told) == 6
    with pytest.raises(MusterError, match="events of pod"):
        reader.mirror(reader.local)
    refused = home_at(tmp_path / "c", store)
    store.faults = {store.requests + number: "refused" for number in range(1, 20)}
    with pytest.raises(BusyError):
        refused.mirror(refused.local, on_damage=told.append)  # a busy store is no damage
    assert all("429" not in line for line in told)
    store.faults = {}
    store.put(f"{HOME}/events/supervisor.1/0-0000000001", b"of somebody else")
    told.clear()
    reader.mirror(reader.local, on_damage=told.append)
    assert sum(line.startswith("events of supervisor.1:") for line in told) == 1
    store.held.pop(f"{HOME}/events/supervisor.1/0-0000000000")  # nobody can go on without it
    with pytest.raises(MusterError, match=r"events of supervisor\.1"):
        reader.mirror(reader.local, on_damage=told.append)


def test_an_outage_delays_and_loses_nothing(tmp_path):
    store = Objects()
    log = home_at(tmp_path / "a", store).open_log(RUN, "supervisor", 1)
    assert log.sync()
    store.down = True
    say(log, "one")
    assert not log.sync()
    assert "429" in log.unsealed
    say(log, "two")
    store.down = False
    assert log.sync()
    assert log.unsealed is None
    assert mirrored(store, tmp_path / "b") == files(tmp_path / "a" / "events")


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_nothing_is_lost_whatever_is_killed(tmp_path_factory, data):
    """Lines, seals, merges (the writer's own and the supervisor's), a second process that ships the same folder, and
    successors, with faults at any requests: the mirror is a beginning of the files, holds all that a seal promised, and
    in the end everything."""
    root = tmp_path_factory.mktemp("stream")
    fault = st.sampled_from(["refused", "lost", "killed before", "killed after"])
    store = Objects(data.draw(st.dictionaries(st.integers(0, 120), fault, max_size=12)))
    local, promised = root / "a", {}
    home, beside = home_at(local, store), home_at(local, store)
    log = home.open_log(RUN, "pod-0", 0)
    tidier = Tidier(store, f"{HOME}/events", RUN, lambda: 0.0)
    others = st.sampled_from(["nobody", "nobody", "tidier", "beside"])
    for turn in range(data.draw(st.integers(1, 40))):
        say(log, f"line {turn}")
        try:
            if log.sync():
                promised = files(local / "events")
            merge_own(home.stream(RUN, "pod-0"), store)
            other = data.draw(others) if turn else "nobody"
            if other == "tidier":
                tidier.tidy("pod-0")
            elif other == "beside":
                with pytest.raises(BusyError):
                    beside.stream(RUN, "pod-0").ship()
        except Killed:
            log.close()
            home.stream(RUN, "pod-0").release()
            if data.draw(st.booleans()):  # the pod's own process ships what its agent left
                home, beside = beside, home_at(local, store)
            else:
                home = home_at(local, store)
            log = home.open_log(RUN, "pod-0", data.draw(st.integers(0, 2)))
        except ConflictError:
            raise
        except MusterError:
            pass
    store.faults = {}
    seen = mirrored(store, root / "b")
    real = files(local / "events")
    assert all(real[name].startswith(held) for name, held in seen.items())
    assert all(seen[name].startswith(held) for name, held in promised.items())
    assert log.sync()
    merge_own(home.stream(RUN, "pod-0"), store)
    complete = {name: held for name, held in files(local / "events").items() if held}
    assert mirrored(store, root / "b") == mirrored(store, root / "c") == complete
    assert len(store.names(HOME)) < 3 * 8
