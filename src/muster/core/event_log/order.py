"""Events of several writers in the order in which they happened, even where a wall clock was stepped.

Synchronised wall clocks order them to milliseconds, until one is stepped: by hand, or by a time service that starts
late. The part of a file that one process wrote is placed by its monotonic clock from its first event on; where its wall
clock was wrong from the start, by the offset that the supervisor measured. Differences below ``BENT_NS`` are kept.
"""

from __future__ import annotations

import heapq
from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from muster.core.event_details.hosts import AgentStarted, ClockOffset
from muster.core.event_details.run import SupervisorStarted
from muster.core.event_log.names import LogName
from muster.core.events import Event
from muster.core.typed_json import INT64_MAX

#: More than synchronised clocks differ by, less than a step that matters.
BENT_NS = 1_000_000_000
#: First event of a new process in a file that another process began, perhaps before a reboot.
_BEGINS = (AgentStarted.kind, SupervisorStarted.kind)


def merge_by_monotonic_clock(files: Mapping[str, Sequence[Event]]) -> list[tuple[int, str, Event]]:
    """(wall time as if no clock had been stepped, file, event), in order; at equal times by file, then as written."""
    timeline = Timeline()
    for name, events in files.items():
        for event in events:
            timeline.add(name, event)
    return [(at_ns, name, files[name][number]) for at_ns, name, number in timeline.in_order()]


class Timeline:
    """Where events of several files belong; keeps their two times, 16 bytes each, and not the events."""

    def __init__(self) -> None:
        self._files: dict[str, list[_Stretch]] = {}

    def add(self, name: str, event: Event) -> None:
        """The next event of the file ``name``."""
        stretches = self._files.setdefault(name, [])
        if not stretches or event.kind in _BEGINS:
            begins = stretches[-1].begins + len(stretches[-1].walls) if stretches else 0
            stretches.append(_Stretch(name=name, first=event, begins=begins))
        stretches[-1].add(event)

    def in_order(self) -> Iterator[tuple[int, str, int]]:
        """(wall time as if no clock had been stepped, file, number of the event in it counted from 0), in order; at
        equal times by file, then as added."""
        stretches = [stretch for name in sorted(self._files) for stretch in self._files[name]]
        _anchor(stretches)
        return heapq.merge(*(stretch.in_order() for stretch in stretches), key=lambda row: row[0])

    def newest_ns(self) -> int:
        """The latest of those wall times; 0: there are no events."""
        stretches = [stretch for of_file in self._files.values() for stretch in of_file]
        _anchor(stretches)
        return max((stretch.newest_ns() for stretch in stretches), default=0)


@dataclass
class _Stretch:
    """What one process wrote of a file."""

    name: str
    first: Event
    begins: int
    """Number of ``first`` in the file."""
    anchor: int = 0
    """Its wall clock minus its monotonic clock, as they should be."""
    walls: array[int] = field(default_factory=lambda: array("q"))
    monos: array[int] = field(default_factory=lambda: array("q"))
    offsets: list[tuple[str, int]] = field(default_factory=list)
    """(host, measured offset of its monotonic clock)."""

    def add(self, event: Event) -> None:
        self.walls.append(_within(event.wall_ns))
        self.monos.append(_within(event.mono_ns))
        if event.kind == ClockOffset.kind and _is_supervisor(self.name):
            self.offsets.append((event.host, event.read(ClockOffset).offset_ns))

    @property
    def own_anchor(self) -> int:
        return self.walls[0] - self.monos[0]

    def at_ns(self, index: int) -> int:
        """By its own wall time where that agrees with the monotonic clock, else by the monotonic clock."""
        wall_ns, mono_ns = self.walls[index], self.monos[index]
        return wall_ns if abs(wall_ns - mono_ns - self.anchor) <= BENT_NS else mono_ns + self.anchor

    def newest_ns(self) -> int:
        return max(map(self.at_ns, range(len(self.walls))))

    def in_order(self) -> Iterator[tuple[int, str, int]]:
        order = array("q", sorted(range(len(self.walls)), key=self.at_ns))
        return ((self.at_ns(index), self.name, self.begins + index) for index in order)


def _anchor(stretches: Sequence[_Stretch]) -> None:
    measured: dict[str, list[int]] = {}
    last_ns: int | None = None
    for stretch in sorted((each for each in stretches if _is_supervisor(each.name)), key=_term):
        stretch.anchor = stretch.own_anchor
        if last_ns is not None and stretch.monos[0] + stretch.anchor < last_ns - BENT_NS:
            stretch.anchor = last_ns - stretch.monos[0]  # terms follow each other, so this clock was set back
        newest_ns = stretch.newest_ns()
        last_ns = newest_ns if last_ns is None else max(last_ns, newest_ns)
        for host, offset_ns in stretch.offsets:
            measured.setdefault(host, []).append(stretch.anchor + offset_ns)
    for stretch in (each for each in stretches if not _is_supervisor(each.name)):
        own = stretch.own_anchor
        nearest = min(measured.get(stretch.first.host, ()), key=lambda offset: abs(offset - own), default=own)
        stretch.anchor = own if abs(own - nearest) <= BENT_NS else nearest


def _within(ns: int) -> int:
    """A damaged last line may name any time."""
    return max(-INT64_MAX, min(ns, INT64_MAX))


def _is_supervisor(name: str) -> bool:
    found = LogName.of(name)
    return found is not None and found.writer == "supervisor"


def _term(stretch: _Stretch) -> tuple[int, int, int]:
    found = LogName.of(stretch.name)
    return (found.attempt, found.part, stretch.begins) if found is not None else (0, 0, stretch.begins)
