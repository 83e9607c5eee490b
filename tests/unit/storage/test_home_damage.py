"""Damage in the logs of a run whose home is a bucket: here, in what was brought, and in what is sealed."""

from dataclasses import replace
from pathlib import Path

from fakes.objects import Objects
from test_home_stream import RUN, files, home_at, mirrored, say

from muster.core.event_log import EventReader


def flip(path: Path, number: int) -> None:
    """One bit of a line, counted from 1."""
    lines = path.read_bytes().splitlines(keepends=True)
    lines[number - 1] = b"[" + lines[number - 1][1:]
    path.write_bytes(b"".join(lines))


def texts(folder):
    reader = EventReader(folder)
    found = [event.detail.get("text") for _, event in reader.read()]
    return found, [str(damage) for damage in reader.damaged]


def written(folder, store, *words):
    home = home_at(folder, store)
    log = home.open_log(RUN, "host-0", 1)
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
