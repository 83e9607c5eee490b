"""The hash chain of an event file: each line cites the one before it."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
from dataclasses import dataclass
from pathlib import Path

from muster.core.event_log.names import event_files
from muster.core.events import Event
from muster.core.processes import open_plain
from muster.core.typed_json import parse_object

#: What a verdict says of a line that does not follow the one before it.
BREAKS = "breaks the chain: edited, dropped or moved"
#: Longer than any event: what a reader holds in memory of a file that has no line ends.
LONGEST_LINE_BYTES = 16 << 20


def too_long() -> OSError:
    """What to raise for a line that is longer than any writer's."""
    return OSError(errno.EFBIG, f"a line of it has more than {LONGEST_LINE_BYTES:,} bytes")


def genesis(run_id: str, name: str) -> str:
    """What the first line of the file ``name`` cites."""
    return hashlib.sha256(f"muster:{run_id}:{name}".encode()).hexdigest()


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
    *lines, torn = data.split(b"\n")
    for text in lines:
        line = text + b"\n"
        try:
            result = parse_object(line)
            prev, seq = result["prev"], Event.from_json(result).seq
        except (ValueError, KeyError):
            return Verdict(events=count, head=head, problem=f"line {count + 1} is not an event")
        if prev != head or seq != count:
            return Verdict(events=count, head=head, problem=f"line {count + 1} {BREAKS}")
        head = hashlib.sha256(line).hexdigest()
        count += 1
    return Verdict(events=count, head=head, torn_bytes=len(torn))


def heads(directory: str | Path, *, run_id: str) -> dict[str, str]:
    """What the next line of every file would cite: file name -> SHA-256 of its last whole line. Reads no other."""
    result: dict[str, str] = {}
    for path in event_files(directory):
        with contextlib.suppress(OSError):
            result[path.name] = head(path, run_id=run_id)
    return result


def head(path: Path, *, run_id: str) -> str:
    """What the next line of one file would cite. What follows its last whole line was torn."""
    last = _last_line(path)
    return hashlib.sha256(last).hexdigest() if last else genesis(run_id, path.name)


def _last_line(path: Path, *, block: int = 1 << 16) -> bytes:
    """With its end; empty where there is none. What follows it was torn."""
    with open_plain(path) as file:
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
            if len(tail) > LONGEST_LINE_BYTES:
                raise too_long()
    return tail[: tail.rfind(b"\n") + 1]
