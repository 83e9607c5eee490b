"""Append-only, hash-chained event files: one writer, one chain.

A line is the event's JSON plus ``prev``, the SHA-256 of the line before it (the first one cites the run
id and the file's name, so that files cannot change places). An edited, dropped or reordered line breaks
the chain; a torn last line (a writer killed in mid-write) is dropped when the writer comes back.

A disk that takes nothing (full, an I/O error) stops no writer: its lines wait in memory, in their order, and go to the
disk as soon as it takes them. What is on it is a beginning of the chain at every moment, at worst with a torn end.
"""

from __future__ import annotations

import fcntl
import hashlib
import io
import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Protocol

from muster.core.clock import SystemClock
from muster.core.errors import ConflictError, MusterError
from muster.core.event_details.kinds import check
from muster.core.event_log.order import merge_by_monotonic_clock
from muster.core.events import Event, encode
from muster.core.protocols import Clock
from muster.core.typed_json import JsonObject

#: How long ``sync`` waits for the home's answer before the caller is told that it has to try again.
SEAL_TIMEOUT_S = 2.0
_NAME = re.compile(r"^(?P<writer>[A-Za-z0-9][A-Za-z0-9_.-]*)\.(?P<attempt>\d+)\.jsonl$")


def genesis(run_id: str, name: str) -> str:
    """What the first line of the file ``name`` cites."""
    return hashlib.sha256(f"muster:{run_id}:{name}".encode()).hexdigest()


class Sealer(Protocol):
    """Carries the lines of one log from this machine to where they survive it (a run's home in a bucket)."""

    def note(self) -> None:
        """A line was written: it may wait for the next seal, for some seconds. Never blocks."""
        ...

    def seal(self, timeout_s: float) -> str | None:
        """Make every line that was written survive this machine; None once it does, else why it does not yet.

        Raises:
            ConflictError: another process has taken this writer's place; what was not sealed is not part of the run.
        """
        ...


