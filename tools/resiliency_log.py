"""Goodput of a log of AI-Hypercomputer/resiliency by its own calculator's definition, and by ours:
``python tools/resiliency_log.py LOG --step-time S``.

The log: one JSON object a line; ``job_started``, ``job_terminated`` with ``node_rank``;
``checkpoint_loaded``, ``checkpoint_saved`` with ``step``; wall time without a zone. Definition and weak points
of its calculator: docs/explanation/goodput.md.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path
from statistics import median

from muster.core.errors import UsageError
from muster.core.typed_json import JsonObject

#: Events of a start wave lie within seconds of rank 0's (at most 3.3 s before it in the 112-node log).
_WAVE_S = 60.0

_ORDER = {
    "user_scheduled": 0,
    "job_started": 1,
    "checkpoint_loaded": 2,
    "checkpoint_saved": 3,
    "job_terminated": 4,
    "user_terminated": 5,
}


@dataclass(frozen=True)
class Entry:
    """One line of the log; ``at_s`` since its first event."""

    at_s: float
    kind: str
    step: int | None
    node: int | None


def parse(lines: Sequence[str]) -> list[Entry]:
    """Entries in time order. A torn last line is left out.

    Raises:
        UsageError: a line is not an event of such a log, or there are no events.
    """
    result: list[tuple[datetime, Entry]] = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            event = json.loads(line)
            at = datetime.fromisoformat(event["timestamp"])
            step, node = event.get("step"), event.get("node_rank")
            entry = Entry(
                at_s=0.0,
                kind=str(event["event_type"]),
                step=None if step is None else int(step),
                node=None if node is None else int(node),
            )
            at = at if at.tzinfo else at.replace(tzinfo=UTC)
        except (ValueError, KeyError, TypeError, OverflowError, RecursionError) as error:
            if number == len(lines):
                break
            raise UsageError(f"line {number} is not an event of a google-resiliency log: {line[:80]!r}") from error
        result.append((at, entry))
    if not result:
        raise UsageError("the log holds no events")
    result.sort(key=lambda item: (item[0], _ORDER.get(item[1].kind, 9)))
    first = result[0][0]
    return [Entry((at - first).total_seconds(), e.kind, e.step, e.node) for at, e in result]


@dataclass(frozen=True, kw_only=True)
class Google:
    """Their definition, and what it was applied to."""

    definition: str = "(max_saved_step - min_loaded_step) x step time / (last event - first event)"
    step_time_s: float
    steps: int
    min_loaded_step: int
    max_saved_step: int
    runtime_s: float
    productive_s: float
    events: int
    events_counted: int
    rank_0_alone: float | None


@dataclass(frozen=True, kw_only=True)
class ByNodes:
    """Wall time by what became of it, and goodput with missing nodes charged."""

    active: float
    time: float
    step_s: float
    step_source: str
    nodes: int
    nodes_seen: Sequence[int]
    loads: int
    loads_without_a_save: int
    wall_s: Mapping[str, float]
    missing_nodes_share: float


@dataclass(frozen=True, kw_only=True)
class Unknown:
    """No figure of ours can be made of this log."""

    step_s: None = None
    why_unknown: str


@dataclass(frozen=True, kw_only=True)
class Measured:
    """Both figures of one log. In the order of the JSON."""

    schema: int = 1
    kind: str = "google-resiliency"
    google_goodput: float
    google: Google
    goodput: ByNodes | Unknown
    differences: Sequence[str]

    def to_json(self) -> JsonObject:
        """In plain JSON types."""
        return asdict(self)


def measure(entries: Sequence[Entry], step_time_s: float) -> Measured:
    """Their figure, ours, and why they differ.

    Raises:
        UsageError: the step time is not positive, or so long that goodput would exceed 100 %.
    """
    if not step_time_s > 0:
        raise UsageError(f"step time must be above 0 s, got {step_time_s}")
    loaded = [entry.step for entry in entries if entry.kind == "checkpoint_loaded" and entry.step is not None]
    saved = [entry.step for entry in entries if entry.kind == "checkpoint_saved" and entry.step is not None]
    if not loaded or not saved:
        raise UsageError("the log holds no loaded or no saved checkpoint: its calculator has nothing to count")
    steps = max(saved) - min(loaded)
    runtime = entries[-1].at_s - entries[0].at_s
    google = steps * step_time_s / runtime if runtime > 0 and steps > 0 else 0.0
    if google > 1:
        raise UsageError(
            f"a step time of {step_time_s:g} s is impossible: {steps} steps of it are {steps * step_time_s:,.0f} s, "
            f"more than the log's {runtime:,.0f} s ({google:.1%})",
            hint=f"steps that lasted so long cannot have been taken; at most {runtime / steps:.2f} s fit",
        )
    ours = _ours(entries, runtime)
    return Measured(
        google_goodput=google,
        google=Google(
            step_time_s=step_time_s,
            steps=steps,
            min_loaded_step=min(loaded),
            max_saved_step=max(saved),
            runtime_s=runtime,
            productive_s=steps * step_time_s,
            events=len(entries),
            events_counted=_counted(entries),
            rank_0_alone=_rank_0(entries, steps * step_time_s),
        ),
        goodput=ours,
        differences=[ours.why_unknown] if isinstance(ours, Unknown) else _reasons(ours, google, step_time_s, entries),
    )


def _counted(entries: Sequence[Entry]) -> int:
    """How many events its calculator keeps: of neighbouring starts (or ends) one, plus a stand-in for the schedule."""
    repeats = sum(
        left.kind == right.kind and right.kind in ("job_started", "job_terminated") for left, right in pairwise(entries)
    )
    return len(entries) - repeats + (entries[0].kind != "user_scheduled")


def _rank_0(entries: Sequence[Entry], productive_s: float) -> float | None:
    """The same definition when the other nodes' events are left out: its clock then stops earlier."""
    times = [entry.at_s for entry in entries if entry.node in (0, None)]
    return productive_s / (times[-1] - times[0]) if len(times) > 1 and times[-1] > times[0] else None


