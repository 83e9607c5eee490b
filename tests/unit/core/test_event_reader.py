"""Damage in an event file: said once with its place, and everything else is read."""

from __future__ import annotations

import json
import os
import tempfile
import time
from pathlib import Path
from random import Random

import pytest
from fakes.event_details import random_detail
from hypothesis import given, settings
from hypothesis import strategies as st

from muster.core.event_details.kinds import KINDS
from muster.core.event_log import Damage, EventLog, EventReader, in_words
from muster.core.event_log.names import LogName, files_of, parts_pattern
from muster.core.event_log.reader import MOST_NAMED
from muster.core.events import encode

NAME = "host-0.1.jsonl"
DETAIL = random_detail(KINDS["step"], Random(1))


def written(folder: Path, steps: int, *, writer: str = "host-0") -> list[bytes]:
    log = EventLog("run-1", folder, writer, 1)
    for step in range(1, steps + 1):
        log.append("step", step=step, rank=0, detail=DETAIL)
    log.close()
    return (folder / f"{writer}.1.jsonl").read_bytes().splitlines(keepends=True)


def steps(reader: EventReader) -> list[int | None]:
    return [event.step for _, event in reader.read()]


@pytest.fixture
def lines(tmp_path: Path) -> list[bytes]:
    return written(tmp_path, 6)


def read(folder: Path, lines: list[bytes]) -> tuple[list[int | None], list[str]]:
    (folder / NAME).write_bytes(b"".join(lines))
    reader = EventReader(folder)
    found = steps(reader)
    again = [str(damage) for damage in reader.damaged]
    assert steps(reader) == [] and [str(damage) for damage in reader.damaged] == again, "nothing is said twice"
    return found, again


@pytest.mark.parametrize(
    "bad", [text + b"\n" for text in (b"", b"{}", b"[]", b"\xff\xfe", b"[" * 100_000, b"1e999", b"\0" * 4096)]
)
def test_a_line_that_is_no_event_is_left_out(tmp_path: Path, lines: list[bytes], bad: bytes):
    found, damaged = read(tmp_path, [*lines[:2], bad, *lines[3:]])
    assert found == [1, 2, 4, 5, 6]
    assert len(damaged) == 1 and damaged[0].startswith(f"{NAME}:3: not an event")


def test_a_changed_number_is_not_believed(tmp_path: Path, lines: list[bytes]):
    found, damaged = read(tmp_path, [*lines[:2], lines[2].replace(b'"step":3', b'"step":9'), *lines[3:]])
    assert found == [1, 2, 4, 5, 6]
    assert damaged == [f"{NAME}:3: it was changed: the next line cites another one"]


def test_a_changed_citation_costs_its_own_line_alone(tmp_path: Path, lines: list[bytes]):
    prev = json.loads(lines[2])["prev"].encode()
    found, damaged = read(tmp_path, [*lines[:2], lines[2].replace(prev, prev[::-1]), *lines[3:]])
    assert found == [1, 2, 4, 5, 6] and [text.split(":")[1] for text in damaged] == ["3"]


def test_dropped_lines_are_said(tmp_path: Path, lines: list[bytes]):
    assert read(tmp_path, [*lines[:2], *lines[4:]]) == ([1, 2, 5, 6], [f"{NAME}:3: 2 lines are missing before it"])
    assert read(tmp_path, lines[2:]) == ([3, 4, 5, 6], [f"{NAME}:1: 2 lines are missing before it"])


def test_a_line_that_is_there_twice_counts_once(tmp_path: Path, lines: list[bytes]):
    found, damaged = read(tmp_path, [*lines[:3], lines[2], *lines[3:]])
    assert found == [1, 2, 3, 4, 5, 6] and len(damaged) == 1


def test_a_lost_line_end_costs_two_lines(tmp_path: Path, lines: list[bytes]):
    found, damaged = read(tmp_path, [*lines[:2], lines[2].replace(b"\n", b"\r"), *lines[3:]])
    assert found == [1, 2, 5, 6] and len(damaged) == 1


