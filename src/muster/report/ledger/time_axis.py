"""Puts the events of every writer on one time axis: the first supervisor's monotonic clock.

A host's events move by the offset that the supervisor measured (``clock.offset``); a later supervisor's
by the offsets that both measured to the same host. Where nothing was measured, wall clocks are used, and
the report notes it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from operator import attrgetter
from statistics import median

import numpy as np

from muster.core.event_details.hosts import ClockOffset
from muster.core.event_log.names import LogName
from muster.core.events import Event
from muster.core.typed_json import INT64_MAX
from muster.report.ledger.file_log import FileLog, Ints, StepColumns

#: Two clocks whose wall-minus-monotonic differs by less are taken to be one machine's clock.
_SAME_CLOCK_NS = 20_000_000
#: Offsets of one host that differ by more belong to different boots.
_SAME_BOOT_NS = 1_000_000_000
#: By which a rank's event may be written after a later one.
_LATE_NS = 5_000_000_000


@dataclass(frozen=True)
class Timed:
    t_ns: int
    file: str
    event: Event


@dataclass(frozen=True)
class Aligned:
    """All events in the order in which they happened: steps as columns."""

    events: list[Timed]
    """As ``FileLog.events`` has them."""
    wall_at_zero_ns: int
    """Add to a ``t_ns`` to get nanoseconds since the Unix epoch, by the axis's own wall clock."""
    clock_error_ns: Mapping[str, int | None] = field(default_factory=dict)
    """File -> measured error of its clock; None: not measured, wall clocks used."""
    notes: list[str] = field(default_factory=list)
    steps: StepColumns = field(default_factory=StepColumns)
    """Of all files, file by file."""
    step_ns: Ints = field(default_factory=lambda: np.empty(0, np.int64))
    """When each of ``steps`` ended, on the axis."""

    @property
    def span_ns(self) -> tuple[int, int]:
        """From the first event to the last; (0, 0): there are none."""
        if not self.events:
            return 0, 0
        return self.events[0].t_ns, int(self.step_ns.max(initial=self.events[-1].t_ns))


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

    def nearest(self, boots: Iterable[_Boot]) -> int:
        """The shift by wall clocks of the boot in which this was measured."""
        return min((boot.by_wall for boot in boots), key=lambda by_wall: abs(by_wall - self.offset_ns))


@dataclass(frozen=True)
class _Boot:
    """What one boot of a machine wrote of a file: from its event ``begin`` up to ``end``."""

    begin: int
    end: int
    by_wall: int
    """The shift of its clock by wall clocks."""

    def place(self, mono_ns: Ints, measured: Sequence[_Offset]) -> tuple[Ints, int | None]:
        """Times on the axis by one cluster of offsets, the nearest in time for each; and their error."""
        if not measured:
            return mono_ns + self.by_wall, (0 if self.by_wall == 0 else None)
        anchor = min(measured, key=lambda offset: abs(offset.offset_ns - self.by_wall))
        boot = [offset for offset in measured if abs(offset.offset_ns - anchor.offset_ns) < _SAME_BOOT_NS]
        starts = np.array([offset.at_ns for offset in boot])
        nearest = np.maximum(0, np.searchsorted(starts, mono_ns + anchor.offset_ns, "right") - 1)
        shifts = np.array([offset.offset_ns for offset in boot])
        return mono_ns + shifts[nearest], max(offset.error_ns for offset in boot)


def align(files: Mapping[str, FileLog | Sequence[Event]]) -> Aligned:
    """Merge the files. The order within one instant is that of file names, then of writing."""
    logs = {name: log if isinstance(log, FileLog) else FileLog.of(log) for name, log in sorted(files.items())}
    given = {name: log for name, log in logs.items() if log.events}
    if not given:
        return Aligned(events=[], wall_at_zero_ns=0)
    supervisors = sorted((name for name in given if writer_of(name) == "supervisor"), key=_term)
    axis_file = supervisors[0] if supervisors else min(given, key=lambda name: given[name].events[0].wall_ns)
    first = given[axis_file].events[0]
    wall_at_zero = first.wall_ns - first.mono_ns
    notes: list[str] = []
    shifts = _supervisor_shifts(supervisors, given, wall_at_zero)
    offsets = _offsets(supervisors, given, shifts)
    timed: list[Timed] = []
    steps, ends = StepColumns(), []
    errors: dict[str, int | None] = {}
    for name, log in given.items():
        if name in shifts:
            errors[name] = 0
            timed += [Timed(event.mono_ns + shifts[name], name, event) for event in log.events]
            ends.append(log.steps.ints("mono_ns") + shifts[name])
        else:
            measured = next((offsets[event.host] for event in log.events if event.host in offsets), [])
            events_ns, steps_ns, errors[name] = _times(log, measured, wall_at_zero)
            if errors[name] is None and name != axis_file:
                notes.append(f"{name}: clock offset not measured; wall clocks place its events")
            timed += [Timed(t_ns, name, event) for t_ns, event in zip(events_ns.tolist(), log.events, strict=True)]
            ends.append(steps_ns)
        steps.extend(log.steps)
    timed.sort(key=attrgetter("t_ns"))
    return Aligned(
        events=timed,
        wall_at_zero_ns=wall_at_zero,
        clock_error_ns=errors,
        notes=notes,
        steps=steps,
        step_ns=np.concatenate(ends),
    )


