"""What a stream of sealed segments looks like in a bucket, and which of them together hold all of it.

One writer's files go, in the order in which they grew, into numbered objects below ``events/STREAM/`` (or ``logs/``)::

    0-0000000041                    segment 41, as it was sealed
    1-0000000000-0000000007         segments 0 to 7, merged; 2-... holds eight of these

An object is one line, the CRC-32 of a JSON (``Header``) in eight hex digits and that JSON, and then the raw bytes of
its parts, one after the other: a header that was damaged is told from one of another version. A part is a stretch of
one file; a file is what its parts hold, in order. Lines of event files are unchanged, so their chain crosses segments.
A number belongs to whoever creates ``0-NUMBER`` first: that is the fence between two writers of one stream.

Merging creates the wider object before it removes what that holds, and names rise with the level: a list that is not
one moment's (it comes in pages) shows a merged object whenever it no longer shows what went into it.
"""

from __future__ import annotations

import hashlib
import re
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from muster.core.errors import MusterError
from muster.core.typed_json import Count, Record, Unreadable, decode, encode, parse_object

FORMAT = 1
#: Bytes of an object at most but for one that a single long line makes longer: Google's client sends 8 MiB at once.
OBJECT_BYTES = (8 << 20) - (256 << 10)
_NAME = re.compile(r"^(?:0-(\d{10})|([1-9]\d?)-(\d{10})-(\d{10}))$")


class Span(NamedTuple):
    """Which segments an object holds: numbers ``first`` to ``last``."""

    level: int
    first: int
    last: int

    @property
    def name(self) -> str:
        return f"{self.level}-{self.first:010d}" + (f"-{self.last:010d}" if self.level else "")

    @staticmethod
    def of(name: str) -> Span | None:
        """None for what is no segment's name."""
        match = _NAME.match(name)
        if match is None:
            return None
        if match[1] is not None:
            return Span(0, int(match[1]), int(match[1]))
        return Span(int(match[2]), int(match[3]), int(match[4]))


@dataclass(frozen=True, kw_only=True)
class Part(Record):
    """A stretch of one file."""

    name: str
    start: Count
    """Its first byte, counted in the file."""
    size: Count
    seq: Count = 0
    """Of an event file: the number of its first line, how many lines, what the first one cites, and what the line
    after the last one will cite. Output of programs has no chain."""
    lines: Count = 0
    prev: str = ""
    head: str = ""

    @property
    def end(self) -> int:
        return self.start + self.size


@dataclass(frozen=True, kw_only=True)
class Header(Record):
    """First line of a segment."""

    format: int = FORMAT
    run_id: str
    level: Count
    first: Count
    last: Count
    parts: tuple[Part, ...] = ()
    ended: str | None = None
    """Who ended the stream: whatever its writer still has is not part of the run."""

    @property
    def span(self) -> Span:
        return Span(self.level, self.first, self.last)

    @property
    def size(self) -> int:
        """Of its parts."""
        return sum(part.size for part in self.parts)


@dataclass(frozen=True)
class Segment:
    """A segment's header and the bytes of its parts."""

    header: Header
    body: bytes

    def encode(self) -> bytes:
        text = encode(self.header)
        return _check(text) + b" " + text + b"\n" + self.body

    @staticmethod
    def decode(data: bytes, uri: str, *, run_id: str) -> Segment:
        """The inverse of ``encode``.

        Raises:
            Damaged: naming ``uri``: what it held cannot be read any more.
            MusterError: naming ``uri``: of another run, of another format.
        """
        line, _, body = data.partition(b"\n")
        check, _, text = line.partition(b" ")
        if check != _check(text):
            raise Damaged(f"{uri} is damaged: its header was changed, or is none", may_end=not body, hint=_HINT)
        try:
            header = decode(Header, text)
        except Unreadable as error:
            raise MusterError(f"{uri} is no segment of this version: {error}", hint=_OTHER) from error
        if header.format != FORMAT:
            raise MusterError(f"{uri} is of format {header.format}; this version reads {FORMAT}", hint=_OTHER)
        if header.run_id != run_id:
            raise MusterError(f"{uri} belongs to the run {header.run_id}, not to {run_id}", hint=_HINT)
        if header.size != len(body):
            raise Damaged(f"{uri} is damaged: {len(body)} bytes where {header.size} belong", hint=_HINT)
        return Segment(header, body)

    def stretches(self) -> Iterable[tuple[Part, bytes]]:
        """Each part with its bytes."""
        at = 0
        for part in self.header.parts:
            yield part, self.body[at : at + part.size]
            at += part.size


_HINT = "something else writes below this URI: the run's bytes cannot be told from it"
_OTHER = "use the version of Muster that wrote it: `muster --version` in the run's image"


def _check(text: bytes) -> bytes:
    return b"%08x" % zlib.crc32(text)


def is_whole(part: Part, data: bytes) -> bool:
    """Whether ``data`` is what was sealed as ``part`` of an event file: its lines cite each other from ``prev`` on, and
    the last one is what ``head`` names."""
    head = part.prev
    for line in data.splitlines(keepends=True):
        try:
            if parse_object(line)["prev"] != head:
                return False
        except (ValueError, KeyError):
            return False
        head = hashlib.sha256(line).hexdigest()
    return head == part.head


class Damaged(MusterError):
    """An object that cannot be read any more; what follows it can. ``may_end``: it may be the end of a stream."""

    def __init__(self, message: str, *, may_end: bool = False, hint: str | None = None) -> None:
        super().__init__(message, hint=hint)
        self.may_end = may_end


class Gap(MusterError):
    """Segments are missing between others."""


def cover(spans: Iterable[Span]) -> list[Span]:
    """The fewest objects that hold everything, in order; the widest where one holds what another does.

    Raises:
        Gap: some are missing (also while another program merges: list again).
    """
    result: list[Span] = []
    after = 0
    for span in sorted(spans, key=lambda span: (span.first, -span.last, -span.level)):
        if span.last < after:
            continue
        if span.first > after:
            raise Gap(f"segments {after} to {span.first - 1} are missing", hint="were objects of the run deleted?")
        result.append(span)
        after = span.last + 1
    return result


def superfluous(spans: Sequence[Span]) -> list[Span]:
    """What others hold as well."""
    kept = set(cover(spans))
    return [span for span in spans if span not in kept]


def merged_parts(headers: Sequence[Header]) -> tuple[Part, ...]:
    """The parts of objects that follow each other as parts of one, file by file."""
    result: dict[str, Part] = {}
    for header in headers:
        for part in header.parts:
            before = result.get(part.name)
            if before is None:
                result[part.name] = part
            elif part.start != before.end:
                raise Gap(f"{part.name} lacks bytes {before.end} to {part.start}")
            else:
                size, lines = before.size + part.size, before.lines + part.lines
                result[part.name] = replace(before, size=size, lines=lines, head=part.head)
    return tuple(result.values())


def groups(headers: Sequence[Header]) -> list[list[Header]]:
    """Objects that follow each other, in runs of two or more that fit one object; what stays alone is left out."""
    result: list[list[Header]] = [[]]
    size = 0
    for header in headers:
        if size + header.size > OBJECT_BYTES and result[-1]:
            result.append([])
            size = 0
        result[-1].append(header)
        size += header.size
    return [group for group in result if len(group) > 1]
