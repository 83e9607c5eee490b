"""One damaged event file, one opinion: what readers yield and call damage is what the audit counts and reports, and the
audit's own look at the chain finds a break exactly where one of them does."""

from __future__ import annotations

import json
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from random import Random

import pytest
from fakes.chains import check_directory
from fakes.event_details import random_detail
from hypothesis import example, given, settings
from hypothesis import strategies as st

from muster.core import resolved_file
from muster.core.event_details.kinds import KINDS
from muster.core.event_log import EventLog, EventReader
from muster.report.audit.history import Finding, _chain, load

NAME = "host-0.1.jsonl"
DETAIL = random_detail(KINDS["step"], Random(1))


def written(folder: Path, steps: int = 8, *, writer: str = "host-0", run_id: str = "run-1") -> list[bytes]:
    log = EventLog(run_id, folder / "events", writer, 1)
    for step in range(1, steps + 1):
        log.append("step", step=step, rank=0, detail=DETAIL)
    log.close()
    return log.path.read_bytes().splitlines(keepends=True)


@dataclass(frozen=True)
class Seen:
    """What everyone says of one file."""

    steps: list[int]
    damage: list[str]
    whole: bool
    """By a strict check of the chain that knows of no damage (``verify``)."""


def seen(folder: Path, data: bytes, name: str = NAME) -> Seen:
    """Readers and the audit must agree on it."""
    (folder / "events").mkdir(exist_ok=True)
    (folder / "resolved.json").write_text("{}")
    path = folder / "events" / name
    path.write_bytes(data)
    reader = EventReader(folder / "events")
    events = list(reader.read_file(path))
    damage = [str(each) for each in reader.damaged]
    finding = Finding()
    lines = load(folder, finding).files[name]
    assert [line["step"] for line in lines] == [event.step for event in events]
    assert [line["seq"] for line in lines] == [event.seq for event in events]
    verdict = check_directory(folder / "events", run_id="run-1")[name]
    said = [problem for problem in finding.problems if problem.startswith(name)]
    breaks_at = _chain(path)[2]
    if damage:
        assert said == damage
    else:  # the reader believes everything; the chain of what it believes must hold
        assert said == ([f"{name}:{breaks_at}: the chain breaks here"] if breaks_at else [])
    if verdict.problem is None:
        assert not breaks_at
    else:  # a last line that no other cites may be no event and yet break no chain
        assert breaks_at or damage
    return Seen([event.step or 0 for event in events], damage, not said)


def flipped(line: bytes, field: str) -> bytes:
    """One bit of the field's value is another."""
    at = line.index(b'"%s":' % field.encode()) + len(field) + 3
    at += line[at : at + 1] == b'"'
    return line[:at] + bytes([line[at] ^ 1]) + line[at + 1 :]


def edited(lines: list[bytes], at: int, line: bytes) -> bytes:
    return b"".join([*lines[:at], line, *lines[at + 1 :]])


def cases(lines: list[bytes], other: list[bytes], foreign: list[bytes]) -> dict[str, tuple[bytes, list[int], int]]:
    """What was done to 8 steps -> (the file then, the steps that are read, how many places are damaged)."""
    whole = b"".join(lines)
    fields = [*json.loads(lines[2]), "loss"]
    flips = {
        f"a bit of {name} in line 3": (edited(lines, 2, flipped(lines[2], name)), [1, 2, 4, 5, 6, 7, 8], 1)
        for name in fields
    }
    return {
        **flips,
        "whole": (whole, [1, 2, 3, 4, 5, 6, 7, 8], 0),
        "swapped neighbours": (b"".join([*lines[:2], lines[3], lines[2], *lines[4:]]), [1, 2, 4, 5, 6, 7, 8], 1),
        "swapped at the end": (b"".join([*lines[:6], lines[7], lines[6]]), [1, 2, 3, 4, 5, 6, 7], 1),
        "a doubled line": (b"".join([*lines[:3], *lines[2:]]), [1, 2, 3, 4, 5, 6, 7, 8], 1),
        "the last line doubled": (whole + lines[7], [1, 2, 3, 4, 5, 6, 7, 8], 1),
        "an earlier line at the end": (whole + lines[3], [1, 2, 3, 4, 5, 6, 7, 8], 1),
        "appended to itself": (whole + whole, [1, 2, 3, 4, 5, 6, 7, 8], 1),
        "a torn last line": (whole[:-5], [1, 2, 3, 4, 5, 6, 7], 0),
        "a line torn and gone on from": (edited(lines, 3, lines[3][:40]), [1, 2, 3, 6, 7, 8], 1),
        "a lost end of line": (edited(lines, 2, lines[2][:-1]), [1, 2, 5, 6, 7, 8], 1),
        "empty": (b"", [], 0),
        "a line of NULs": (edited(lines, 4, b"\0" * 4096 + b"\n"), [1, 2, 3, 4, 6, 7, 8], 1),
        "NULs at the end": (whole + b"\0" * 4096, [1, 2, 3, 4, 5, 6, 7, 8], 0),
        "NULs before a line": (edited(lines, 4, b"\0" * 512 + lines[4]), [1, 2, 3, 4, 6, 7, 8], 1),
        "a huge line": (edited(lines, 4, b"[" * (1 << 20) + b"\n"), [1, 2, 3, 4, 6, 7, 8], 1),
        "a dropped line": (edited(lines, 4, b""), [1, 2, 3, 4, 6, 7, 8], 1),
        "a dropped beginning": (b"".join(lines[3:]), [4, 5, 6, 7, 8], 1),
        "another writer's line in the middle": (edited(lines, 3, lines[3] + other[3]), [1, 2, 3, 4, 5, 6, 7, 8], 1),
        "another writer's line at the end": (whole + other[3], [1, 2, 3, 4, 5, 6, 7, 8], 1),
        "another run's line in the middle": (edited(lines, 3, lines[3] + foreign[4]), [1, 2, 3, 4, 5, 6, 7, 8], 1),
        "another run's next line": (whole + foreign[8], [1, 2, 3, 4, 5, 6, 7, 8], 1),
        "another writer's file": (b"".join(other), [1, 2, 3, 4, 5, 6, 7, 8, 9], 1),
    }


