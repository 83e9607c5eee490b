"""Damage in the files of a run whose home is a bucket: here, in what was brought, and in the bucket. It is refused with
the name of what is damaged and the way out, and concerns no other file."""

import re
from dataclasses import replace
from pathlib import Path

import pytest
from fakes.clock import VirtualClock
from fakes.objects import Objects
from test_home_stream import HOME, RUN, files, home_at, mirrored, say

from muster.backends import run_home
from muster.core.errors import BusyError, ConflictError, MusterError, UsageError
from muster.core.event_log import EventReader
from muster.storage.home.chunks import Damaged, uri_of


def flip(path: Path, number: int) -> None:
    """One bit of a line, counted from 1."""
    lines = path.read_bytes().splitlines(keepends=True)
    lines[number - 1] = b"[" + lines[number - 1][1:]
    path.write_bytes(b"".join(lines))


def texts(folder):
    reader = EventReader(folder)
    found = [event.detail.get("text") for _, event in reader.read()]
    return found, [str(damage) for damage in reader.damaged]


def written(folder, store, *words, writer="host-0"):
    """An object for each of these lines."""
    home = home_at(folder, store)
    log = home.open_log(RUN, writer, 1)
    for word in words:
        say(log, word)
        assert log.sync()
    return home, log


def end(home, log):
    log.close()
    for shipper in home.shippers.values():
        shipper.release()


def objects_of(store, log):
    return [uri for uri in store.uris(f"{HOME}/events") if f"/{log.name}/" in uri]


# ---------------------------------------------------------------- here


def test_a_writer_whose_uploaded_lines_were_damaged_here_goes_on(tmp_path):
    """What the home holds of the damaged file is whole, and stays; what follows is in the second part."""
    store = Objects()
    home, log = written(tmp_path / "a", store, "one", "two", "three")
    end(home, log)
    flip(log.path, 3)
    _, log = written(tmp_path / "a", store, "four")
    assert log.name == "host-0.part2.1.jsonl" and log.unsealed is None
    mirrored(store, tmp_path / "b")
    assert texts(tmp_path / "b" / "events") == (["one", "two", "three", None, "four"], [])
    (damage,) = texts(tmp_path / "a" / "events")[1]
    assert damage.startswith("host-0.1.jsonl:3: not an event")


def test_lines_that_are_damaged_here_are_not_uploaded(tmp_path):
    """Not those that the home holds already, when its newest object is rewritten, nor new ones."""
    store, clock = Objects(), VirtualClock()
    log = home_at(tmp_path / "a", store, clock).open_log(RUN, "host-0", 1)
    say(log, "one", "two")
    assert log.sync()
    flip(log.path, 1)
    clock.sleep(5)
    say(log, "three")
    assert log.sync()
    assert texts_of(store, tmp_path / "b") == ["one", "two", "three"]
    say(log, "four", "five")
    flip(log.path, 4)
    assert not log.sync() and "damaged from byte" in log.unsealed
    assert texts_of(store, tmp_path / "c") == ["one", "two", "three"]


def texts_of(store, folder):
    mirrored(store, folder)
    return texts(folder / "events")[0]


def test_a_file_that_was_cut_short_here_keeps_no_other_from_the_home(tmp_path):
    store = Objects()
    _, log = written(tmp_path / "a", store, "one", "two", "three")
    log.path.write_bytes(log.path.read_bytes().splitlines(keepends=True)[0])
    say(log, "four")
    assert log.sync() and log.name == "host-0.part2.1.jsonl"
    mirrored(store, tmp_path / "b")
    assert texts(tmp_path / "b" / "events") == (["one", "two", "three", None, "four"], [])


@pytest.mark.parametrize("writer", ["host-0", "supervisor"])
@pytest.mark.parametrize("cut", ["all", "a line", "half a line"])
def test_a_mirror_that_lost_its_end_is_made_whole(tmp_path, writer, cut):
    """Also where nothing was written since."""
    store = Objects()
    _, log = written(tmp_path / "a", store, "one", "two", writer=writer)
    reader = home_at(tmp_path / "b", store)
    for text in (None, "three"):
        reader.mirror(reader.local)
        path = reader.local / "events" / log.name
        lines = path.read_bytes().splitlines(keepends=True)
        left = {"all": [], "a line": lines[:-1], "half a line": [*lines[:-1], lines[-1][:20]]}[cut]
        path.write_bytes(b"".join(left))
        if text is not None:
            say(log, text)
            assert log.sync()
        home_at(tmp_path / "b", store).mirror(reader.local)
        assert files(reader.local / "events") == files(tmp_path / "a" / "events")


