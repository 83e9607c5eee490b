"""Where the seconds from a fault to the next new step go, by the run's own event log. For ``recovery.py --stages``.

Every stage ends with an event; its time runs from the end of the stage before. Hosts of one machine share the monotonic
clock, so the times of different writers can be subtracted.
"""

from __future__ import annotations

import re
import statistics
from collections.abc import Iterable, Sequence
from pathlib import Path

from muster.core.events import Event

_LOG = re.compile(r"rank-(\d+)\.a(\d+)\.log")
_DONE = re.compile(r"Finished (tracing|jaxpr to MLIR module conversion|XLA compilation)\b.* in ([\d.]+) sec")
#: Stages in their order, and what each is the time until.
STAGES = {
    "notice": "the supervisor calls it an incident",
    "decide": "the decision is on the disk and the ranks are told to end",
    "collect": "every host has answered, and the next attempt is written down",
    "place": "each of its ranks has a process",
    "join": "they have formed their groups and built the model",
    "restore": "they have the state",
    "prepare": "they begin their first step",
    "redo": "they are where the fault met them (0: no applied step is redone)",
    "step": "the first new step has ended",
}


def stages(events: Iterable[Event], *, began_ns: int, before: int) -> dict[str, float]:
    """Seconds of each of ``STAGES`` of one fault at ``began_ns``, by monotonic time, after the step ``before``.

    A stage whose event is not there (a retained rank is not placed) is missing, and part of the next one.
    """
    later = sorted((event for event in events if event.mono_ns > began_ns), key=lambda event: event.mono_ns)
    first = min(event.mono_ns for event in later if event.kind == "step" and (event.step or 0) > before)
    later = [event for event in later if event.mono_ns <= first]
    attempt = max((event.attempt for event in later if event.kind == "attempt.started"), default=-1)
    ends = {
        "notice": _first(later, "incident.detected"),
        "decide": _first(later, "attempt.ended"),
        "collect": _last(later, "attempt.started"),
        "place": _last(later, "rank.started", attempt),
        "join": _last(later, "phase.changed", attempt, "restore"),
        "restore": _last(later, "checkpoint.restored", attempt),
        "prepare": _last(later, "phase.changed", attempt, "warmup"),
        "redo": max((event.mono_ns for event in later if event.kind == "step" and event.step == before), default=None),
        "step": first,
    }
    found, since = {}, began_ns
    for name, end in ends.items():
        if end is not None and end >= since:
            found[name] = (end - since) / 1e9
            since = end
    return found


def compiling(logs: Path) -> dict[str, float]:
    """Seconds that each rank of the newest attempt spent on tracing and lowering, and on compiling or on taking what is
    there from the cache, by JAX's own log (``JAX_LOG_COMPILES=1``); empty without it. Part of the first step."""
    found: dict[str, float] = {}
    files = [(int(match[2]), match[1], path) for path in logs.glob("rank-*.log") if (match := _LOG.match(path.name))]
    newest = max((attempt for attempt, _, _ in files), default=None)
    for attempt, rank, path in sorted(files):
        for what, seconds in _DONE.findall(path.read_text(errors="replace")) if attempt == newest else ():
            stage = f"rank {rank} {'compiles' if what == 'XLA compilation' else 'traces'}"
            found[stage] = found.get(stage, 0.0) + float(seconds)
    return found


def _first(events: Sequence[Event], kind: str) -> int | None:
    return next((event.mono_ns for event in events if event.kind == kind), None)


def _last(events: Sequence[Event], kind: str, attempt: int | None = None, phase: str | None = None) -> int | None:
    """When the last rank (or host) of ``attempt`` said so."""
    ends = [
        event.mono_ns
        for event in events
        if event.kind == kind and attempt in (None, event.attempt) and phase in (None, event.phase)
    ]
    return max(ends, default=None)


def medians(trials: Sequence[dict[str, float]]) -> dict[str, float]:
    """Of every stage that any of the trials has; one without it counts as 0."""
    present = [name for name in STAGES if any(name in trial for trial in trials)]
    return {name: statistics.median(trial.get(name, 0.0) for trial in trials) for name in present}
