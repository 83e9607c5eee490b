"""The writing end of one stream: files of this machine that grow become segments in the home.

The files are the truth and the buffer: nothing waits in memory, a program that was killed loses nothing that it wrote,
and whoever comes after it in the same folder goes on at the byte. What the home holds must be a beginning of them; if
it is not, or if the stream was ended, somebody else writes in our place, and that is the end of this writer. (Not so
where the file's own chain is broken: it was damaged here. What was shipped of it stays, what follows is shipped. Nor
where the chain of what the home holds is broken, or its object cannot be read: it was damaged there.)

One process at a time ships a stream from a folder (an advisory lock, held from the first segment on): one that knows
less than the home holds could take a number again whose segment was merged away.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import re
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

from muster.core.errors import BusyError, ConflictError, MusterError
from muster.core.event_log import genesis, verify
from muster.core.protocols import Store
from muster.storage import uris
from muster.storage.home.segments import (
    OBJECT_BYTES,
    Damaged,
    Header,
    Part,
    Segment,
    Span,
    cover,
    is_whole,
    superfluous,
)
from muster.storage.store.patient import in_time

#: Times that one call finds out what the home holds: more often, somebody changes it all the time.
ADOPTIONS = 5


@dataclass
class Shipped:
    """How much of one file the home holds."""

    size: int = 0
    lines: int = 0
    head: str = ""
    seen: int = 0
    """Its size when it was last read: what is beyond ``size`` is no whole line."""


@dataclass
class Stream:
    """Ships the files of ``directory`` that ``names`` matches into segments below ``uri``. Thread-safe.

    ``chained``: they are event files, which are cut at lines only.
    """

    store: Store
    uri: str
    run_id: str
    directory: Path
    names: re.Pattern[str]
    chained: bool = True
    now_s: Callable[[], float] = time.monotonic
    sealed: list[Header] = field(default_factory=list)
    """What the home holds of it, in order; changed under ``lock``."""
    lock: threading.RLock = field(default_factory=threading.RLock)
    deposed: str | None = None
    """Why this writer has no say any more."""
    trouble: str | None = None
    """Why the last try to ship did not succeed."""
    waiting_since_s: float | None = None
    """Since when the oldest byte waits that is known to wait."""
    _files: dict[str, Shipped] = field(default_factory=dict)
    _mine: BinaryIO | None = None
    """Locked while this process is the one that ships."""
    _lost: int = -1
    """The last number whose object was damaged."""
    _known: bool = False
    """Whether ``sealed`` and ``_files`` say what the home holds."""

    def note(self) -> None:
        """Something was written. Never blocks."""
        if self.waiting_since_s is None:
            self.waiting_since_s = self.now_s()

    def look(self) -> None:
        """Note what was written by others than those who say so."""
        if self.waiting_since_s is None and any(self._grew(name, size) for name, size in self._sizes()):
            self.note()

    def _grew(self, name: str, size: int) -> bool:
        known = self._of(name)
        return size > known.size and size != known.seen

    def ship(self, *, wait_s: float = -1) -> None:
        """Bring everything that waits to the home.

        Raises:
            ConflictError: somebody else writes this stream, or has ended it.
            BusyError: another thread has been shipping for ``wait_s`` (-1: wait for it), or another process ships.
            MusterError, OSError: not now; all of it waits for the next call.
        """
        if not self.lock.acquire(timeout=wait_s):
            raise BusyError(f"{self.uri}: no answer yet")
        try:
            if self.deposed:
                raise ConflictError(self.deposed)
            since_s, self.waiting_since_s = self.waiting_since_s, None  # what is written from here on waits anew
            try:
                self._ship()
            except BaseException as error:
                self.waiting_since_s = self.now_s() if since_s is None else since_s
                self.trouble = str(error)
                if isinstance(error, ConflictError):
                    self.deposed = str(error)
                raise
            self.trouble = None
        finally:
            self.lock.release()

    def _ship(self) -> None:
        self._claim()
        adopted = 0
        while True:
            if not self._known:
                if adopted == ADOPTIONS:
                    raise BusyError(f"{self.uri} changes while it is read")
                self._adopt()
                adopted += 1
            segment = self._next_segment()
            if segment is None:
                return
            self._put(segment)

    def _claim(self) -> None:
        if self._mine is not None:
            return
        self.directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        file = open(self.directory / f".shipping-{uris.name(self.uri)}", "ab")  # noqa: SIM115 (held while we ship)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            file.close()
            raise BusyError(f"another process of this host ships {self.uri}") from error
        self._mine, self._known = file, False

    def release(self) -> None:
        """Let another process of this folder ship it; while a request of ours hangs, it must not."""
        if self.lock.acquire(timeout=0.1):
            try:
                if self._mine is not None:
                    self._mine.close()
                    self._mine = None
            finally:
                self.lock.release()

    def seal(self, timeout_s: float) -> str | None:
        """See ``Sealer``. Raises ConflictError where this writer was replaced."""
        try:
            in_time(lambda: self.ship(wait_s=timeout_s), timeout_s, self.uri)
        except ConflictError:
            raise
        except (MusterError, OSError) as error:
            return str(error)
        return None

    def read(self, parts: Sequence[Part]) -> bytes:
        """Bytes of its files. Raises OSError where they are not there any more."""
        pieces = []
        for part in parts:
            with open(self.directory / part.name, "rb") as file:
                file.seek(part.start)
                pieces.append(file.read(part.size))
            if len(pieces[-1]) != part.size:
                raise OSError(f"{self.directory / part.name} has become shorter")
        return b"".join(pieces)

    def next_number(self) -> int:
        return max(self.sealed[-1].last if self.sealed else -1, self._lost) + 1

    # ------------------------------------------------------------ what is sealed next

    def _next_segment(self) -> Segment | None:
        parts: list[Part] = []
        pieces: list[bytes] = []
        left = OBJECT_BYTES
        for name, size in self._sizes():
            done = self._of(name)
            done.seen = size
            # One that was cut short here is left by its writer (``EventLog``), and keeps no other from being shipped.
            if size > done.size and left > 0 and (data := self._bytes(name, done.size, min(size - done.size, left))):
                parts.append(self._part(name, done, data))
                pieces.append(data)
                left -= len(data)
        if not parts:
            return None
        number = self.next_number()
        header = Header(run_id=self.run_id, level=0, first=number, last=number, parts=tuple(parts))
        return Segment(header, b"".join(pieces))

    def _bytes(self, name: str, start: int, size: int) -> bytes:
        """Whole lines of an event file from ``start`` on: the torn end of a killed writer is dropped by the next."""
        with open(self.directory / name, "rb") as file:
            file.seek(start)
            data = file.read(size)
            if not self.chained:
                return data
            end = data.rfind(b"\n") + 1
            if end == 0 and size == OBJECT_BYTES:
                rest = file.readline()
                return data + rest if rest.endswith(b"\n") else b""
            return data[:end]

    def _part(self, name: str, done: Shipped, data: bytes) -> Part:
        if not self.chained:
            return Part(name=name, start=done.size, size=len(data))
        last = data[data.rfind(b"\n", 0, len(data) - 1) + 1 :]
        return Part(
            name=name,
            start=done.size,
            size=len(data),
            seq=done.lines,
            lines=data.count(b"\n"),
            prev=done.head,
            head=hashlib.sha256(last).hexdigest(),
        )

    def _sizes(self) -> list[tuple[str, int]]:
        """Its files and their sizes now; those of older attempts first."""
        with contextlib.suppress(FileNotFoundError), os.scandir(self.directory) as entries:
            found = [(entry.name, entry.stat().st_size) for entry in entries if self.names.match(entry.name)]
            return sorted(found, key=lambda pair: (len(pair[0]), pair[0]))
        return []

    def _of(self, name: str) -> Shipped:
        if name not in self._files:
            self._files[name] = Shipped(head=genesis(self.run_id, name) if self.chained else "")
        return self._files[name]

    # ------------------------------------------------------------ with the home

    def _put(self, segment: Segment) -> None:
        uri = uris.join(self.uri, segment.header.span.name)
        try:
            self.store.put_if_absent(uri, segment.encode())
        except ConflictError:
            # Ours, whose answer was lost? Ours, of a process before us in this folder? Or somebody else's?
            try:
                stored = self.store.get(uri).data
            except FileNotFoundError:  # it was merged meanwhile
                self._known = False
                return
            segment = Segment.decode(stored, uri, run_id=self.run_id)
        self._take(segment, uri)

    def _take(self, segment: Segment, uri: str) -> None:
        """Count as shipped what the home holds. Raises ConflictError where our files hold something else."""
        if segment.header.ended is not None:
            raise ConflictError(f"{uri}: this stream was ended by {segment.header.ended}")
        for part, data in segment.stretches():
            done = self._of(part.name)
            skip = max(0, done.size - part.start)
            if (part.start > done.size and self._lost < 0) or (
                self.names.match(part.name)
                and data[skip:] != self._held(part.name, part.start + skip, part.size - skip)
                and not self._is_damaged(part.name)
                and (not self.chained or is_whole(part, data))
            ):
                raise ConflictError(f"{uri} holds what this process did not write: another one writes {self.uri}")
            if part.end > done.size:
                self._files[part.name] = Shipped(part.end, part.seq + part.lines, part.head)
        self.sealed.append(segment.header)

    def _held(self, name: str, start: int, size: int) -> bytes:
        try:
            with open(self.directory / name, "rb") as file:
                file.seek(start)
                return file.read(max(0, size))
        except FileNotFoundError:
            return b""

    def _is_damaged(self, name: str) -> bool:
        """Whether the file here has no chain: then it is no other writer's, and what the home holds of it is whole."""
        with contextlib.suppress(OSError):
            data = (self.directory / name).read_bytes() if self.chained else b""
            return verify(data, run_id=self.run_id, name=name).problem is not None
        return False

    def _adopt(self) -> None:
        """Find out what the home holds of it, from a process before us."""
        self.sealed, self._files, self._lost = [], {}, -1
        spans = spans_of(self.store.list(self.uri))
        for span in cover(spans):
            uri = uris.join(self.uri, span.name)
            try:
                data = self.store.get(uri).data
            except FileNotFoundError as error:
                raise BusyError(f"{uri} was merged while it was read") from error
            try:
                segment = Segment.decode(data, uri, run_id=self.run_id)
            except Damaged as error:  # what follows says how much it held; if nothing does, it is shipped again
                if error.may_end:
                    raise
                self._lost = span.last
                continue
            self._take(segment, uri)
        for span in superfluous(spans):
            self.store.delete(uris.join(self.uri, span.name))
        self._known = True


@dataclass(frozen=True)
class StreamSealer:
    """``Sealer`` of a log whose file a stream ships; lines that wait for a full disk cannot be sealed."""

    stream: Stream

    def note(self) -> None:
        self.stream.note()

    def seal(self, timeout_s: float) -> str | None:
        return self.stream.seal(timeout_s)


def spans_of(found: Iterable[str]) -> list[Span]:
    """The segments among the URIs of a listing."""
    spans = [Span.of(uris.name(uri)) for uri in found]
    return [span for span in spans if span is not None]