def test_a_mirror_that_was_damaged_is_named_and_comes_again_once_it_is_removed(tmp_path):
    store = Objects()
    _, log = written(tmp_path / "a", store, "one", "two")
    reader = home_at(tmp_path / "b", store)
    reader.mirror(reader.local)
    path = reader.local / "events" / log.name
    flip(path, 2)
    say(log, "three")
    assert log.sync()
    before = path.read_bytes()
    with pytest.raises(Damaged, match=re.escape(str(path))) as refused:
        reader.mirror(reader.local)
    assert refused.value.hint == f"remove {path}: it is brought again" and path.read_bytes() == before
    path.unlink()
    reader.mirror(reader.local)
    assert files(reader.local / "events") == files(tmp_path / "a" / "events")


# ---------------------------------------------------------------- in the bucket


def changed(store, uri, old, new):
    """What was there before."""
    before = store.held[uri]
    assert before.data.count(old) == 1
    store.held[uri] = replace(before, data=before.data.replace(old, new))
    return before


@pytest.mark.parametrize("number", [0, 1, 2])
def test_a_changed_object_is_refused_by_name_until_it_is_restored(tmp_path, number):
    """A change of the last line alone is found once another line cites it."""
    store = Objects()
    home, log = written(tmp_path / "a", store, "one", "two", "three", "four")
    written(tmp_path / "other", store, "fine", writer="host-1")
    uri = objects_of(store, log)[number]
    before = changed(store, uri, b'"run.message"', b'"run.massage"')
    reader = home_at(tmp_path / "b", store)
    for _ in range(2):
        reported = []
        reader.mirror(reader.local, on_damage=reported.append)
        after = objects_of(store, log)[number + 1]
        assert len(reported) == 1 and reported[0].startswith("events of host-0: ")
        assert after in reported[0] and ("restore it" in reported[0] or "remove" in reported[0])
        assert "fine" in texts(reader.local / "events")[0], "no other file is concerned"
    store.held[uri] = before
    (reader.local / "events" / log.name).unlink()
    reader.mirror(reader.local)
    assert texts_of(store, tmp_path / "c") == ["one", "two", "three", "four", "fine"]
    end(home, log)


def test_a_missing_object_is_named_and_the_rest_comes(tmp_path):
    store = Objects()
    for host in ("pod-0", "pod-1"):
        written(tmp_path / host, store, "one", "two", "three", writer=host)
    missing = [uri for uri in store.uris(HOME) if "/pod-0/" in uri][1]
    kept = store.held.pop(missing)
    with pytest.raises(Damaged, match=rf"events of pod-0: {missing} is missing: there are objects up to") as refused:
        mirrored(store, tmp_path / "b")
    assert "restore it" in refused.value.hint
    assert texts(tmp_path / "b" / "events")[0] == ["one", "one", "two", "three"]
    store.held[missing] = kept
    mirrored(store, tmp_path / "b")
    assert files(tmp_path / "b/events") == files(tmp_path / "pod-0/events") | files(tmp_path / "pod-1/events")


def test_objects_that_were_removed_from_one_on_are_uploaded_again_by_a_writer_that_returns(tmp_path):
    """The way out that the error names."""
    store = Objects()
    home, log = written(tmp_path / "a", store, "one", "two", "three")
    end(home, log)
    for uri in objects_of(store, log)[1:]:
        store.delete(uri)
    written(tmp_path / "a", store, "four")
    assert texts_of(store, tmp_path / "b") == ["one", "two", "three", "four"]


def test_a_writer_that_returns_does_not_go_on_after_a_gap(tmp_path):
    store = Objects()
    home, log = written(tmp_path / "a", store, "one", "two", "three")
    end(home, log)
    missing = objects_of(store, log)[1]
    store.delete(missing)
    held = dict(store.held)
    home = home_at(tmp_path / "a", store)
    log = home.open_log(RUN, "host-0", 1)
    say(log, "four")
    for _ in range(3):
        assert not log.sync() and f"{missing} is missing" in log.unsealed
    assert store.held == held and store.counts["list"] < 10


