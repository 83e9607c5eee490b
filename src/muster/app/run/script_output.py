"""What ranks write, as it comes: for a terminal that shows a run of ``command:``."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from muster.core.processes import open_plain
from muster.core.redact import OBEYED

#: Read of one rank's output at one look. Of more, the newest part: a person reads less, a pipe has its own pace.
MOST_BYTES = 64 << 10
#: Shown of one line, in bytes.
LONGEST = 4 << 10
#: What a terminal obeys, other than colours: it would tear the lines that are drawn below.
_CONTROL = re.compile(
    r"\x1b\[[0-9;:]*m"
    r"|(\x1b\][^\x07\x1b]*(?:\x07|\x1b\\)?|\x1b\[[0-?]*[ -/]*[@-~]|\x1b[^\[\]]?|" + OBEYED + ")"
)
_NAME = re.compile(r"rank-(\d+)\.a(\d+)\.log")


class ScriptOutput:
    """Lines of ranks' logs in ``logs``, each at most once, and none that was there at the beginning.

    ``ranks``: whose; None: all. A line says whose it is unless one rank was asked for. Bounded in time and memory
    for any output.
    """

    def __init__(self, logs: Path, ranks: frozenset[int] | None) -> None:
        self._logs, self._ranks = logs, ranks
        self._tails: dict[str, _Tail] = {name: _Tail(position=size) for name, size, _ in self._files()}

    def look(self, *, last: bool = False) -> list[str]:
        """The lines that have come. ``last``: with the unfinished last line."""
        found: list[str] = []
        for name, size, rank in self._files():
            tail = self._tails.setdefault(name, _Tail())
            lines = list(tail.look(self._logs / name, size))
            if last:
                lines += tail.rest()
            prefix = "" if self._ranks is not None and len(self._ranks) == 1 else f"[rank {rank}] "
            found += [prefix + line for line in lines]
        return found

    @property
    def unended(self) -> str:
        """The line that is being written, in the newest log: a bar of the script's own, for instance."""
        for name, _, _ in reversed(self._files()):
            if name in self._tails:
                return _shown(self._tails[name].partial)
        return ""

    def _files(self) -> list[tuple[str, int, int]]:
        """Name, bytes and rank of each log that is shown, older attempts first."""
        found = []
        try:
            with os.scandir(self._logs) as entries:
                for entry in entries:
                    named = _NAME.fullmatch(entry.name)
                    if named and (self._ranks is None or int(named[1]) in self._ranks):
                        found.append((int(named[2]), int(named[1]), entry.name, entry.stat().st_size))
        except OSError:
            pass  # not made yet, or a disk that fails: the run says so itself
        return [(name, size, rank) for _, rank, name, size in sorted(found)]


@dataclass
class _Tail:
    """One log, as far as it was read."""

    position: int = 0
    partial: bytes = b""
    """Of the line that has no end yet: what a terminal would show of it."""
    left_out: int = 0
    """Bytes left out and not reported yet."""
    torn: bool = field(default=False)
    """The beginning of the line at ``position`` was left out."""

    def look(self, path: Path, size: int) -> Iterator[str]:
        if size < self.position:
            self.position = 0  # replaced by a new file
        if size == self.position:
            return
        if size - self.position > MOST_BYTES:
            self.left_out += size - MOST_BYTES - self.position + len(self.partial)
            self.position, self.partial, self.torn = size - MOST_BYTES, b"", True
        try:
            with open_plain(path) as file:
                file.seek(self.position)
                data = file.read(size - self.position)
        except OSError:
            return
        self.position += len(data)
        *lines, self.partial = (self.partial + data).split(b"\n")
        if self.torn and lines:
            self.left_out += len(lines.pop(0)) + 1
            self.torn = False
        if self.torn:
            self.left_out, self.partial = self.left_out + len(self.partial), b""
        self._shorten()
        if lines:
            yield from self._told()
        yield from map(_shown, lines)

    def rest(self) -> Iterator[str]:
        yield from self._told()
        if self.partial.strip():
            yield _shown(self.partial)
        self.partial = b""

    def _shorten(self) -> None:
        """A bar that redraws itself keeps what it shows now, a line without end its beginning."""
        self.partial = self.partial[self.partial.rstrip(b"\r").rfind(b"\r") + 1 :]
        if len(self.partial) > LONGEST:
            self.left_out += len(self.partial) - LONGEST
            self.partial = self.partial[:LONGEST]

    def _told(self) -> Iterator[str]:
        if self.left_out:
            yield f"({_size(self.left_out)} of the script's output left out: muster logs has all)"
        self.left_out = 0


def _size(count: int) -> str:
    return f"{count / 1e6:.1f} MB" if count >= 100_000 else f"{count:,} bytes"


def shown(text: str, *, colours: bool) -> str:
    """Text that a program wrote, without what a terminal obeys; with ``colours``, those are left in it."""
    return _CONTROL.sub(lambda found: found[0] if colours and found[1] is None else "", text)


def _shown(line: bytes) -> str:
    """What a terminal shows of a line, colours included."""
    line = line.rstrip(b"\r")
    line = line[line.rfind(b"\r") + 1 :]
    text = shown(line[:LONGEST].decode(errors="replace"), colours=True)
    if len(line) > LONGEST:
        text += f" ... ({_size(len(line) - LONGEST)} more)"
    return text + "\x1b[0m" if "\x1b[" in text else text
