"""The reading end of a run's event files: goes on from what is whole, and says what is not.

A line is skipped if it is no event, or if the next line cites a different digest: it was changed. What cannot be
checked is kept: no line cites the last line of a file yet, and a line is accepted if the one that should cite it
is damaged itself; such lines are read only if every field of them is as their kind of event has it.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
from array import array
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

from pydantic_core import from_json

from muster.core.errors import MusterError
from muster.core.event_details.kinds import KINDS
from muster.core.event_log.chain import BREAKS, LONGEST_LINE_BYTES, Verdict, genesis, too_long
from muster.core.event_log.names import event_files, files_of
from muster.core.events import Event
from muster.core.processes import open_plain
from muster.core.typed_json import INT64_MAX, JsonObject

#: Places of a file that are named one by one; of more (a disk's garbage has thousands) only how many there are.
MOST_NAMED = 50
#: Longer than any line.
_LAST_BYTES = 1 << 20


@dataclass(frozen=True, kw_only=True)
class Damage:
    """One place of an event file that cannot be read, or was changed."""

    file: str
    line: int
    """Counted from 1; 0: the file as a whole."""
    reason: str
    places: int = 1
    """How many it represents."""

    def __str__(self) -> str:
        return f"{self.file}:{self.line}: {self.reason}" if self.line else f"{self.file}: {self.reason}"

    def to_json(self) -> JsonObject:
        return {"file": self.file, "line": self.line, "reason": self.reason}


@dataclass
class EventReader:
    """Reads the event files of ``directory``, each from where the last ``read`` left it.

    Never raises for what a file holds. ``damaged`` has each damage once, in order; ``on_damage`` is called for each.
    Of one file at most ``MOST_NAMED``, and one with the number of the others (``on_damage`` is called for it once,
    when a file was read to its end). A torn last line is being written, or its writer was killed: no damage. A line
    that was yielded is not yielded again where it, or all of the file, was added a second time.
    """

    directory: Path
    on_damage: Callable[[Damage], None] | None = None
    writer: str | None = None
    """Whose files; None: everybody's."""
    damaged: list[Damage] = field(default_factory=list)
    _places: dict[str, _Place] = field(default_factory=dict)
    _known: dict[str, set[int]] = field(default_factory=dict)
    """Damaged lines of each file."""
    _more_at: dict[str, int] = field(default_factory=dict)
    """Where in ``damaged`` the number of those that are not named is."""

    def read(self) -> Iterator[tuple[str, Event]]:
        """``(file name, event)``, file by file, each in its order; an event that was yielded is not read again."""
        for path in self._paths():
            for event in self.read_file(path):
                yield path.name, event

    def verdict(self, name: str, run_id: str) -> Verdict:
        """Of the chain of a file of this run, as far as it was read (``chain.verify``): no further look at it."""
        place, begins = self._places[name], genesis(run_id, name)
        if place.first_prev not in ("", begins):
            return Verdict(events=0, head=begins, problem=f"line 1 {BREAKS}")
        return Verdict(
            events=len(place.chain),
            head=place.chain_head or begins,
            problem=place.chain_problem,
            torn_bytes=place.torn_bytes,
        )

    def line_hashes(self, name: str) -> array[int]:
        """The first 64 bits of the hash of each line of the file's chain, as far as it was read."""
        return self._places[name].chain if name in self._places else array("Q")

    def skip(self) -> None:
        """Whole lines that are there now count as read, and nothing is known of them; the next one's number is 2.

        It takes no longer for a long log than for a short one.
        """
        for path in self._paths():
            with contextlib.suppress(OSError), open_plain(path) as file:
                size = os.fstat(file.fileno()).st_size
                file.seek(max(0, size - _LAST_BYTES))
                last = file.read(_LAST_BYTES)
                if (cut := last.rfind(b"\n")) >= 0:  # else a first line is being written
                    self._places[path.name] = _Place(end=size - len(last) + cut + 1, number=1)

    def _paths(self) -> list[Path]:
        return event_files(self.directory) if self.writer is None else files_of(self.directory, self.writer)

    def read_file(self, path: Path) -> Iterator[Event]:
        """The same of one file."""
        for line in self.read_lines(path):
            assert line.event is not None
            yield line.event

    def read_lines(self, path: Path) -> Iterator[Line]:
        """The lines of those events, for callers that need a line's number or hash too."""
        place = self._places.setdefault(path.name, _Place())
        try:
            with open_plain(path) as file:  # of weeks: never all of it in memory
                yield from self._believed(path.name, file, place)
        except FileNotFoundError:
            return
        except OSError as error:
            place.chain_problem = f"cannot be read: {error.strerror or error}"
            self._report(path.name, 0, place.chain_problem)
        self._report_more(path.name)

    def _believed(self, name: str, file: BinaryIO, place: _Place) -> Iterator[Line]:
        if os.fstat(file.fileno()).st_size < place.end:
            self._report(name, place.number, "the file has become shorter than what was read of it")
            place.begin_again()
        file.seek(place.end)
        lines = (place.of_this_run(line) for line in place.lines(file))
        line, after = next(lines, None), next(lines, None)
        if line is not None and place.last is not None:  # nothing cited it yet when it was read
            self._judge(name, place, place.before, place.last, (line, after))
        while line is not None:
            later = next(lines, None)
            repeated = place.has_yielded(line)
            if repeated and not place.repeats and place.is_new(line):  # it represents those after it
                self._report(name, line.number, "it is there a second time")
            whole = not repeated and self._judge(name, place, place.last, line, (after, later))
            place.take(line, repeated)
            if whole and line.event is not None:
                place.note_yielded(line, line.event)
                if place.is_new(line):
                    yield line
            line, after = after, later

    def _judge(
        self, name: str, place: _Place, before: Line | None, line: Line, following: tuple[Line | None, Line | None]
    ) -> bool:
        """Whether to believe ``line``; what is wrong with it, or missing after it, is reported."""
        after, later = following
        if line.event is None:
            self._report(name, line.number, line.reason)
            return False
        if line.number == 1 and (problem := _bad_beginning(name, line, line.event)) is not None:
            self._report(name, 1, problem)
        if after is None and place.goes_back(line, before):
            self._report(name, line.number, "it does not follow the lines before it")
            return False
        if after is None or after.event is None or not line.prev:
            return self._fits(name, line, line.event)
        if after.prev == line.hash:
            return True
        if after.hash == line.hash or (place.has_yielded(after) and place.is_new(after)):
            # It is the next one that does not belong here.
            return self._fits(name, line, line.event)
        if later is None and after.event.seq <= line.event.seq and before is not None and line.prev == before.hash:
            return self._fits(name, line, line.event)  # again the next one
        if later is not None and later.event is not None and later.prev != after.hash:  # it is the next one that is not
            return self._fits(name, line, line.event)
        missing = after.event.seq - line.event.seq - 1
        if missing > 0 and (before is None or before.event is None or line.event.seq == before.event.seq + 1):
            self._report(name, after.number, f"{missing} lines are missing before it")
            return self._fits(name, line, line.event)
        self._report(name, line.number, "it was changed: the next line cites another one")
        return False

    def _fits(self, name: str, line: Line, event: Event) -> bool:
        """For a line that no other one vouches for."""
        kind = KINDS.get(event.kind)
        try:
            if kind is not None:  # else of a later version
                event.read(kind)
        except MusterError as error:
            self._report(name, line.number, str(error))
            return False
        return True

    def _report(self, file: str, line: int, reason: str) -> None:
        known = self._known.setdefault(file, set())
        if line in known:
            return
        known.add(line)
        if len(known) <= MOST_NAMED:
            self._say(Damage(file=file, line=line, reason=reason))

    def _report_more(self, file: str) -> None:
        more = len(self._known.get(file, ())) - MOST_NAMED
        if more <= 0:
            return
        damage = Damage(file=file, line=0, reason=f"and {more} more lines", places=more)
        if file in self._more_at:
            self.damaged[self._more_at[file]] = damage
        else:
            self._more_at[file] = len(self.damaged)
            self._say(damage)

    def _say(self, damage: Damage) -> None:
        self.damaged.append(damage)
        if self.on_damage is not None:
            self.on_damage(damage)


