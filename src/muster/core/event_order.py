"""Events of several writers in the order in which they happened, whatever became of somebody's wall clock.

Wall clocks order them well enough (to milliseconds, where machines keep theirs together) until one is stepped: by hand,
or by a time service that comes late. A stretch of a file that one process wrote goes by its monotonic clock from its
first event on; where its wall clock was wrong already then, the offset that the supervisor measured says by how much.
What is off by less than ``BENT_NS`` stays as it was written.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from muster.core.events import Event

#: More than machines that keep their clocks together ever differ by; less than a step that anybody would notice.
BENT_NS = 1_000_000_000
#: The first event of a new process in a file that another one began, perhaps before a reboot.
_BEGINS = ("agent.started", "supervisor.started")


def merge_by_monotonic_clock(files: Mapping[str, Sequence[Event]]) -> list[tuple[int, str, Event]]:
    """(wall time by a clock that nobody steps, file, event), in order; within an instant by file, then as written."""
    stretches = [(name, stretch) for name in sorted(files) for stretch in _stretches(files[name])]
    result: list[tuple[int, str, Event]] = []
    anchors: dict[str, list[int]] = {}
    last_ns: int | None = None
    for name, stretch in sorted((each for each in stretches if _is_supervisor(each[0])), key=_term):
        anchor = _anchor(stretch[0])
        if last_ns is not None and stretch[0].mono_ns + anchor < last_ns - BENT_NS:
            anchor = last_ns - stretch[0].mono_ns  # terms follow each other: this one's clock went back before it began
        result += _placed(name, stretch, anchor)
        last_ns = max(at_ns for at_ns, _, _ in result)
        for event in stretch:
            if event.kind == "clock.offset":
                anchors.setdefault(event.host, []).append(anchor + int(event.detail["offset_ns"]))
    for name, stretch in (each for each in stretches if not _is_supervisor(each[0])):
        anchor = _anchor(stretch[0])
        measured = min(anchors.get(stretch[0].host, ()), key=lambda each: abs(each - anchor), default=anchor)
        result += _placed(name, stretch, anchor if abs(anchor - measured) <= BENT_NS else measured)
    return sorted(result, key=lambda each: (each[0], each[1], each[2].seq))


def _stretches(events: Sequence[Event]) -> list[list[Event]]:
    result: list[list[Event]] = []
    for event in events:
        if not result or event.kind in _BEGINS:
            result.append([])
        result[-1].append(event)
    return result


def _placed(name: str, stretch: Sequence[Event], anchor: int) -> list[tuple[int, str, Event]]:
    """By its own wall time where that goes with the monotonic clock, else by the latter."""
    return [
        (event.wall_ns if abs(_anchor(event) - anchor) <= BENT_NS else event.mono_ns + anchor, name, event)
        for event in stretch
    ]


def _anchor(event: Event) -> int:
    """What its wall clock was ahead of its monotonic clock."""
    return event.wall_ns - event.mono_ns


def _is_supervisor(name: str) -> bool:
    return name.startswith("supervisor.")


def _term(each: tuple[str, Sequence[Event]]) -> tuple[int, int]:
    term = each[0].split(".")[1]
    return (int(term) if term.isdigit() else 0), each[1][0].seq