def _made() -> tuple[list[bytes], dict[str, tuple[bytes, list[int], int]]]:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        lines, other = written(folder / "mine"), written(folder / "other", 9, writer="host-1")
        return lines, cases(lines, other, written(folder / "foreign", 9, run_id="run-2"))


LINES, CASES = _made()
EVENTS = [{key: value for key, value in json.loads(line).items() if key != "prev"} for line in LINES]


@pytest.mark.parametrize("name", CASES)
def test_everyone_sees_the_same(tmp_path: Path, name: str):
    data, steps, places = CASES[name]
    found = seen(tmp_path, data)
    assert (found.steps, len(found.damage), found.whole) == (steps, places, not places), found


def test_a_file_that_its_writer_left_is_gone_on_with_in_the_next(tmp_path: Path):
    """What is damaged stays out, what is whole of both parts counts, and the audit knows that it was said."""
    path = tmp_path / "events" / NAME
    written(tmp_path)
    path.write_bytes(CASES["a bit of step in line 3"][0])
    log = EventLog("run-1", path.parent, "host-0", 1)
    log.append("step", step=9, rank=0, detail=DETAIL)
    log.close()
    assert log.path.name == "host-0.part2.1.jsonl"
    (tmp_path / "resolved.json").write_text("{}")
    finding, reader = Finding(), EventReader(path.parent)
    history = load(tmp_path, finding)
    assert finding.problems == [] and history.damaged == {NAME} and history.incomplete == {1}
    assert [event.step for _, event in reader.read() if event.kind == "step"] == [1, 2, 4, 5, 6, 7, 8, 9]
    assert [line["step"] for line in history.of("step")] == [1, 2, 4, 5, 6, 7, 8, 9]
    assert len(reader.damaged) == 1


CUTS = st.tuples(
    st.sampled_from(["flip", "drop", "double", "swap", "insert", "cut"]), st.integers(0, 10**6), st.binary()
)


@settings(max_examples=300, deadline=None)
@given(st.lists(CUTS, min_size=1, max_size=4))
@example([("flip", 367, b"")])  # the last line's `run_id` becomes `run_ie`
def test_any_damage_is_seen_alike_and_invents_nothing(damage: list[tuple[str, int, bytes]]):
    lines, uncited = list(LINES), False
    for how, number, noise in damage:
        at = number % len(lines) if lines else 0
        if how == "insert":
            lines.insert(at, noise + b"\n")
        elif not lines:
            continue
        elif how == "drop":
            lines.pop(at)
        elif how == "double":
            lines.insert(number // 7 % (len(lines) + 1), lines[at])
        elif how == "swap":
            lines[at - 1], lines[at] = lines[at], lines[at - 1]
        else:
            place = number % max(1, len(lines[at]))
            left = bytes(byte ^ 1 for byte in lines[at][place : place + 1]) if how == "flip" else b""
            lines[at], uncited = lines[at][:place] + left + lines[at][place + 1 :], True
    with tempfile.TemporaryDirectory() as folder:
        data = b"".join(lines)
        found = seen(Path(folder), data)
        events = [event for _, event in EventReader(Path(folder) / "events").read()]
    assert len({event.seq for event in events}) >= len(events) - len(damage)
    if not uncited:
        assert all(event.to_json() in EVENTS for event in events)
        assert found.damage or found.steps == list(range(1, len(found.steps) + 1))


def _bad(how: str, lines: list[bytes]) -> bytes:
    match how:
        case "no events":
            return b"".join([*lines[:3], *(b"%d\n" % n for n in range(8000)), *lines[3:]])
        case "backwards":
            return b"".join(reversed(lines))
        case "twice":
            return b"".join(line for line in lines for _ in (0, 1))
        case _:
            return b"".join(flipped(line, "prev") for line in lines)


@pytest.mark.parametrize("how", ["no events", "backwards", "twice", "changed citations"])
def test_time_grows_with_bad_lines_not_with_their_square(tmp_path: Path, how: str):
    data = _bad(how, written(tmp_path, 8000))
    begun_s = time.process_time()
    reader = EventReader(tmp_path / "events")
    (tmp_path / "events" / NAME).write_bytes(data)
    (tmp_path / "resolved.json").write_text("{}")
    finding = Finding()
    events = list(reader.read())
    read_s = time.process_time() - begun_s
    load(tmp_path, finding)
    audit_s = time.process_time() - begun_s - read_s
    assert read_s < 3 and audit_s < 3, f"{read_s:.2f} and {audit_s:.2f} s; 0.2 to 0.6 where this was written"
    assert len(events) >= 7998
    assert reader.damaged and finding.problems[: len(reader.damaged)] == [str(damage) for damage in reader.damaged]


def test_the_audit_verifies_the_run_file_itself(tmp_path: Path):
    written(tmp_path)
    resolved_file.write(tmp_path, '{\n "steps": 5\n}\n')
    whole, flipped = Finding(), Finding()
    assert load(tmp_path, whole).spec == {"steps": 5} and not whole.problems
    path = tmp_path / "resolved.json"
    path.write_bytes(path.read_bytes().replace(b"5\n}", b"7\n}"))
    assert load(tmp_path, flipped).spec == {}
    (problem,) = flipped.problems
    assert problem.startswith("resolved.json is damaged: its checksum is sha256:") and "\n" not in problem
