"""Damage in the logs of a run whose home is a bucket: here, in what was brought, and in what is sealed."""

from dataclasses import replace
from pathlib import Path

import pytest
from fakes.objects import Objects
from test_home_stream import HOME, RUN, files, home_at, mirrored, say

from muster.backends import run_home
from muster.core.errors import ConflictError
from muster.core.event_log import EventReader
from muster.storage.home.merging import end_streams


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
    home = home_at(folder, store)
    log = home.open_log(RUN, writer, 1)
    say(log, *words)
    assert log.sync()
    return home, log


def end(home, log):
    log.close()
    for stream in home.streams.values():
        stream.release()


def test_a_writer_whose_sealed_lines_were_damaged_here_goes_on(tmp_path):
    """What the home holds of the damaged file is whole, and stays; what follows is in the second part."""
    store = Objects()
    home, log = written(tmp_path / "a", store, "one", "two", "three")
    end(home, log)
    flip(log.path, 2)
    home, log = written(tmp_path / "a", store, "four")
    assert log.name == "host-0.part2.1.jsonl" and log.unsealed is None
    mirrored(store, tmp_path / "b")
    assert texts(tmp_path / "b" / "events") == (["one", "two", "three", None, "four"], [])
    (damage,) = texts(tmp_path / "a" / "events")[1]
    assert damage.startswith("host-0.1.jsonl:2: not an event")


def test_a_file_that_was_cut_short_here_keeps_no_other_from_the_home(tmp_path):
    store = Objects()
    _, log = written(tmp_path / "a", store, "one", "two", "three")
    log.path.write_bytes(log.path.read_bytes().splitlines(keepends=True)[0])
    say(log, "four")
    assert log.sync() and log.name == "host-0.part2.1.jsonl"
    mirrored(store, tmp_path / "b")
    assert texts(tmp_path / "b" / "events") == (["one", "two", "three", None, "four"], [])


def test_a_mirror_that_was_damaged_is_brought_anew(tmp_path):
    store = Objects()
    _, log = written(tmp_path / "a", store, "one", "two")
    reader = home_at(tmp_path / "b", store)
    reader.mirror(reader.local)
    flip(reader.local / "events" / log.name, 2)
    damaged = (reader.local / "events" / log.name).read_bytes()
    say(log, "three")
    assert log.sync()
    reader.mirror(reader.local)
    assert files(reader.local / "events") == files(tmp_path / "a" / "events")
    assert (reader.local / "events" / f"{log.name}.damaged").read_bytes() == damaged


def test_a_mirror_that_was_cut_short_is_brought_anew(tmp_path):
    store = Objects()
    _, log = written(tmp_path / "a", store, "one", "two")
    reader = home_at(tmp_path / "b", store)
    reader.mirror(reader.local)
    (reader.local / "events" / log.name).write_bytes(b"")
    say(log, "three")
    assert log.sync()
    reader.mirror(reader.local)
    assert files(reader.local / "events") == files(tmp_path / "a" / "events")


def test_a_sealed_object_with_a_damaged_line_costs_that_line(tmp_path):
    """Whoever reads it, again and again, and whatever is sealed after it."""
    store = Objects()
    _, log = written(tmp_path / "a", store, "one", "two")
    (uri,) = [uri for uri in store.held if "/events/host-0/" in uri]
    header, first, second = store.held[uri].data.splitlines(keepends=True)
    store.held[uri] = replace(store.held[uri], data=header + first + b"[" + second[1:])
    for number, text in enumerate(("three", "four")):
        reader = home_at(tmp_path / "b", store)
        reader.mirror(reader.local)
        say(log, text)
        assert log.sync()
        reader.mirror(reader.local)
        found, damaged = texts(reader.local / "events")
        assert found == ["one", "three", "four"][: number + 2] and len(damaged) == 1


@pytest.mark.parametrize("writer", ["host-0", "supervisor"])
@pytest.mark.parametrize("cut", ["a line", "half a line"])
def test_a_mirror_that_lost_its_end_is_brought_anew(tmp_path, writer, cut):
    """Such a file's chain is whole, so only its size tells; also where nothing was written since."""
    store = Objects()
    _, log = written(tmp_path / "a", store, "one", "two", writer=writer)
    reader = home_at(tmp_path / "b", store)
    for text in (None, "three"):
        reader.mirror(reader.local)
        path = reader.local / "events" / log.name
        lines = path.read_bytes().splitlines(keepends=True)
        path.write_bytes(b"".join(lines[:-1]) + (lines[-1][:20] if cut == "half a line" else b""))
        if text is not None:
            say(log, text)
            assert log.sync()
        home_at(tmp_path / "b", store).mirror(reader.local)
        assert files(reader.local / "events") == files(tmp_path / "a" / "events")
    assert not list((reader.local / "events").glob("*.damaged"))


def damaged_header(store, stream, number, folder="events"):
    """One bit of it; what was there before."""
    (uri,) = [uri for uri in store.held if f"/{folder}/{stream}/0-{number:010d}" in uri]
    before = store.held[uri]
    assert before.data.count(b'"format":1') == 1
    store.held[uri] = replace(before, data=before.data.replace(b'"format":1', b'"format":0', 1))
    return uri, before


