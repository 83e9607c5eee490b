"""Events of several writers in the order in which they happened, even where a wall clock was stepped.

Synchronised wall clocks order them to milliseconds, until one is stepped: by hand, or by a time service that starts
late. The part of a file that one process wrote is placed by its monotonic clock from its first event on; where its wall
clock was wrong from the start, by the offset that the supervisor measured. Differences below ``BENT_NS`` are kept.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from muster.core.event_details.hosts import AgentStarted, ClockOffset
from muster.core.event_details.run import SupervisorStarted
from muster.core.event_log.names import LogName
from muster.core.events import Event

#: More than synchronised clocks differ by, less than a step that matters.
BENT_NS = 1_000_000_000
#: First event of a new process in a file that another process began, perhaps before a reboot.
_BEGINS = (AgentStarted.kind, SupervisorStarted.kind)


def merge_by_monotonic_clock(files: Mapping[str, Sequence[Event]]) -> list[tuple[int, str, Event]]:
    """(wall time as if no clock had been stepped, file, event), in order; at equal times by file, then as written."""
    stretches = [(name, stretch) for name in sorted(files) for stretch in _stretches(files[name])]
    result: list[tuple[int, str, Event]] = []
    anchors: dict[str, list[int]] = {}
    last_ns: int | None = None
    for name, stretch in sorted((pair for pair in stretches if _is_supervisor(pair[0])), key=_term):
        anchor = _anchor(stretch[0])
        if last_ns is not None and stretch[0].mono_ns + anchor < last_ns - BENT_NS:
            anchor = last_ns - stretch[0].mono_ns  # terms follow each other, so this clock was set back
        result += _placed(name, stretch, anchor)
        last_ns = max(at_ns for at_ns, _, _ in result)
        for event in stretch:
            if event.kind == ClockOffset.kind:
                anchors.setdefault(event.host, []).append(anchor + event.read(ClockOffset).offset_ns)
    for name, stretch in (pair for pair in stretches if not _is_supervisor(pair[0])):
        anchor = _anchor(stretch[0])
        measured = min(anchors.get(stretch[0].host, ()), key=lambda offset: abs(offset - anchor), default=anchor)
        result += _placed(name, stretch, anchor if abs(anchor - measured) <= BENT_NS else measured)
    return sorted(result, key=lambda row: (row[0], row[1], row[2].seq))


def _stretches(events: Sequence[Event]) -> list[list[Event]]:
    result: list[list[Event]] = []
    for event in events:
        if not result or event.kind in _BEGINS:
            result.append([])
        result[-1].append(event)
    return result


def _placed(name: str, stretch: Sequence[Event], anchor: int) -> list[tuple[int, str, Event]]:
    """By its own wall time where that agrees with the monotonic clock, else by the monotonic clock."""
    return [
        (event.wall_ns if abs(_anchor(event) - anchor) <= BENT_NS else event.mono_ns + anchor, name, event)
        for event in stretch
    ]


def _anchor(event: Event) -> int:
    """Wall clock minus monotonic clock."""
    return event.wall_ns - event.mono_ns


def _is_supervisor(name: str) -> bool:
    found = LogName.of(name)
    return found is not None and found.writer == "supervisor"


def _term(pair: tuple[str, Sequence[Event]]) -> tuple[int, int, int]:
    name, stretch = pair
    found = LogName.of(name)
    return (found.attempt, found.part, stretch[0].seq) if found is not None else (0, 0, stretch[0].seq)
