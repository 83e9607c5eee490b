"""Puts the events of every writer on one time axis: the first supervisor's monotonic clock.

A host's events move by the offset that the supervisor measured (``clock.offset``); a later supervisor's
by the offsets that both measured to the same host. Where nothing was measured, wall clocks are used, and
the report notes it.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median

from muster.core.event_details.hosts import ClockOffset
from muster.core.event_log.names import LogName
from muster.core.events import Event

#: Two clocks whose wall-minus-monotonic differs by less are taken to be one machine's clock.
_SAME_CLOCK_NS = 20_000_000
#: Offsets of one host that differ by more belong to different boots.
_SAME_BOOT_NS = 1_000_000_000


@dataclass(frozen=True)
class Timed:
    """One event and its place on the axis."""

    t_ns: int
    file: str
    event: Event


@dataclass(frozen=True)
class Aligned:
    """All events in the order in which they happened."""

    events: list[Timed]
    wall_at_zero_ns: int
    """Add to a ``t_ns`` to get nanoseconds since the Unix epoch, by the axis's own wall clock."""
    clock_error_ns: Mapping[str, int | None] = field(default_factory=dict)
    """File -> measured error of its clock; None: not measured, wall clocks used."""
    notes: list[str] = field(default_factory=list)


def writer_of(file: str) -> str:
    """``supervisor.2.jsonl``, ``supervisor.part2.2.jsonl`` -> ``supervisor``."""
    named = LogName.of(file)
    return named.writer if named is not None else file.removesuffix(".jsonl").rsplit(".", 1)[0]


def _term(file: str) -> tuple[int, int]:
    named = LogName.of(file)
    return (named.attempt, named.part) if named is not None else (0, 0)


@dataclass(frozen=True)
class _Offset:
    """One measurement, on the axis: add ``offset_ns`` to the host's monotonic time."""

    at_ns: int
    offset_ns: int
    error_ns: int

    @classmethod
    def measured(cls, event: Event, shift_ns: int = 0) -> _Offset:
        """As the event says it. ``shift_ns``: of its supervisor's clock."""
        detail = event.read(ClockOffset)
        return cls(event.mono_ns + shift_ns, detail.offset_ns + shift_ns, detail.error_ns)

    def nearest(self, boots: Iterable[tuple[int, Sequence[Event]]]) -> int:
        """The shift by wall clocks of the boot in which this was measured, of (shift, events)."""
        return min((by_wall for by_wall, _ in boots), key=lambda by_wall: abs(by_wall - self.offset_ns))


def align(files: Mapping[str, Sequence[Event]]) -> Aligned:
    """Merge the files. The order within one instant is that of file names, then of writing."""
    given = {name: list(events) for name, events in files.items() if events}
    if not given:
        return Aligned(events=[], wall_at_zero_ns=0)
    supervisors = sorted((name for name in given if writer_of(name) == "supervisor"), key=_term)
    axis_file = supervisors[0] if supervisors else min(given, key=lambda name: given[name][0].wall_ns)
    first = given[axis_file][0]
    wall_at_zero = first.wall_ns - first.mono_ns
    notes: list[str] = []
    shifts = _supervisor_shifts(supervisors, given, wall_at_zero)
    offsets = _offsets(supervisors, given, shifts)
    timed: list[Timed] = []
    errors: dict[str, int | None] = {}
    for name in sorted(given):
        events = given[name]
        if name in shifts:
            errors[name] = 0
            timed += [Timed(event.mono_ns + shifts[name], name, event) for event in events]
            continue
        boots = [(_by_wall(boot[0], wall_at_zero), boot) for boot in _boots(events)]
        of_host = next((offsets[event.host] for event in events if event.host in offsets), [])
        placed = [
            _agent_times(name, boot, [one for one in of_host if one.nearest(boots) == by_wall], by_wall)
            for by_wall, boot in boots
        ]
        measured = [error for _, error in placed if error is not None]
        errors[name] = max(measured) if len(measured) == len(placed) else None
        if errors[name] is None and name != axis_file:
            notes.append(f"{name}: clock offset not measured; wall clocks place its events")
        timed += [each for result, _ in placed for each in result]
    order = {name: position for position, name in enumerate(sorted(given))}
    timed.sort(key=lambda item: (item.t_ns, order[item.file], item.event.seq))
    return Aligned(events=timed, wall_at_zero_ns=wall_at_zero, clock_error_ns=errors, notes=notes)


