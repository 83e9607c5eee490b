"""A reader of the Trace Event Format, as strict as the format's description: what Perfetto and chrome://tracing open.

https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU ("Trace Event Format").
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

#: Phase -> keys that an event of it must have beside ``ph``, ``pid``.
NEEDS = {
    "X": ("name", "ts", "dur", "tid"),
    "B": ("name", "ts", "tid"),
    "E": ("ts", "tid"),
    "i": ("name", "ts"),
    "I": ("name", "ts"),
    "C": ("name", "ts", "args"),
    "M": ("name", "args"),
    "s": ("name", "ts", "tid", "id"),
    "t": ("name", "ts", "tid", "id"),
    "f": ("name", "ts", "tid", "id"),
    "b": ("name", "ts", "id"),
    "n": ("name", "ts", "id"),
    "e": ("name", "ts", "id"),
}


#: Microseconds since the epoch as a double; the writer rounds to nanoseconds.
ROUNDED_US = 0.5


@dataclass(frozen=True)
class ChromeTrace:
    names: list[str]
    """Of complete events, in the file's order."""


def read(path: Path) -> ChromeTrace:
    """Raises ValueError for what is not in the format."""
    found = json.loads(path.read_text(encoding="utf-8"), parse_constant=_no_number, object_pairs_hook=_no_double)
    events = found["traceEvents"] if isinstance(found, dict) else found
    if not isinstance(events, list) or not events:
        raise ValueError("traceEvents is no list of events")
    names = []
    slices: dict[tuple[object, object], list[tuple[float, float]]] = {}
    for number, event in enumerate(events):
        phase = event.get("ph")
        if phase not in NEEDS:
            raise ValueError(f"event {number}: unknown phase {phase!r}")
        if absent := [key for key in (*NEEDS[phase], "pid") if key not in event]:
            raise ValueError(f"event {number} ({phase}): no {', '.join(absent)}")
        for key in ("ts", "dur"):
            if key in event and (isinstance(event[key], bool) or not isinstance(event[key], int | float)):
                raise ValueError(f"event {number}: {key} is {event[key]!r}, microseconds were expected")
        if phase == "X":
            if event["dur"] < 0:
                raise ValueError(f"event {number} lasts {event['dur']} us")
            names.append(str(event["name"]))
            slices.setdefault((event["pid"], event["tid"]), []).append((float(event["ts"]), float(event["dur"])))
    for track, found_there in slices.items():
        _nest(track, found_there)
    return ChromeTrace(names=names)


def _nest(track: tuple[object, object], slices: list[tuple[float, float]]) -> None:
    """Slices of one thread lie in each other or apart: Perfetto drops what overlaps."""
    open_until: list[float] = []
    for begin, lasts in sorted(slices, key=lambda one: (one[0], -one[1])):
        while open_until and open_until[-1] <= begin + ROUNDED_US:
            open_until.pop()
        if open_until and begin + lasts > open_until[-1] + ROUNDED_US:
            raise ValueError(f"on {track} a slice from {begin} to {begin + lasts} us outlives the one around it")
        open_until.append(begin + lasts)


def _no_number(word: str) -> float:
    raise ValueError(f"{word} is not JSON")


def _no_double(pairs: list[tuple[str, object]]) -> dict[str, object]:
    result = dict(pairs)
    if len(result) != len(pairs):
        raise ValueError(f"a key comes twice among {[key for key, _ in pairs]}")
    return result