@pytest.mark.parametrize(("field", "value"), [("step", "4"), ("wall_ns", "1"), ("attempt", True), ("detail", [])])
def test_the_last_line_is_read_only_if_every_field_is_as_it_should_be(
    tmp_path: Path, lines: list[bytes], field: str, value: object
):
    """Nothing cites it: its fields are all that there is to check."""
    last = encode({**json.loads(lines[5]), field: value})
    found, damaged = read(tmp_path, [*lines[:5], last])
    assert found == [1, 2, 3, 4, 5] and field in damaged[0]
    last = encode({**json.loads(lines[5]), "detail": {"loss": "low"}})
    assert "loss" in read(tmp_path, [*lines[:5], last])[1][0]


def test_a_line_that_was_changed_after_it_was_read_is_said(tmp_path: Path, lines: list[bytes]):
    (tmp_path / NAME).write_bytes(b"".join([*lines[:2], lines[2].replace(b'"step":3', b'"step":9')]))
    reader = EventReader(tmp_path)
    assert steps(reader) == [1, 2, 9]
    (tmp_path / NAME).write_bytes(b"".join(lines))
    assert steps(reader) == [4, 5, 6]
    assert [damage.line for damage in reader.damaged] == [3]


def test_a_file_that_became_shorter_is_read_again_without_what_was_seen(tmp_path: Path, lines: list[bytes]):
    reader = EventReader(tmp_path)
    assert steps(reader) == [1, 2, 3, 4, 5, 6]
    (tmp_path / NAME).write_bytes(b"".join(lines[:2]))
    assert steps(reader) == []
    (tmp_path / NAME).write_bytes(b"".join([*lines[:2], *written(tmp_path / "more", 8)[6:]]))
    assert steps(reader) == [7, 8]
    assert "shorter" in reader.damaged[0].reason


def test_a_file_that_cannot_be_read_keeps_no_other_from_it(tmp_path: Path, lines: list[bytes]):
    written(tmp_path, 2, writer="host-1")
    (tmp_path / NAME).unlink()
    (tmp_path / NAME).mkdir()
    reader = EventReader(tmp_path)
    assert steps(reader) == [1, 2] and "cannot be read" in str(reader.damaged[0])


def test_a_file_added_to_itself_yields_each_event_once(tmp_path: Path, lines: list[bytes]):
    found, damaged = read(tmp_path, [*lines, *lines])
    assert found == [1, 2, 3, 4, 5, 6] and damaged == [f"{NAME}:7: it is there a second time"]
    assert read(tmp_path, [*lines, *lines[2:], *lines[:4]])[0] == [1, 2, 3, 4, 5, 6]


def test_thousands_of_bad_lines_are_counted_and_not_named(tmp_path: Path, lines: list[bytes]):
    begun_s = time.process_time()
    told: list[Damage] = []
    (tmp_path / NAME).write_bytes(b"".join([*lines[:3], *(b"%d\n" % n for n in range(30_000)), *lines[3:]]))
    reader = EventReader(tmp_path, told.append)
    assert steps(reader) == [1, 2, 3, 4, 5, 6]
    assert len(reader.damaged) == MOST_NAMED + 1 and told == reader.damaged
    more = 30_000 - MOST_NAMED
    assert str(reader.damaged[-1]) == f"{NAME}: and {more} more lines"
    assert in_words(told) == [f"{told[0]} (and 29999 more places); read without it"]
    with open(tmp_path / NAME, "ab") as file:
        file.write(b"one more\n")
    assert steps(reader) == [] and str(reader.damaged[-1]) == f"{NAME}: and {more + 1} more lines"
    assert len(told) == MOST_NAMED + 1, "not said again"
    assert time.process_time() - begun_s < 20, "in time that grows with the lines, not with their square"