@dataclass(slots=True)
class Line:
    """One whole line of a file."""

    number: int
    end: int
    """Bytes of the file up to its end."""
    size: int
    hash: str
    event: Event | None
    """None: it is not one."""
    prev: str
    """Empty where the line does not say."""
    held: JsonObject = field(default_factory=dict)
    """What it says, as JSON; empty where it is no event."""
    reason: str = ""


@dataclass
class _Place:
    """How far one file was read."""

    end: int = 0
    number: int = 0
    last: Line | None = None
    before: Line | None = None
    """The one before ``last``."""
    repeats: bool = False
    """Whether ``last`` was there before."""
    newest_seq: int = -1
    seen_up_to: int = -1
    """Events up to it were yielded when the file was longer."""
    first_prev: str = ""
    """What the first line cites."""
    chain: array[int] = field(default_factory=lambda: array("Q"))
    """The beginnings of the hashes of all lines up to the first one that breaks the chain."""
    chain_head: str = ""
    chain_problem: str | None = None
    torn_bytes: int = 0
    _run_id: str | None = None
    """Of the first line that was yielded."""
    _seqs: array[int] = field(default_factory=lambda: array("q"))
    """Of what was yielded, rising. (Numbers alone: a file may have millions of lines.)"""
    _hashes: array[int] = field(default_factory=lambda: array("Q"))
    """The beginnings of their lines' hashes."""
    _stragglers: dict[int, int] = field(default_factory=dict)
    """The same of those that came after one with a higher number."""

    def lines(self, file: BinaryIO) -> Iterator[Line]:
        """What follows, up to what is torn, or being written; each line continues the chain, or breaks it."""
        end, number, self.torn_bytes = self.end, self.number, 0
        while raw := file.readline(LONGEST_LINE_BYTES):
            if len(raw) == LONGEST_LINE_BYTES:  # a hole in the file, or an attempt to exhaust memory
                raise too_long()
            if not raw.endswith(b"\n"):
                self.torn_bytes = len(raw)
                return
            end, number = end + len(raw), number + 1
            line = _line(raw, end, number)
            if self.chain_problem is None:
                self.chain_problem = self._follow(line)
            yield line

    def _follow(self, line: Line) -> str | None:
        if line.event is None or not line.prev:
            return f"line {line.number} is not an event"
        self.first_prev = self.first_prev or line.prev
        if line.event.seq != len(self.chain) or (self.chain and line.prev != self.chain_head):
            return f"line {line.number} {BREAKS}"
        self.chain_head = line.hash
        self.chain.append(_short(line))
        return None

    def take(self, line: Line, repeated: bool) -> None:
        """``line`` was read."""
        self.end, self.number, self.repeats = line.end, line.number, repeated
        self.before, self.last = self.last, line
        if line.event is not None:
            self.newest_seq = max(self.newest_seq, line.event.seq)

    def is_new(self, line: Line) -> bool:
        """Whether it had not been read before the file became shorter."""
        return line.event is not None and line.event.seq > self.seen_up_to

    def note_yielded(self, line: Line, event: Event) -> None:
        seq = min(event.seq, INT64_MAX)
        self._run_id = self._run_id or event.run_id
        if self._seqs and seq <= self._seqs[-1]:
            self._stragglers.setdefault(seq, _short(line))
        else:
            self._seqs.append(seq)
            self._hashes.append(_short(line))

    def has_yielded(self, line: Line) -> bool:
        """This same line, from another place of the file."""
        if line.event is None or not self._seqs or line.event.seq > self._seqs[-1]:
            return False
        at = bisect_left(self._seqs, line.event.seq)
        return _short(line) in (self._hashes[at], self._stragglers.get(line.event.seq))

    def goes_back(self, line: Line, before: Line | None) -> bool:
        """Whether it cites another line than that before it, and has the number of one that was yielded, or less."""
        follows = before is None or not line.prev or line.prev == before.hash
        return not follows and line.event is not None and bool(self._seqs) and line.event.seq <= self._seqs[-1]

    def of_this_run(self, line: Line) -> Line:
        """It, or what says that it is another run's."""
        if line.event is None or self._run_id in (None, line.event.run_id):
            return line
        reason = f"not an event of this run: {line.event.run_id!r}"[:200]
        return Line(line.number, line.end, line.size, line.hash, None, "", reason=reason)

    def begin_again(self) -> None:
        self.end = self.number = 0
        self.first_prev, self.chain, self.chain_head, self.chain_problem = "", array("Q"), "", None
        self.last = self.before = None
        self.seen_up_to = self.newest_seq


