"""Files in a bucket: the home holds a prefix of each, whatever is killed or lost, and of one writer only."""

import contextlib
import os
import threading
import time
from pathlib import Path

import pytest
from fakes.chains import check_directory
from fakes.clock import VirtualClock
from fakes.objects import Killed, Objects
from hypothesis import given, settings
from hypothesis import strategies as st

from muster.core.errors import BusyError, ConflictError, MusterError, UsageError
from muster.storage.home import HOME_FILE, BucketHome, FolderHome, chunks, open_home
from muster.storage.home.chunks import uri_of

RUN = "run-1"
HOME = "gs://bucket/runs/run-1"
FIRST = f"{HOME}/events/supervisor.1/supervisor.1.jsonl"


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
    assert store.held[f"{FIRST}/000000000000"].data == b"".join(sealed)


def test_attempts_of_a_host_are_files_of_their_own_and_a_successor_goes_on(tmp_path):
    store = Objects()
    home = home_at(tmp_path / "a", store)
    first, second = home.open_log(RUN, "pod-0", 1), home.open_log(RUN, "pod-0", 2)
    say(first, "a")
    say(second, "b")
    assert first.sync()
    say(second, "c")  # not sealed when the agent is killed
    first.close()
    second.close()
    home.shipper(RUN, "pod-0").release()
    again = home_at(tmp_path / "a", store)
    third = again.open_log(RUN, "pod-0", 3)
    say(third, "d")
    assert third.sync()
    assert mirrored(store, tmp_path / "b") == files(tmp_path / "a" / "events")
    assert all(not verdict.problem for verdict in check_directory(tmp_path / "b/events", run_id=RUN).values())


def test_an_ended_file_takes_nothing_more(tmp_path):
    store = Objects()
    zombie = home_at(tmp_path / "a", store).open_log(RUN, "supervisor", 1)
    say(zombie, "decided")
    assert zombie.sync()
    successor = home_at(tmp_path / "b", store)
    successor.end_earlier(RUN, "supervisor", 3)  # term 2 died before it wrote anything
    before = mirrored(store, tmp_path / "b")
    say(zombie, "decided too late")
    with pytest.raises(ConflictError, match="ended by a later process"):
        zombie.sync()
    with pytest.raises(ConflictError):
        zombie.sync()
    assert mirrored(store, tmp_path / "b") == mirrored(store, tmp_path / "c") == before
    second = home_at(tmp_path / "d", store).open_log(RUN, "supervisor", 2)
    say(second, "x")
    with pytest.raises(ConflictError):
        second.sync()
    held = set(store.held)
    successor.end_earlier(RUN, "supervisor", 4)
    assert {uri.split("/")[-3] for uri in store.held.keys() - held} == {"supervisor.3"}, "the others were ended"


def test_a_zombie_whose_file_is_damaged_here_cannot_go_on_in_the_next_part(tmp_path):
    store = Objects()
    zombie = home_at(tmp_path / "a", store).open_log(RUN, "supervisor", 1)
    say(zombie, "decided")
    assert zombie.sync()
    home_at(tmp_path / "b", store).end_earlier(RUN, "supervisor", 2)
    zombie.path.write_bytes(b"")
    say(zombie, "decided too late")
    assert zombie.name == "supervisor.part2.1.jsonl"
    with pytest.raises(ConflictError, match="ended by a later process"):
        zombie.sync()
    assert set(mirrored(store, tmp_path / "c")) == {"supervisor.1.jsonl"}


def test_ending_costs_little_however_many_terms_there_were(tmp_path):
    store = Objects()
    for term in range(1, 30):
        home = home_at(tmp_path / f"{term}", store)
        log = home.open_log(RUN, "supervisor", term)
        say(log, "mine")
        assert log.sync()
        store.counts.clear()
        home_at(tmp_path / "next", store).end_earlier(RUN, "supervisor", term + 1)
        assert store.counts["put"] == 4 and sum(store.counts.values()) <= 8, term
    store.held.pop(f"{HOME}/ended/supervisor")  # it spares requests, no more
    store.counts.clear()
    home_at(tmp_path / "next", store).end_earlier(RUN, "supervisor", 30)
    assert store.counts["list"] == 29, "one each, of its own few objects"
    for wrong in (b"nonsense", b""):
        store.put(f"{HOME}/ended/supervisor", wrong)
        home_at(tmp_path / "next", store).end_earlier(RUN, "supervisor", 30)
    ended = [name for name in store.held if "/events/" in name]
    assert len(ended) == 3 * 29