@dataclass(frozen=True)
class _Segment:
    """From one load to the next start: what was saved, and by how many nodes."""

    nodes: int
    start_s: float
    loaded: Entry
    saves: list[Entry]
    until_s: float


def _segments(entries: Sequence[Entry]) -> list[_Segment]:
    result = []
    loads = [position for position, entry in enumerate(entries) if entry.kind == "checkpoint_loaded"]
    end = entries[-1].at_s
    for number, position in enumerate(loads):
        after = loads[number + 1] if number + 1 < len(loads) else len(entries)
        starts = [e for e in entries[(loads[number - 1] if number else 0) : position] if e.kind == "job_started"]
        last = max((e.at_s for e in starts if e.node == 0), default=starts[-1].at_s if starts else 0.0)
        nodes = {e.node for e in starts if e.at_s > last - _WAVE_S}
        following = [e for e in entries[position:after] if e.kind == "checkpoint_saved"]
        restart = next((e.at_s for e in entries[position:after] if e.kind == "job_started"), end)
        result.append(
            _Segment(nodes=len(nodes), start_s=last, loaded=entries[position], saves=following, until_s=restart)
        )
    return result


def _ours(entries: Sequence[Entry], runtime: float) -> ByNodes | Unknown:
    """By weak scaling: work per node."""
    segments = _segments(entries)
    steady = [
        (right.at_s - left.at_s) / (right.step - left.step)
        for segment in segments
        for left, right in pairwise(segment.saves)
        if right.step is not None and left.step is not None and right.step > left.step
    ]
    if not steady:
        return Unknown(why_unknown="no two saves follow each other without a restart")
    step_s = median(steady)
    nodes = max(segment.nodes for segment in segments)
    spent = dict.fromkeys(("productive", "warmup", "restart", "redone", "other"), 0.0)
    node_s = 0.0
    lineage = max((s.saves[-1].step or 0) for s in segments if s.saves)
    for segment, following in zip(segments, [*segments[1:], None], strict=True):
        limit = min([lineage, *([following.loaded.step or 0] if following else [])])
        before = segment.loaded
        for save in segment.saves:
            taken = save.at_s - before.at_s
            gained = max(0, min(save.step or 0, limit) - (before.step or 0))
            productive = min(taken, gained * step_s)
            spent["productive"] += productive
            spent["warmup" if before is segment.loaded else "other"] += taken - productive
            node_s += productive * segment.nodes
            before = save
        spent["redone"] += max(0.0, segment.until_s - before.at_s)
    spent["restart"] = runtime - sum(spent.values())
    return ByNodes(
        active=node_s / (nodes * runtime),
        time=spent["productive"] / runtime,
        step_s=step_s,
        step_source=f"median of {len(steady)} intervals between saves without a restart (fault tolerance on)",
        nodes=nodes,
        nodes_seen=sorted({segment.nodes for segment in segments}, reverse=True),
        loads=len(segments),
        loads_without_a_save=sum(not segment.saves for segment in segments),
        wall_s=spent,
        missing_nodes_share=sum(
            (nodes - s.nodes) / nodes * sum(b.at_s - a.at_s for a, b in pairwise([s.loaded, *s.saves]))
            for s in segments
        )
        / runtime,
    )


def _reasons(ours: ByNodes, google: float, step_time_s: float, entries: Sequence[Entry]) -> list[str]:
    return [
        f"its step time is typed in ({step_time_s:g} s); the log's own steady step is {ours.step_s:.2f} s, "
        f"by which its definition gives {google * ours.step_s / step_time_s:.2%}",
        f"it counts steps: with {min(ours.nodes_seen)} to {ours.nodes} nodes a step of this weakly scaled job "
        f"does less work, which it credits in full; counted by nodes the figure is {ours.active:.2%} of "
        f"{ours.nodes} nodes",
        f"it names no losses; the wall time was spent on {_listed(ours.wall_s)}",
        f"it looks at {_counted(entries)} of {len(entries):,} events (of neighbouring starts and ends one each): when "
        "which node started or ended changes nothing in it",
        "it starts at the first job_started (no user_scheduled in such logs) and ends at the last event: queueing "
        "and a dead tail are free; the log does not hold what our figure would charge for them either",
    ]


def _listed(spent: Mapping[str, float]) -> str:
    total = sum(spent.values())
    return ", ".join(f"{name} {seconds / total:.1%}" for name, seconds in spent.items())


def main() -> None:
    parser = argparse.ArgumentParser(description="Goodput of a google-resiliency log, as JSON.")
    parser.add_argument("log", type=Path)
    parser.add_argument("--step-time", type=float, required=True, help="seconds a step takes: the log does not hold it")
    given = parser.parse_args()
    lines = given.log.read_text(encoding="utf-8", errors="replace").splitlines()
    print(json.dumps(measure(parse(lines), given.step_time).to_json(), indent=1))


if __name__ == "__main__":
    main()