def _short(line: Line) -> int:
    return int(line.hash[:16], 16)


def _line(raw: bytes, end: int, number: int) -> Line:
    digest = hashlib.sha256(raw).hexdigest()
    try:
        held = from_json(raw)  # a third of the time of ``json``
        if not isinstance(held, dict):
            raise ValueError(f"not a JSON object but {type(held).__name__}")
        prev = held.get("prev", "")
        return Line(number, end, len(raw), digest, Event.from_json(held), prev if isinstance(prev, str) else "?", held)
    except ValueError as error:
        return Line(number, end, len(raw), digest, None, "", reason=f"not an event: {error}"[:200])


def _bad_beginning(name: str, line: Line, event: Event) -> str | None:
    if not line.prev or line.prev == genesis(event.run_id, name):
        return None
    if event.seq > 0:
        return f"{event.seq} lines are missing before it"
    return "it was changed, or written for another file"


def in_words(damaged: Iterable[Damage]) -> list[str]:
    """One sentence a file, for people."""
    by_file: dict[str, list[Damage]] = {}
    for damage in damaged:
        by_file.setdefault(damage.file, []).append(damage)
    sentences = []
    for found in by_file.values():
        more = sum(each.places for each in found) - 1
        sentences.append(f"{found[0]}" + (f" (and {more} more places)" if more else "") + "; read without it")
    return sentences
