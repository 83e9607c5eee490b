"""The writing end of an event file."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import io
import os
import time
from collections import deque
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Protocol

from muster.core.clock import SystemClock
from muster.core.errors import ConflictError, MusterError
from muster.core.event_details.kinds import check
from muster.core.event_details.run import LogDamaged
from muster.core.event_log.chain import genesis, verify
from muster.core.event_log.names import LogName
from muster.core.events import Event, encode
from muster.core.protocols import Clock
from muster.core.typed_json import JsonObject, parse_object

#: How long ``sync`` waits for the home's answer before the caller has to retry.
SEAL_TIMEOUT_S = 2.0
#: For ``close`` at the end of a run: a full disk has room again one day, and nothing else holds what waits.
CLOSE_PATIENCE_S = 30.0
_AGAIN_S = 0.1
#: Errors at opening that no waiting heals: a link, another user's file or folder.
_NOT_OURS = frozenset({errno.ELOOP, errno.EACCES, errno.EPERM, errno.ENOTDIR, errno.EISDIR, errno.ENAMETOOLONG})


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

    Not thread-safe. Nothing here raises for disk errors, opening included: lines wait in memory, ``trouble`` says what
    is wrong, and ``tend`` tries again (call it periodically while ``trouble`` is set). A second writer on the same file
    is refused (advisory lock, held while open). Opening an existing file checks its chain and continues after its last
    complete line. One that is damaged is left as it is: its writer goes on in ``WRITER.part2.ATTEMPT.jsonl`` (then
    ``part3``, ...), which begins with the event ``log.damaged``; so too where a file was cut short, added to or removed
    while it was written.

    Raises:
        ConflictError: another process writes this file.
        MusterError: the writer's name cannot be a file's, or the file is none that we may write.
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
        self._part = LogName(writer=self.writer, attempt=self.attempt)
        if LogName.of(self.name) != self._part:
            raise MusterError(f"event writer name {self.writer!r} has characters a file name cannot carry")
        self.head = genesis(self.run_id, self.name)
        """What the next line that the disk takes will cite."""
        self.seq = 0
        """How many lines the disk has of this part."""
        self.trouble: str | None = None
        """Why lines wait in memory; None: the disk has all of them."""
        self.unsealed: str | None = None
        """Why the last ``sync`` did not reach the home; None: it did, or there is none."""
        self._queue: deque[Event] = deque()
        """Events that the disk has not taken, or not wholly."""
        self._line = b""
        """Of the first of them: what the disk has not taken of its line, once that is made."""
        self._file: io.FileIO | None = None
        self._size = 0
        try:
            self._open()
        except OSError as error:
            if error.errno in _NOT_OURS:
                raise MusterError(f"{self.path} cannot be written: {error.strerror}") from error
            self.trouble = error.strerror or str(error)
        else:
            self.tend()

    @property
    def name(self) -> str:
        """Of the file that is written now."""
        return str(self._part)

    @property
    def path(self) -> Path:
        return self.directory / self.name

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
            seq=self.seq + len(self._queue),
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
        line = encode({**event.to_json(), "prev": self.head})  # what JSON has no word for is refused here
        if self._file is not None and not self._queue:
            self._line, self._next_head = line, hashlib.sha256(line).hexdigest()
        self._queue.append(event)
        self.tend()
        if self.sealer is not None:
            self.sealer.note()
        return event

    def tend(self) -> bool:
        """Write what waits; whether the disk has taken everything."""
        try:
            self._write()
        except (OSError, ConflictError) as error:
            self.trouble = str(error.strerror or error) if isinstance(error, OSError) else str(error)
            return False
        self.trouble = None
        return True

    def _write(self) -> None:
        if self._file is not None and self._queue:
            self._leave_a_changed_file(self._file)
        if self._file is None:
            self._open()
        assert self._file is not None
        while self._queue:
            if not self._line:
                event = replace(self._queue[0], seq=self.seq)
                self._line = encode({**event.to_json(), "prev": self.head})
                self._next_head = hashlib.sha256(self._line).hexdigest()
            count = self._file.write(self._line)  # a disk that is nearly full takes a part
            if not count:
                raise OSError("nothing was written")
            self._size += count
            self._line = self._line[count:]
            if not self._line:
                self._queue.popleft()
                self.head, self.seq = self._next_head, self.seq + 1

    # ------------------------------------------------------------ the file

    def _open(self) -> None:
        """The newest part that is there, or the next one where that is damaged. Raises OSError, ConflictError."""
        self.directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        while os.path.lexists(self.directory / str(following := replace(self._part, part=self._part.part + 1))):
            self._part = following
        while (problem := self._open_part()) is not None:
            self._go_on_in_next_part(*problem)

    def _open_part(self) -> tuple[int, str, str] | None:
        """Continue this one; or where it is damaged: the line, how, and the host that its last event is of."""
        # Made for this user alone, and never a link.
        fd = os.open(self.path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        with contextlib.ExitStack() as opened:
            file: io.FileIO = opened.enter_context(open(fd, "a+b", buffering=0))
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                raise ConflictError(f"{self.path} is being written by another process") from error
            file.seek(0)
            existing = file.readall()
            whole = existing[: existing.rfind(b"\n") + 1]
            result = verify(whole, run_id=self.run_id, name=self.name)
            if result.problem:
                return result.events + 1, result.problem, _host_of(whole) or self.writer
            if len(whole) != len(existing):
                file.truncate(len(whole))
            self.head, self.seq, self._size = result.head, result.events, len(whole)
            self._file = file
            opened.pop_all()
        return None

    def _go_on_in_next_part(self, line: int, reason: str, host: str) -> None:
        """The event that says so comes before all that waits."""
        broken, self._part = self.name, replace(self._part, part=self._part.part + 1)
        self.head, self.seq, self._line = genesis(self.run_id, self.name), 0, b""
        event = Event(
            run_id=self.run_id,
            attempt=self.attempt,
            seq=0,
            mono_ns=self.clock.monotonic_ns(),
            wall_ns=self.clock.wall_ns(),
            host=host,
            kind=LogDamaged.kind,
            detail={"file": broken, "line": line, "reason": reason, "continued_in": self.name},
        )
        check(event)
        self._queue.appendleft(event)

    def _leave_a_changed_file(self, file: io.FileIO) -> None:
        """Leave a file that another program changed: a line added now would belong to no chain, or to no file."""
        found = os.fstat(file.fileno())
        if found.st_nlink and found.st_size == self._size:
            return
        how = "cut short" if found.st_size < self._size else "added to"
        host = self._queue[-1].host
        file.close()
        self._file = None
        reason = f"{how if found.st_nlink else 'removed'} while it was written"
        self._go_on_in_next_part(self.seq + 1, reason, host)

    def sync(self, timeout_s: float = SEAL_TIMEOUT_S) -> bool:
        """Make what was written survive this machine (decisions, commits); whether it does, after ``timeout_s``.

        A disk that takes nothing does not stop a run: True there, with ``trouble`` set. A home that takes nothing is
        False, with ``unsealed`` saying why: do not act on what was decided, and try again. The disk counts there too:
        what it has not taken cannot be carried on.

        Raises:
            ConflictError: another process has taken this writer's place in the run's home.
        """
        if self.tend() and self._file is not None:
            try:
                os.fsync(self._file.fileno())
            except OSError as error:
                self.trouble = error.strerror or str(error)
        if self.sealer is not None:
            self.unsealed = self.sealer.seal(timeout_s)
            if self._queue and self.unsealed is None:
                self.unsealed = f"{self.path}: {self.trouble}"
        return self.unsealed is None

    def close(self, *, patience_s: float = 0.0) -> None:
        """Try for so long to write what waits, and at least once, then let go of the file."""
        until = time.monotonic() + patience_s
        while self._queue and not self.tend() and time.monotonic() < until:
            time.sleep(_AGAIN_S)
        if self._file is not None:
            self._file.close()
            self._file = None


def _host_of(lines: bytes) -> str | None:
    """The host of the last event among them."""
    for line in reversed(lines[-(1 << 16) :].split(b"\n")):
        with contextlib.suppress(ValueError):
            return Event.from_json(parse_object(line)).host
    return None