def _times(log: FileLog, measured: Sequence[_Offset], wall_at_zero: int) -> tuple[Ints, Ints, int | None]:
    """When a host's events and its steps happened, and the greatest error of its clock; None: one was not measured."""
    order = np.argsort(_joined(log, "seq"), kind="stable")
    mono, wall = _joined(log, "mono_ns")[order], _joined(log, "wall_ns")[order]
    boots = [
        _Boot(begin, end, _by_wall(int(wall[begin]), int(mono[begin]), wall_at_zero))
        for begin, end in pairwise([*_boots(mono, wall), len(mono)])
    ]
    t_ns = np.empty_like(mono)
    errors = []
    for boot in boots:
        own = [one for one in measured if one.nearest(boots) == boot.by_wall]
        placed, error = boot.place(mono[boot.begin : boot.end], own)
        t_ns[order[boot.begin : boot.end]] = placed
        errors.append(error)
    known = [error for error in errors if error is not None]
    greatest = max(known) if known and len(known) == len(errors) else None
    return t_ns[: len(log.events)], t_ns[len(log.events) :], greatest


def _joined(log: FileLog, name: str) -> Ints:
    """This time or number of all events, and after them of all steps."""
    values = (max(-INT64_MAX, min(getattr(event, name), INT64_MAX)) for event in log.events)
    return np.concatenate((np.fromiter(values, np.int64), log.steps.ints(name)))


def _boots(mono: Ints, wall: Ints) -> list[int]:
    """Where a file's events have to be cut: its machine was booted there, or another machine went on writing it: the
    monotonic clock fell, by more than a rank's event comes late, and the wall clock did not fall with it. (A wall clock
    that is set differs as well, and no monotonic clock falls then.)"""
    cuts, ahead = [0], wall - mono
    while True:
        begin = cuts[-1]
        fell = mono[begin:] < np.maximum.accumulate(mono[begin:]) - _LATE_NS
        found = np.flatnonzero(fell & (np.abs(ahead[begin:] - ahead[begin]) > _SAME_BOOT_NS))
        if not len(found):
            return cuts
        cuts.append(begin + int(found[0]))


def _by_wall(wall_ns: int, mono_ns: int, wall_at_zero: int) -> int:
    """What to add to a monotonic time, by wall clocks; 0 on the axis's own machine."""
    shift = wall_ns - mono_ns - wall_at_zero
    return 0 if abs(shift) < _SAME_CLOCK_NS else shift


def _raw_offsets(events: Sequence[Event]) -> dict[str, _Offset]:
    return {event.host: _Offset.measured(event) for event in events if event.kind == ClockOffset.kind}


def _supervisor_shifts(supervisors: Sequence[str], given: Mapping[str, FileLog], wall_at_zero: int) -> dict[str, int]:
    """Each supervisor file's own shift. Terms on other machines chain through hosts that both measured."""
    shifts: dict[str, int] = {}
    known: dict[str, int] = {}
    for name in supervisors:
        first = given[name].events[0]
        shift = _by_wall(first.wall_ns, first.mono_ns, wall_at_zero)
        own = _raw_offsets(given[name].events)
        chained = [known[host] - own[host].offset_ns for host in own if host in known]
        if chained and abs(median(chained) - shift) < 10 * _SAME_BOOT_NS:
            shift = 0 if shift == 0 else int(median(chained))
        shifts[name] = shift
        known.update({host: offset.offset_ns + shift for host, offset in own.items()})
    return shifts


def _offsets(
    supervisors: Sequence[str], given: Mapping[str, FileLog], shifts: Mapping[str, int]
) -> dict[str, list[_Offset]]:
    result: dict[str, list[_Offset]] = defaultdict(list)
    for name in supervisors:
        for event in given[name].events:
            if event.kind == ClockOffset.kind:
                result[event.host].append(_Offset.measured(event, shifts[name]))
    for measured in result.values():
        measured.sort(key=lambda offset: offset.at_ns)
    return result
