"""The chain: whatever happens to a file between two lines is found; a torn end is tolerated; one writer only."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import pytest
from fakes.chains import check_directory
from fakes.event_details import random_detail
from hypothesis import given, settings
from hypothesis import strategies as st

from muster.core import event_log
from muster.core.errors import ConflictError, MusterError
from muster.core.event_details.hosts import AgentEnded
from muster.core.event_details.kinds import KINDS, check
from muster.core.event_details.run import LogDamaged
from muster.core.event_details.training import Eval
from muster.core.event_log import EventLog, genesis, verify
from muster.core.events import PHASES, Event, encode

NAME = "agent.3.jsonl"


class Ticks:
    """A clock that counts."""

    def __init__(self) -> None:
        self.now = 0

    def monotonic_ns(self) -> int:
        self.now += 1
        return self.now

    def wall_ns(self) -> int:
        return 10**18 + self.now

    def sleep(self, seconds: float) -> None:
        raise AssertionError("nobody sleeps")


def written(folder: Path, count: int, text: str = "note") -> bytes:
    log = EventLog("run-1", folder, "agent", 3, clock=Ticks())
    for number in range(count):
        log.append("run.message", detail={"text": f"{text} {number}"}, rank=number % 3, step=number)
    log.close()
    return (folder / NAME).read_bytes()


@pytest.fixture
def lines(tmp_path: Path) -> list[bytes]:
    return written(tmp_path, 6).splitlines(keepends=True)


def broken(lines: list[bytes]) -> str | None:
    return verify(b"".join(lines), run_id="run-1", name=NAME).problem


def test_what_is_written_is_read_back(tmp_path: Path):
    written(tmp_path, 5, "grüße\n\u2028")
    found = [event for _, event in event_log.read(tmp_path)]
    assert [event.detail["text"] for event in found] == [f"grüße\n\u2028 {n}" for n in range(5)]
    assert [event.seq for event in found] == list(range(5))
    assert found[4].rank == 1 and found[4].step == 4 and found[4].attempt == 3
    assert check_directory(tmp_path, run_id="run-1")[NAME].problem is None


def test_a_reader_goes_on_where_it_was(tmp_path: Path):
    data = written(tmp_path, 5)
    reader = event_log.EventReader(tmp_path)
    found = []
    for cut in range(len(data)):
        (tmp_path / NAME).write_bytes(data[: cut + 1])
        found += [event.seq for _, event in reader.read()]
    assert found == [0, 1, 2, 3, 4] and not reader.damaged


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_any_edited_byte_is_found(data: st.DataObject):
    with tempfile.TemporaryDirectory() as folder:
        whole = bytearray(written(Path(folder), 4))
    last = bytes(whole).rfind(b"\n", 0, len(whole) - 1) + 1
    place = data.draw(st.integers(0, last - 2), label="byte of a line that another one cites")
    whole[place] ^= data.draw(st.integers(1, 255), label="flip")
    assert verify(bytes(whole), run_id="run-1", name=NAME).problem is not None


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_any_dropped_repeated_or_moved_line_is_found(data: st.DataObject):
    with tempfile.TemporaryDirectory() as folder:
        lines = written(Path(folder), 6).splitlines(keepends=True)
    kind = data.draw(st.sampled_from(["drop", "repeat", "move"]))
    at = data.draw(st.integers(0, 4))
    if kind == "drop":
        del lines[at]
    elif kind == "repeat":
        lines.insert(at, lines[at])
    else:
        other = data.draw(st.integers(0, 5).filter(lambda to: to != at))
        lines[at], lines[other] = lines[other], lines[at]
    assert broken(lines) is not None


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_a_torn_end_is_tolerated_and_the_writer_goes_on(data: st.DataObject):
    with tempfile.TemporaryDirectory() as folder:
        whole = written(Path(folder), 4)
        cut = data.draw(st.integers(0, len(whole)))
        path = Path(folder) / NAME
        path.write_bytes(whole[:cut])
        found = verify(whole[:cut], run_id="run-1", name=NAME)
        assert found.problem is None
        assert found.events == whole[:cut].count(b"\n")
        log = EventLog("run-1", Path(folder), "agent", 3, clock=Ticks())
        log.append("run.message", detail={"text": "back"})
        log.close()
        after = verify(path.read_bytes(), run_id="run-1", name=NAME)
        assert after.problem is None and after.torn_bytes == 0 and after.events == found.events + 1


def test_the_last_line_can_be_edited_unseen_until_its_head_is_cited(lines: list[bytes]):
    """What the chain alone cannot know: the supervisor's log.hash_heads does."""
    edited = [*lines[:-1], lines[-1].replace(b"note 5", b"note 6")]
    assert broken(edited) is None
    whole, other = (verify(b"".join(each), run_id="run-1", name=NAME).head for each in (lines, edited))
    assert whole != other