@pytest.mark.parametrize("writer", ["host-0", "supervisor"])
def test_an_object_whose_header_was_damaged_costs_what_it_held(tmp_path, writer):
    """What follows comes, also of a supervisor; every look tells; the object's return mends it."""
    store = Objects()
    home, log = written(tmp_path / "a", store, "one", writer=writer)
    for text in ("two", "three"):
        say(log, text)
        assert log.sync()
    uri, before = damaged_header(store, f"{writer}.1" if writer == "supervisor" else writer, 1)
    reader = home_at(tmp_path / "b", store)
    for _ in range(2):
        told = []
        reader.mirror(reader.local, on_damage=told.append)
        assert len(told) == 1 and "0-0000000001 is damaged" in told[0]
        found, damage = texts(reader.local / "events")
        assert found == ["one", "three"] and damage[0].startswith(f"{log.name}:2: not an event")
        assert (reader.local / "events" / log.name).stat().st_size == log.path.stat().st_size
    store.held[uri] = before
    reader.mirror(reader.local)
    assert files(reader.local / "events") == files(tmp_path / "a" / "events")
    end(home, log)


@pytest.mark.parametrize("name", ["pod-0", "supervisor.1"])
def test_damaged_output_costs_what_it_held_and_is_said(tmp_path, capsys, name):
    """``muster logs``: the rest of it, and every other file, is shown."""
    store = Objects()
    home = home_at(tmp_path / "a", store)
    (home.local / "logs").mkdir()
    for stream in (name, "pod-1"):
        output = home.output(RUN, stream)
        for word in ("one", "two", "three"):
            with open(home.local / "logs" / f"rank-{stream}.log", "a") as file:
                file.write(
                    f"{word} with some more words that make it a line of ordinary length, of which much may be lost\n"
                )
            output.look()
            output.ship()
        (home.local / "logs" / f"rank-{stream}.log").unlink()
    damaged_header(store, name, 1, folder="logs")
    reader = home_at(tmp_path / "b", store)
    chunks = {chunk.task: chunk for chunk in run_home.logs(reader, {})}
    words = [line.partition(" with")[0] for line in chunks[f"rank-{name}"].text.splitlines()]
    assert words[::2] == ["one", "three"] and words[1].rstrip().endswith("object in the run's home is damaged")
    assert chunks["rank-pod-1"].text.count("with some") == 3
    assert capsys.readouterr().err.count(f"warning: logs of {name}: ") == 1
    assert list(run_home.logs(reader, {task: chunk.next_offset for task, chunk in chunks.items()})) == []
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("number", [0, 1, 2])
def test_a_returning_writer_ships_past_an_object_whose_header_was_damaged(tmp_path, number):
    store = Objects()
    home, log = written(tmp_path / "a", store, "one")
    for text in ("two", "three"):
        say(log, text)
        assert log.sync()
    end(home, log)
    damaged_header(store, "host-0", number)
    written(tmp_path / "a", store, "four")
    told = []
    reader = home_at(tmp_path / "b", store)
    reader.mirror(reader.local, on_damage=told.append)
    # The newest one is shipped again: nothing after it says how much it held.
    assert texts(reader.local / "events")[0] == [
        text for at, text in enumerate(("one", "two", "three", "four")) if at != number or number == 2
    ]
    assert len(told) == 1


def test_a_writer_whose_stream_was_perhaps_ended_does_not_go_on(tmp_path):
    """An end is an object without a body: damaged, it may not be taken for anything else."""
    store = Objects()
    home, log = written(tmp_path / "a", store, "one")
    end(home, log)
    home_at(tmp_path / "b", store).end_earlier(RUN, "supervisor", 1)
    end_streams(store, f"{HOME}/events", ["host-0"], run_id=RUN, by="another")
    damaged_header(store, "host-0", 1)
    home = home_at(tmp_path / "a", store)
    log = home.open_log(RUN, "host-0", 1)
    say(log, "two")
    assert not log.sync() and "0-0000000001 is damaged" in log.unsealed


def test_a_supervisor_whose_newest_object_was_damaged_can_be_ended(tmp_path):
    store = Objects()
    _, log = written(tmp_path / "a", store, "one", writer="supervisor")
    damaged_header(store, "supervisor.1", 0)
    home_at(tmp_path / "b", store).end_earlier(RUN, "supervisor", 2)
    say(log, "two")
    with pytest.raises(ConflictError, match="ended by"):
        log.sync()


def test_a_damaged_line_in_the_home_deposes_no_returning_writer(tmp_path):
    """Nor does it spoil a copy that is whole."""
    store = Objects()
    home, log = written(tmp_path / "a", store, "one", "two")
    end(home, log)
    (uri,) = [uri for uri in store.held if "/events/host-0/" in uri]
    header, first, second = store.held[uri].data.splitlines(keepends=True)
    store.held[uri] = replace(store.held[uri], data=header + first[:-9] + b"?" + first[-8:] + second)
    _, log = written(tmp_path / "a", store, "three")
    assert log.unsealed is None and log.name == "host-0.1.jsonl"
    mirrored(store, tmp_path / "b")
    found, damage = texts(tmp_path / "b" / "events")
    assert found == ["two", "three"] and len(damage) == 1
    whole = files(tmp_path / "a" / "events")
    reader = home_at(tmp_path / "a", store)
    reader.mirror(reader.local)
    assert files(tmp_path / "a" / "events") == whole


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