@dataclass
class EventLog:
    """The writing end of one file.

    Not thread-safe. ``append`` and ``sync`` never raise for disk errors: ``trouble`` says what is wrong, and ``tend``
    tries again (call it periodically while ``trouble`` is set). A second writer on the same file is refused (advisory
    lock, held while open). Opening an existing file checks its chain and continues after its last complete line.

    Raises:
        ConflictError: another process writes this file.
        MusterError: the existing file's chain is broken.
    """

    run_id: str
    directory: Path
    writer: str
    attempt: int
    clock: Clock = field(default_factory=SystemClock)
    sealer: Sealer | None = None
    """None: the file itself is where the log lives."""

    def __post_init__(self) -> None:
        self.directory = Path(self.directory)
        self.directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        self.name = f"{self.writer}.{self.attempt}.jsonl"
        if not _NAME.match(self.name):
            raise MusterError(f"event writer name {self.writer!r} has characters a file name cannot carry")
        self.path = self.directory / self.name
        # Made for this user alone, and never a link.
        fd = os.open(self.path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        self._file: io.FileIO = open(fd, "a+b", buffering=0)  # noqa: SIM115 (held for the log's life)
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            self._file.close()
            raise ConflictError(f"{self.path} is being written by another process") from error
        self._file.seek(0)
        existing = self._file.read()
        whole = existing[: existing.rfind(b"\n") + 1]
        if len(whole) != len(existing):
            self._file.truncate(len(whole))
        result = verify(whole, run_id=self.run_id, name=self.name)
        if result.problem:
            raise MusterError(f"{self.path}: {result.problem}", hint="the file was edited; move it aside")
        self.head = result.head
        self.seq = result.events
        self.trouble: str | None = None
        """Why lines wait in memory; None: the disk has all of them."""
        self.unsealed: str | None = None
        """Why the last ``sync`` did not reach the home; None: it did, or there is none."""
        self._waiting = bytearray()

    def append(
        self,
        kind: str,
        *,
        host: str | None = None,
        rank: int | None = None,
        phase: str | None = None,
        step: int | None = None,
        attempt: int | None = None,
        mono_ns: int | None = None,
        wall_ns: int | None = None,
        detail: JsonObject | None = None,
    ) -> Event:
        """Write one event and return it. A kill leaves a whole line or a torn last one."""
        event = Event(
            run_id=self.run_id,
            attempt=self.attempt if attempt is None else attempt,
            seq=self.seq,
            mono_ns=self.clock.monotonic_ns() if mono_ns is None else mono_ns,
            wall_ns=self.clock.wall_ns() if wall_ns is None else wall_ns,
            host=host or self.writer,
            kind=kind,
            rank=rank,
            phase=phase,
            step=step,
            detail=detail or {},
        )
        check(event)
        line = encode({**event.to_json(), "prev": self.head})
        self._waiting += line
        self.head = hashlib.sha256(line).hexdigest()
        self.seq += 1
        self.tend()
        if self.sealer is not None:
            self.sealer.note()
        return event

    def tend(self) -> bool:
        """Write what waits; whether the disk has taken everything."""
        try:
            while self._waiting:
                count = self._file.write(self._waiting)  # a disk that is nearly full takes a part
                if not count:
                    raise OSError("nothing was written")
                del self._waiting[:count]
        except OSError as error:
            self.trouble = error.strerror or str(error)
            return False
        self.trouble = None
        return True

    def sync(self, timeout_s: float = SEAL_TIMEOUT_S) -> bool:
        """Make what was written survive this machine (decisions, commits); whether it does, after ``timeout_s``.

        A disk that takes nothing does not stop a run: True there, with ``trouble`` set. A home that takes nothing is
        False, with ``unsealed`` saying why: do not act on what was decided, and try again. The disk counts there too:
        what it has not taken cannot be carried on.

        Raises:
            ConflictError: another process has taken this writer's place in the run's home.
        """
        if self.tend():
            try:
                os.fsync(self._file.fileno())
            except OSError as error:
                self.trouble = error.strerror or str(error)
        if self.sealer is not None:
            self.unsealed = self.sealer.seal(timeout_s)
            if self._waiting and self.unsealed is None:
                self.unsealed = f"{self.path}: {self.trouble}"
        return self.unsealed is None

    def close(self) -> None:
        """Try once more to write what waits, then let go of the file."""
        self.tend()
        self._file.close()


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """What a check of one file's bytes found."""

    events: int
    head: str
    problem: str | None = None
    torn_bytes: int = 0


def verify(data: bytes, *, run_id: str, name: str) -> Verdict:
    """Follow the chain through ``data``; a torn last line is counted, not a problem."""
    head = genesis(run_id, name)
    count = 0
    end = data.rfind(b"\n") + 1
    for line in data[:end].splitlines(keepends=True):
        try:
            result = json.loads(line)
            prev, seq = result["prev"], result["seq"]
        except (ValueError, KeyError, TypeError):
            return Verdict(events=count, head=head, problem=f"line {count + 1} is not an event")
        if prev != head or seq != count:
            return Verdict(
                events=count, head=head, problem=f"line {count + 1} breaks the chain: edited, dropped or moved"
            )
        head = hashlib.sha256(line).hexdigest()
        count += 1
    return Verdict(events=count, head=head, torn_bytes=len(data) - end)


def read(directory: str | Path, *, after: Mapping[str, int] | None = None) -> Iterator[tuple[str, Event]]:
    """``(file name, event)`` of every file, in each file's order, beyond the counts in ``after``.

    A torn last line is left out. Raises MusterError naming the file and line of anything else unreadable.
    """
    for path in _files(directory):
        first = (after or {}).get(path.name, 0)
        with open(path, "rb") as file:  # of weeks: never all of it in memory
            for number, line in enumerate(file):
                if not line.endswith(b"\n"):
                    break  # torn, or being written
                if number < first:
                    continue
                try:
                    event = Event.from_json(json.loads(line))
                except (ValueError, AttributeError) as error:  # AttributeError: JSON, and no object
                    reason = error if isinstance(error, ValueError) else "not an event"
                    raise MusterError(
                        f"{path}:{number + 1}: {reason}", hint="the file was edited: move it aside"
                    ) from error
                yield path.name, event


def merged(directory: str | Path) -> list[Event]:
    """All events of a run in the order in which they happened (see ``core.event_log.order``), each as it was written.

    Good enough for showing; the ledger uses the logged clock offsets instead.
    """
    files: dict[str, list[Event]] = {}
    for name, event in read(directory):
        files.setdefault(name, []).append(event)
    return [event for _, _, event in merge_by_monotonic_clock(files)]


def on_one_clock(files: Mapping[str, Sequence[Event]]) -> list[Event]:
    """The events of several files in the order in which they happened, with wall times by a clock that is never
    stepped: for durations between events."""
    merged = merge_by_monotonic_clock(files)
    return [event if event.wall_ns == at_ns else replace(event, wall_ns=at_ns) for at_ns, _, event in merged]


def heads(directory: str | Path, *, run_id: str) -> dict[str, str]:
    """What the next line of every file would cite: file name -> SHA-256 of its last whole line. Reads no other."""
    return {path.name: head(path, run_id=run_id) for path in _files(directory)}


def head(path: Path, *, run_id: str) -> str:
    """What the next line of one file would cite. What follows its last whole line was torn."""
    last = _last_line(path)
    return hashlib.sha256(last).hexdigest() if last else genesis(run_id, path.name)


def _last_line(path: Path, *, block: int = 1 << 16) -> bytes:
    """With its end; empty where there is none. What follows it was torn."""
    with open(path, "rb") as file:
        at, tail = file.seek(0, os.SEEK_END), b""
        while at > 0:
            step = min(block, at)
            at -= step
            file.seek(at)
            tail = file.read(step) + tail
            end = tail.rfind(b"\n")
            start = tail.rfind(b"\n", 0, max(end, 0))
            if start >= 0:
                return tail[start + 1 : end + 1]
    return tail[: tail.rfind(b"\n") + 1]


def check_directory(directory: str | Path, *, run_id: str) -> dict[str, Verdict]:
    """Verify every file's chain: file name -> verdict."""
    return {path.name: verify(path.read_bytes(), run_id=run_id, name=path.name) for path in _files(directory)}


def _files(directory: str | Path) -> list[Path]:
    """The event files of a folder, which need not exist."""
    return sorted(path for path in Path(directory).glob("*.jsonl") if _NAME.match(path.name))