def test_a_file_that_changes_all_the_time_is_ended_or_given_up(tmp_path):
    """A writer that uploads between our list and our write."""
    store = Objects()
    log = home_at(tmp_path / "a", store).open_log(RUN, "supervisor", 1)
    put, left = store.put_if_absent, [3]

    def raced(uri, data):
        if data == b"" and left[0] > 0:
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


def test_two_commands_mirror_one_folder_at_once(tmp_path, monkeypatch):
    store, truncate = Objects(), os.open

    def slow(path, *given):
        time.sleep(0.01)  # between looking at a file and adding to it
        return truncate(path, *given)

    monkeypatch.setattr("muster.storage.home.mirror.os.open", slow)
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


def test_writes_within_a_second_are_objects_of_their_own_and_later_ones_rewrite_the_newest(tmp_path, monkeypatch):
    """Cloud Storage takes one write a second of an object; a full one is not rewritten."""
    monkeypatch.setattr(chunks, "FULL_BYTES", 1500)
    store, clock = Objects(), VirtualClock()
    log = home_at(tmp_path / "a", store, clock).open_log(RUN, "supervisor", 1)
    ends, puts = [], []
    for pause_s in (0.2, 0.2, *[2.0] * 8):
        say(log, "x")
        before = store.counts["put"]
        assert log.sync()
        puts.append(store.counts["put"] - before)
        ends.append(log.path.stat().st_size)
        clock.sleep(pause_s)
    assert puts == [1] * 10
    first, second, third, *more = store.uris(FIRST)
    assert [first, second, third] == [uri_of(FIRST, at) for at in (0, ends[0], ends[1])]
    assert len(more) == 1 and 1500 <= len(store.held[third].data) < 2000
    assert mirrored(store, tmp_path / "b") == files(tmp_path / "a" / "events")


def test_a_reader_asks_for_what_is_new_alone(tmp_path):
    store, clock = Objects(), VirtualClock()
    log = home_at(tmp_path / "a", store, clock).open_log(RUN, "supervisor", 1)
    reader, got = home_at(tmp_path / "b", store), []
    get = store.get
    store.get = lambda uri, *, start=0: (got.append((uri, start)), get(uri, start=start))[1]
    for _ in range(3):
        before = log.path.stat().st_size
        say(log, "x")
        clock.sleep(5)
        assert log.sync()
        got.clear()
        assert reader.mirror(reader.local) == log.path.stat().st_size - before
        assert got == [(uri_of(FIRST, 0), before)]
    got.clear()
    assert reader.mirror(reader.local) == 0 and got == []


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
    """Lines, seals, a second process that ships the same folder, and successors, with faults at any requests: the
    mirror is a prefix of the files, holds all that a seal promised, and in the end everything."""
    root = tmp_path_factory.mktemp("files")
    fault = st.sampled_from(["refused", "lost", "killed before", "killed after"])
    store, clock = Objects(data.draw(st.dictionaries(st.integers(0, 120), fault, max_size=12))), VirtualClock()
    local, promised = root / "a", {}
    home, beside = home_at(local, store, clock), home_at(local, store, clock)
    log = home.open_log(RUN, "pod-0", 0)
    for turn in range(data.draw(st.integers(1, 40))):
        say(log, f"line {turn}")
        clock.sleep(data.draw(st.sampled_from([0.2, 4.0])))
        try:
            if log.sync():
                promised = files(local / "events")
                if turn and data.draw(st.booleans()):  # not where its first upload was refused: it has no claim yet
                    with pytest.raises(BusyError):
                        beside.shipper(RUN, "pod-0").ship()
        except Killed:
            log.close()
            home.shipper(RUN, "pod-0").release()
            if data.draw(st.booleans()):  # the pod's own process ships what its agent left
                home, beside = beside, home_at(local, store, clock)
            else:
                home = home_at(local, store, clock)
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
    complete = {name: held for name, held in files(local / "events").items() if held}
    assert mirrored(store, root / "b") == mirrored(store, root / "c") == complete


def test_lines_written_during_an_upload_wait_for_the_next_one(tmp_path):
    """A write for each upload, and not another one for the line that came meanwhile."""
    store, logs = Objects(), []
    logs.append(home_at(tmp_path / "a", store).open_log(RUN, "pod-0", 1))
    store.took = lambda method: say(logs[0], "meanwhile") if method == "put" else None
    say(logs[0], "one")
    assert logs[0].sync()
    assert store.counts["put"] == 1