def test_damage_of_one_host_stops_no_mirror_and_a_supervisors_does(tmp_path):
    store = Objects()
    for writer in ("pod-0", "pod-1", "supervisor"):
        written(tmp_path / writer, store, "one", "two", writer=writer)
    store.put(f"{HOME}/events/pod-0/supervisor.1.jsonl/000000000000", b"of somebody else")
    store.put(f"{HOME}/events/pod-1/{'x' * 300}.1.jsonl/000000000000", b"\n")
    reader, reported = home_at(tmp_path / "b", store), []
    assert reader.mirror(reader.local, on_damage=reported.append) > 0
    assert sorted(line.split(":")[0] for line in reported) == ["events of pod-0", "events of pod-1"]
    assert set(files(reader.local / "events")) == {"pod-0.1.jsonl", "pod-1.1.jsonl", "supervisor.1.jsonl"}
    assert reader.heads(RUN, on_damage=reported.append)["supervisor.1.jsonl"] and len(reported) == 4
    with pytest.raises(Damaged, match="events of pod"):
        reader.mirror(reader.local)
    refused = home_at(tmp_path / "c", store)
    store.faults = {store.requests + number: "refused" for number in range(1, 20)}
    with pytest.raises(BusyError):
        refused.mirror(refused.local, on_damage=reported.append)  # a busy store is no damage
    assert all("429" not in line for line in reported)
    store.faults = {}
    store.delete(uri_of(f"{HOME}/events/supervisor.1/supervisor.1.jsonl", 0))
    with pytest.raises(Damaged, match=r"events of supervisor\.1.*is missing"):
        refused.mirror(refused.local, on_damage=reported.append)


def test_a_rival_is_still_a_rival(tmp_path):
    """Whole lines that this folder does not hold."""
    store = Objects()
    home, log = written(tmp_path / "a", store, "one")
    end(home, log)
    store.held.clear()
    written(tmp_path / "b", store, "another")
    home = home_at(tmp_path / "a", store)
    log = home.open_log(RUN, "host-0", 1)
    say(log, "two")
    with pytest.raises(ConflictError, match="did not write"):
        log.sync()
    later = home.open_log(RUN, "host-0", 2)
    say(later, "another attempt is another file")
    with pytest.raises(ConflictError):
        later.sync()
    assert texts_of(store, tmp_path / "c") == ["another", "another attempt is another file"]


def test_a_home_of_an_earlier_format_is_refused_with_the_version_that_reads_it(tmp_path):
    store = Objects()
    for name in ("0-0000000041", "1-0000000000-0000000007"):
        store.held.clear()
        store.put(f"{HOME}/events/pod-0/{name}", b"0badcafe {}\n")
        with pytest.raises(UsageError, match="is of a home of format 3 or older") as refused:
            mirrored(store, tmp_path / "b")
        assert "331955c5" in refused.value.hint


# ---------------------------------------------------------------- output


def test_output_before_a_missing_object_is_shown_and_the_gap_is_said(tmp_path, capsys):
    """``muster logs``: every other file is shown whole."""
    store, clock = Objects(), VirtualClock()
    home = home_at(tmp_path / "a", store, clock)
    (home.local / "logs").mkdir()
    for writer in ("pod-0", "pod-1"):
        output = home.output(writer)
        for word in ("one", "two", "three"):
            with open(home.local / "logs" / f"rank-{writer}.log", "a") as file:
                print(word, file=file)
            output.ship()
        (home.local / "logs" / f"rank-{writer}.log").unlink()
    store.delete(uri_of(f"{HOME}/logs/pod-0/rank-pod-0.log", 4))
    reader = home_at(tmp_path / "b", store)
    chunks = {chunk.task: chunk for chunk in run_home.logs(reader, {})}
    assert {task: chunk.text for task, chunk in chunks.items()} == {
        "rank-pod-0": "one\n",
        "rank-pod-1": "one\ntwo\nthree\n",
    }
    assert capsys.readouterr().err.count("warning: logs of pod-0: ") == 1
    assert list(run_home.logs(reader, {task: chunk.next_offset for task, chunk in chunks.items()})) == []
    assert capsys.readouterr().err == ""
    with pytest.raises(MusterError):
        reader.mirror(reader.local, what="logs")