def test_files_cannot_change_places(lines: list[bytes]):
    data = b"".join(lines)
    assert verify(data, run_id="run-2", name=NAME).problem is not None
    assert verify(data, run_id="run-1", name="agent.4.jsonl").problem is not None
    assert genesis("run-1", "a") != genesis("run-1", "b")


def test_an_edited_file_is_not_written_to_and_its_writer_goes_on_in_another(tmp_path: Path, lines: list[bytes]):
    edited = b"".join([lines[0], *lines[2:]])
    (tmp_path / NAME).write_bytes(edited)
    for text in ("one", "two"):  # the second process goes on in the same part
        log = EventLog("run-1", tmp_path, "agent", 3)
        log.append("run.message", detail={"text": text})
        log.close()
    assert (tmp_path / NAME).read_bytes() == edited
    part = tmp_path / "agent.part2.3.jsonl"
    assert verify(part.read_bytes(), run_id="run-1", name=part.name).problem is None
    first, *rest = (Event.from_json(json.loads(line)) for line in part.read_bytes().splitlines())
    assert first.read(LogDamaged) == LogDamaged(
        file=NAME, line=2, reason="line 2 breaks the chain: edited, dropped or moved", continued_in=part.name
    )
    assert [event.detail["text"] for event in rest] == ["one", "two"]


def test_a_second_writer_of_a_second_part_is_refused(tmp_path: Path, lines: list[bytes]):
    (tmp_path / NAME).write_bytes(b"no event\n")
    log = EventLog("run-1", tmp_path, "agent", 3)
    with pytest.raises(ConflictError):
        EventLog("run-1", tmp_path, "agent", 3)
    log.close()
    (tmp_path / "agent.part2.3.jsonl").write_bytes(b"no event\n")
    EventLog("run-1", tmp_path, "agent", 3).close()
    assert (tmp_path / "agent.part3.3.jsonl").read_bytes().count(b"log.damaged") == 1


@pytest.mark.parametrize(
    ("harm", "reason"),
    [
        (lambda path: os.truncate(path, 40), "cut short while it was written"),
        (
            lambda path: path.write_bytes(path.read_bytes() + b"another line\n"),
            "added to while it was written",
        ),
        (lambda path: path.unlink(), "removed while it was written"),
    ],
)
def test_a_file_that_is_changed_under_its_writer(tmp_path: Path, harm: Callable[[Path], object], reason: str):
    log = EventLog("run-1", tmp_path, "agent", 3)
    log.append("run.message", detail={"text": "one"})
    harm(log.path)
    for text in ("two", "three"):
        log.append("run.message", detail={"text": text})
    log.close()
    part = tmp_path / "agent.part2.3.jsonl"
    assert verify(part.read_bytes(), run_id="run-1", name=part.name).problem is None
    first, *rest = (Event.from_json(json.loads(line)) for line in part.read_bytes().splitlines())
    assert first.read(LogDamaged).reason == reason
    assert [event.detail["text"] for event in rest] == ["two", "three"]