def test_one_sentence_a_file():
    damaged = [Damage(file="a.1.jsonl", line=n, reason="not an event") for n in (3, 4)]
    assert in_words([*damaged, Damage(file="b.1.jsonl", line=0, reason="gone")]) == [
        "a.1.jsonl:3: not an event (and 1 more places); read without it",
        "b.1.jsonl: gone; read without it",
    ]


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_one_damaged_byte_costs_two_events_at_most_and_invents_none(data: st.DataObject):
    with tempfile.TemporaryDirectory() as folder:
        whole = bytearray(b"".join(written(Path(folder), 5)))
        last = bytes(whole).rfind(b"\n", 0, len(whole) - 1) + 1
        before = {event.seq: event for _, event in EventReader(Path(folder)).read()}
        place = data.draw(st.integers(0, last - 1), label="byte of a line that another one cites")
        whole[place] ^= data.draw(st.integers(1, 255), label="flip")
        (Path(folder) / NAME).write_bytes(whole)
        reader = EventReader(Path(folder))
        found = [event for _, event in reader.read()]
    assert all(before[event.seq] == event for event in found)
    assert len(found) >= 3 and 1 <= len(reader.damaged) <= 2


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=300), st.integers(0, 5), st.integers(0, 5))
def test_any_bytes_raise_nothing(noise: bytes, keep: int, after: int):
    with tempfile.TemporaryDirectory() as folder:
        lines = written(Path(folder), 5)
        (Path(folder) / NAME).write_bytes(b"".join(lines[:keep]) + noise + b"".join(lines[after:]))
        reader = EventReader(Path(folder))
        found = steps(reader)
        assert found[: max(0, keep - 1)] == list(range(1, keep))
        log = EventLog("run-1", Path(folder), "host-0", 1)
        log.append("run.message", detail={"text": "goes on"})
        log.close()
        assert [event.kind for _, event in reader.read()][-1] == "run.message"


def test_names():
    assert LogName.of("supervisor.part2.4.jsonl") == LogName(writer="supervisor", part=2, attempt=4)
    assert str(LogName(writer="host-0.x", part=3, attempt=7)) == "host-0.x.part3.7.jsonl"
    for name in ("host-0.jsonl", "host-0.part1.2.jsonl", ".host.1.jsonl", "host@x.1.jsonl", "host.1.jsonl\n"):
        assert LogName.of(name) is None, name
    assert parts_pattern("host", 2).match("host.part3.2.jsonl") and not parts_pattern("host", 2).match("host.12.jsonl")


def test_files_in_the_order_in_which_they_were_begun(tmp_path: Path):
    for name in ("supervisor.10.jsonl", "supervisor.part2.9.jsonl", "supervisor.9.jsonl", "supervisors.1.jsonl"):
        os.close(os.open(tmp_path / name, os.O_CREAT))
    names = [path.name for path in files_of(tmp_path, "supervisor")]
    assert names == ["supervisor.9.jsonl", "supervisor.part2.9.jsonl", "supervisor.10.jsonl"]


def test_what_is_there_can_be_skipped(tmp_path: Path) -> None:
    """A line that is being written at that moment is read once it is whole, and damage behind it is seen as ever."""
    given = written(tmp_path, 9)
    path, reader = tmp_path / NAME, EventReader(tmp_path)
    path.write_bytes(b"".join(given[:4]) + given[4][:30])
    reader.skip()
    assert steps(reader) == []
    path.write_bytes(b"".join(given[:7]))
    assert steps(reader) == [5, 6, 7] and reader.damaged == []
    path.write_bytes(b"".join(given[:7]) + b"garbage\n" + given[7] + given[8])
    assert steps(reader) == [8, 9] and len(reader.damaged) == 1
    (tmp_path / "host-1.1.jsonl").write_bytes(b'{"run_id":')
    begun = EventReader(tmp_path)
    begun.skip()
    written(tmp_path / "other", 2, writer="host-1")
    (tmp_path / "host-1.1.jsonl").write_bytes((tmp_path / "other" / "host-1.1.jsonl").read_bytes())
    assert steps(begun) == [1, 2], "a file whose first line was being written"


def test_one_writers_files(tmp_path: Path) -> None:
    written(tmp_path, 3)
    written(tmp_path, 2, writer="supervisor")
    assert steps(EventReader(tmp_path, writer="supervisor")) == [1, 2]
    assert len(steps(EventReader(tmp_path))) == 5