def _boots(events: Sequence[Event]) -> list[Sequence[Event]]:
    """A file's events cut where its machine was booted, or where another machine went on writing it: the monotonic
    clock fell, and the wall clock did not. (Events of ranks that come late fall behind by both.)"""
    cuts, newest_ns = [0], events[0].mono_ns
    for position, event in enumerate(events):
        first = events[cuts[-1]]
        moved_ns = (event.wall_ns - event.mono_ns) - (first.wall_ns - first.mono_ns)
        if event.mono_ns < newest_ns and abs(moved_ns) > _SAME_BOOT_NS:
            cuts.append(position)
            newest_ns = event.mono_ns
        newest_ns = max(newest_ns, event.mono_ns)
    return [events[begin:end] for begin, end in zip(cuts, [*cuts[1:], len(events)], strict=True)]


def _by_wall(event: Event, wall_at_zero: int) -> int:
    """What to add to this event's monotonic time, by wall clocks; 0 on the axis's own machine."""
    shift = event.wall_ns - event.mono_ns - wall_at_zero
    return 0 if abs(shift) < _SAME_CLOCK_NS else shift


def _raw_offsets(events: Sequence[Event]) -> dict[str, _Offset]:
    return {event.host: _Offset.measured(event) for event in events if event.kind == ClockOffset.kind}


def _supervisor_shifts(
    supervisors: Sequence[str], given: Mapping[str, list[Event]], wall_at_zero: int
) -> dict[str, int]:
    """Each supervisor file's own shift. Terms on other machines chain through hosts that both measured."""
    shifts: dict[str, int] = {}
    known: dict[str, int] = {}
    for name in supervisors:
        shift = _by_wall(given[name][0], wall_at_zero)
        own = _raw_offsets(given[name])
        chained = [known[host] - own[host].offset_ns for host in own if host in known]
        if chained and abs(median(chained) - shift) < 10 * _SAME_BOOT_NS:
            shift = 0 if shift == 0 else int(median(chained))
        shifts[name] = shift
        known.update({host: offset.offset_ns + shift for host, offset in own.items()})
    return shifts


def _offsets(
    supervisors: Sequence[str], given: Mapping[str, list[Event]], shifts: Mapping[str, int]
) -> dict[str, list[_Offset]]:
    result: dict[str, list[_Offset]] = defaultdict(list)
    for name in supervisors:
        for event in given[name]:
            if event.kind == ClockOffset.kind:
                result[event.host].append(_Offset.measured(event, shifts[name]))
    for measured in result.values():
        measured.sort(key=lambda offset: offset.at_ns)
    return result


def _agent_times(
    name: str, events: Sequence[Event], measured: Sequence[_Offset], by_wall: int
) -> tuple[list[Timed], int | None]:
    """What one boot wrote of a host's file: one cluster of offsets, the nearest in time for each event."""
    if not measured:
        return [Timed(event.mono_ns + by_wall, name, event) for event in events], (0 if by_wall == 0 else None)
    anchor = min(measured, key=lambda offset: abs(offset.offset_ns - by_wall))
    boot = [offset for offset in measured if abs(offset.offset_ns - anchor.offset_ns) < _SAME_BOOT_NS]
    starts = [offset.at_ns for offset in boot]
    result = []
    for event in events:
        position = max(0, bisect_right(starts, event.mono_ns + anchor.offset_ns) - 1)
        result.append(Timed(event.mono_ns + boot[position].offset_ns, name, event))
    return result, max(offset.error_ns for offset in boot)