def test_a_log_opens_when_the_disk_lets_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Opening makes a file, which a full disk refuses: lines wait, and continue what is there."""
    written(tmp_path, 2)
    opened = os.open

    def full(path: object, flags: int, *rest: int) -> int:
        if flags & os.O_CREAT:
            raise OSError(errno.ENOSPC, "No space left on device")
        return opened(path, flags, *rest)  # type: ignore[call-overload, no-any-return]

    with monkeypatch.context() as patch:
        patch.setattr(os, "open", full)
        log = EventLog("run-1", tmp_path, "agent", 3, clock=Ticks())
        assert log.trouble == "No space left on device"
        log.append("run.message", detail={"text": "waits"})
        assert log.sync() and not log.tend()
        with pytest.raises(ValueError):
            log.append("run.message", detail={"colour": "red"})
    assert log.tend() and log.trouble is None
    log.append("run.message", detail={"text": "written"})
    log.close()
    assert verify(log.path.read_bytes(), run_id="run-1", name=NAME).problem is None
    texts = [event.detail["text"] for _, event in event_log.read(tmp_path)]
    assert texts == ["note 0", "note 1", "waits", "written"]


def test_a_link_is_not_followed(tmp_path: Path):
    (tmp_path / NAME).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(MusterError, match="cannot be written"):
        EventLog("run-1", tmp_path, "agent", 3)


def test_a_second_writer_is_refused(tmp_path: Path):
    log = EventLog("run-1", tmp_path, "agent", 3)
    with pytest.raises(ConflictError):
        EventLog("run-1", tmp_path, "agent", 3)
    log.close()
    EventLog("run-1", tmp_path, "agent", 3).close()


def test_the_lock_of_a_killed_writer_is_free(tmp_path: Path):
    program = (
        "import os, sys\n"
        "from pathlib import Path\n"
        "from muster.core.event_log import EventLog\n"
        "log = EventLog('run-1', Path(sys.argv[1]), 'agent', 3)\n"
        "log.append('run.message', detail={'text': 'x'})\n"
        "os.kill(os.getpid(), 9)\n"
    )
    assert subprocess.run([sys.executable, "-c", program, str(tmp_path)], check=False).returncode == -9
    log = EventLog("run-1", tmp_path, "agent", 3)
    assert log.seq == 1
    log.close()


@pytest.mark.parametrize("name", ["../evil", "a/b", "", ".hidden", "-x", "a b", "a.part2"])
def test_names_that_no_file_should_have(tmp_path: Path, name: str):
    with pytest.raises(MusterError):
        EventLog("run-1", tmp_path, name, 0)


def test_merging_puts_files_on_one_axis(tmp_path: Path):
    for writer, walls in (("a", (1, 5)), ("b", (2, 3))):
        log = EventLog("run-1", tmp_path, writer, 0)
        for wall in walls:
            log.append("run.message", detail={"text": "x"}, wall_ns=wall)
        log.close()
    assert [event.wall_ns for event in event_log.merged(tmp_path)] == [1, 2, 3, 5]


# ---------------------------------------------------------------- the schema


@pytest.mark.parametrize(
    ("kind", "detail", "phase"),
    [
        ("no.such.kind", {}, None),
        ("phase.changed", {}, "no-such-phase"),
        ("run.finished", {"outcome": "succeeded"}, None),
        ("rank.started", {"pid": 1, "colour": "red"}, None),
    ],
)
def test_events_that_do_not_fit_the_schema_are_our_own_bug(tmp_path: Path, kind: str, detail: dict, phase: str | None):
    log = EventLog("run-1", tmp_path, "agent", 0)
    with pytest.raises(ValueError):
        log.append(kind, detail=detail, phase=phase)
    log.close()
    assert (tmp_path / "agent.0.jsonl").read_bytes() == b""


def test_numbers_that_json_cannot_carry_are_refused():
    with pytest.raises(ValueError):
        encode({"loss": float("nan")})


@settings(max_examples=100, deadline=None)
@given(
    kind=st.sampled_from(sorted(KINDS)),
    phase=st.none() | st.sampled_from(PHASES),
    rank=st.none() | st.integers(0, 10**6),
    step=st.none() | st.integers(0, 10**9),
    wall=st.integers(0, 2**63),
    words=st.text(max_size=20),
    seed=st.integers(0, 10**6),
)
def test_every_kind_survives_the_line(
    kind: str, phase: str | None, rank: int | None, step: int | None, wall: int, words: str, seed: int
):
    event = Event(
        run_id="r",
        attempt=1,
        seq=0,
        mono_ns=1,
        wall_ns=wall,
        host=words,
        kind=kind,
        rank=rank,
        phase=phase,
        step=step,
        detail=random_detail(KINDS[kind], Random(seed)),
    )
    check(event)
    line = encode(event.to_json())
    assert line.count(b"\n") == 1
    again = Event.from_json(json.loads(line))
    assert again == event and again.read(KINDS[kind]) == event.read(KINDS[kind])


def test_every_field_is_checked_where_it_is_written():
    checked = 0
    for kind, cls in KINDS.items():
        detail = random_detail(cls, Random(1), optional=1.0)
        for name in detail:
            check_is_refused(kind, {**detail, name: [[{}]]}, name)
            checked += 1
        for name in cls.required():
            check_is_refused(kind, {key: value for key, value in detail.items() if key != name}, name)
        if not cls.open:
            check_is_refused(kind, {**detail, "surprise": 1}, "surprise")
    assert checked > 150


def check_is_refused(kind: str, detail: dict[str, Any], word: str) -> None:
    event = Event(run_id="r", attempt=1, seq=0, mono_ns=1, wall_ns=1, host="h", kind=kind, detail=detail)
    with pytest.raises(ValueError, match=word):
        check(event)


def test_a_reader_skips_fields_that_it_does_not_know_and_keeps_those_of_an_open_kind():
    event = Event(run_id="r", attempt=1, seq=0, mono_ns=1, wall_ns=1, host="h", kind="agent.ended")
    assert replace(event, detail={"reason": "why", "later": 1}).read(AgentEnded) == AgentEnded(reason="why")
    opened = replace(event, kind="eval", detail={"loss": 1, "bleu": 0.5}).read(Eval)
    assert opened.loss == 1.0 and opened.more == {"bleu": 0.5}
    with pytest.raises(MusterError, match=r"agent\.ended: reason: Field required"):
        event.read(AgentEnded)


def test_every_kind_says_what_it_means():
    for name, kind in KINDS.items():
        assert kind.doc.endswith("."), name
        assert all({**kind.required(), **kind.optional()}.values()), name


class Carrier:
    """A sealer that answers as told."""

    def __init__(self, answers: list[str | None]) -> None:
        self.answers, self.notes = answers, 0

    def note(self) -> None:
        self.notes += 1

    def seal(self, timeout_s: float) -> str | None:
        return self.answers.pop(0)


def test_what_is_synced_is_sealed_or_the_caller_is_told(tmp_path: Path) -> None:
    carrier = Carrier(["the bucket is busy", None])
    log = EventLog("run-1", tmp_path, "agent", 3, clock=Ticks(), sealer=carrier)
    log.append("run.message", detail={"text": "x"})
    assert (carrier.notes, log.sync(), log.unsealed) == (1, False, "the bucket is busy")
    assert (log.sync(), log.unsealed) == (True, None)


def test_a_line_that_the_disk_has_not_taken_is_not_sealed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is carried from the disk; without a home, a full disk stops no run."""
    for sealer, durable in ((None, True), (Carrier([None, None]), False)):
        log = EventLog("run-1", tmp_path / str(durable), "agent", 3, clock=Ticks(), sealer=sealer)
        with open("/dev/full", "ab", buffering=0) as full, monkeypatch.context() as patch:
            patch.setattr(log, "_file", full)
            log.append("run.message", detail={"text": "x"})
            assert log.sync() is durable
            assert log.trouble == "No space left on device"
        assert log.sync() is True
        assert verify(log.path.read_bytes(), run_id="run-1", name=NAME).events == 1
