"""What a run's event files hold, in order, without holding it: a run of weeks has gigabytes of events."""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from muster.core.event_log import Damage, EventReader
from muster.core.event_log.names import event_files
from muster.core.event_log.order import Timeline
from muster.core.events import Event
from muster.core.typed_json import parse_object

#: So much of a file is read at once, and of so many files kept: 4 MB.
CHUNK_BYTES, CHUNKS = 16 << 10, 256


@dataclass
class EventReplay:
    """Reads the files twice: to know what counts and when it happened, most of it before the lease is taken (weeks of
    events take longer than a lease lasts); and in order afterwards. Between, some numbers are kept of each event."""

    directory: Path
    _timeline: Timeline = field(default_factory=Timeline)
    _places: dict[str, tuple[array[int], array[int]]] = field(default_factory=dict)
    """File -> the first byte of each event's line, and how many it has."""
    _reader: EventReader = field(init=False)

    def __post_init__(self) -> None:
        self._reader = EventReader(self.directory)

    @property
    def damaged(self) -> Sequence[Damage]:
        """Places that could not be read: what was there is not part of the state."""
        return self._reader.damaged

    def read_new_events(self) -> None:
        """Read what the files hold beyond what was read before."""
        for path in event_files(self.directory):
            begins, lengths = self._places.setdefault(path.name, (array("q"), array("q")))
            for line in self._reader.read_lines(path):
                assert line.event is not None
                self._timeline.add(path.name, line.event)
                begins.append(line.end - line.size)
                lengths.append(line.size)

    def in_order(self, on_damage: Callable[[str], None] = lambda text: None) -> EventsInOrder:
        """All of what was read, with wall times by a clock that is never stepped."""
        return EventsInOrder(self.directory, self._timeline, self._places, on_damage)


@dataclass(frozen=True)
class EventsInOrder:
    """Each iteration reads the events again, and holds a few at a time."""

    directory: Path
    timeline: Timeline
    places: dict[str, tuple[array[int], array[int]]]
    on_damage: Callable[[str], None]
    """Called once for each file that has lost events."""

    @property
    def newest_ns(self) -> int:
        """Wall time of the last one; 0: there is none."""
        return self.timeline.newest_ns()

    def __iter__(self) -> Iterator[Event]:
        chunks, lost = _Chunks(self.directory), dict[str, tuple[str, int]]()
        try:
            for at_ns, name, number in self.timeline.in_order():
                begins, lengths = self.places[name]
                try:
                    event = Event.from_json(parse_object(chunks.read(name, begins[number], lengths[number])))
                except (OSError, ValueError) as error:
                    first, count = lost.get(name, (f"event {number + 1} was there and is not now: {error}", 0))
                    lost[name] = first, count + 1
                    continue
                yield event if event.wall_ns == at_ns else replace(event, wall_ns=at_ns)
        finally:
            for name, (first, count) in lost.items():
                self.on_damage(f"{name}: {first}" + (f"; nor are {count - 1} more of it" if count > 1 else ""))

    def telling(self, *others: Callable[[Event], None]) -> Iterator[Event]:
        """The same, each event given to ``others``, too: one reading for all."""
        for event in self:
            for other in others:
                other(event)
            yield event


@dataclass
class _Chunks:
    """Pieces of files. None stays open: of a thousand hosts there are thousands."""

    directory: Path
    _chunks: OrderedDict[str, tuple[int, bytes]] = field(default_factory=OrderedDict)
    """File -> where the piece begins, and what is there; the file used last comes last."""

    def read(self, name: str, begin: int, length: int) -> bytes:
        """Raises OSError."""
        at, data = self._chunks.get(name, (0, b""))
        if not at <= begin <= begin + length <= at + len(data):
            with open(self.directory / name, "rb") as file:
                file.seek(begin)
                at, data = begin, file.read(max(length, CHUNK_BYTES))
            self._chunks[name] = at, data
            if len(self._chunks) > CHUNKS:
                self._chunks.popitem(last=False)
        self._chunks.move_to_end(name)
        return data[begin - at : begin - at + length]
