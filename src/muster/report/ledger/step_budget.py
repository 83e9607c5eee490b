"""Where a step's time goes, compared with the plan, and what to change next. Pure.

The parts are rank 0's, measured each by a clock of its own around what it names, means over clean steps; ``rest`` is
what they leave of the measured step, and says how well they close (negative: they overlap). Time inside collectives
includes waits for late ranks: where a straggler was named, that part of it is its own lever.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from muster.core.event_details.run import RunSubmitted
from muster.core.event_details.training import StragglerNamed
from muster.core.typed_json import child
from muster.report.ledger.file_log import UNKNOWN
from muster.report.ledger.lineage import Steps
from muster.report.ledger.reference_rate import typical_steps
from muster.report.ledger.time_axis import Timed

#: Part -> what the plan calls it (``plan.step_time``). It foresees no waits for data or for a processor.
PLANNED: Mapping[str, tuple[str, ...]] = {
    "compute": ("matrices", "attention", "memory traffic", "padding", "optimizer"),
    "communication": ("sharding", "tensor parallel", "replicas", "pipeline bubble", "slowest rank"),
    "checkpoint": ("snapshots",),
}
#: Part -> how to make it smaller.
ADVICE: Mapping[str, str] = {
    "straggler": "replace the host that the others wait for, or fix what makes it slow",
    "communication": "larger micro-batches or fewer shards: sums less often, over fewer links (muster plan compares)",
    "data_wait": "the loop waits for its batch: faster storage for the prepared data, or fewer ranks on a host",
    "host_gap": "the loop's thread waits for a processor: fewer ranks or other programs on the host",
    "checkpoint": "snapshots less often: checkpoint.snapshot_every_steps",
}
#: A lever that is worth less is not named.
LEAST_SHARE = 0.01


@dataclass(frozen=True, kw_only=True)
class Lever:
    """Something to change, and what it is worth at most: all of its time."""

    part: str
    worth_s: float
    """Of each step."""
    worth_share: float
    usd_per_day: float | None
    advice: str


@dataclass(frozen=True, kw_only=True)
class StepBudget:
    """The mean step, in seconds."""

    steps: int
    step_s: float
    parts_s: Mapping[str, float]
    """compute, communication, data_wait, host_gap, checkpoint and rest: together ``step_s``."""
    planned_step_s: float | None
    planned_s: Mapping[str, float]
    """The same parts as the plan has them; empty: no plan was used."""
    levers: Sequence[Lever]
    """The most valuable first."""


def step_budget(events: Sequence[Timed], steps: Steps, usd_per_hour: float | None) -> StepBudget | None:
    """Of the newest attempt that was measured; None: none was (on GPUs ranks do not know). ``usd_per_hour``: of all
    hosts, None where one's price is unknown."""
    measured = typical_steps(steps)
    measured = measured[steps.counts("comm_ns", UNKNOWN)[measured] != UNKNOWN]
    if not len(measured):
        return None
    attempt = int(steps.attempt[measured[-1]])
    measured = measured[steps.attempt[measured] == attempt]

    def mean_s(name: str) -> float:
        return float(steps.counts(name)[measured].mean()) / 1e9

    step_s = mean_s("step_ns")
    if step_s <= 0:
        return None
    parts = {
        "compute": mean_s("compute_ns"),
        "communication": mean_s("comm_ns"),
        "data_wait": mean_s("data_wait_ns"),
        "host_gap": mean_s("host_gap_ns"),
        "checkpoint": mean_s("stall_ns"),
    }
    lag_s = _lag_s(events, attempt)
    items = _planned(events)
    return StepBudget(
        steps=len(measured),
        step_s=step_s,
        parts_s={**parts, "rest": step_s - sum(parts.values())},
        planned_step_s=sum(items.values()) if items else None,
        planned_s={part: sum(items.get(name, 0.0) for name in names) for part, names in PLANNED.items()}
        if items
        else {},
        levers=levers(parts, step_s, lag_s=lag_s, usd_per_hour=usd_per_hour),
    )


def levers(parts_s: Mapping[str, float], step_s: float, *, lag_s: float, usd_per_hour: float | None) -> list[Lever]:
    """What could be saved, the most valuable first. ``lag_s``: of a straggler, 0.0 where none was named."""
    if step_s <= 0:
        return []
    lag_s = min(lag_s, parts_s.get("communication", 0.0))
    worth = {part: parts_s.get(part, 0.0) for part in ADVICE}
    worth["communication"] -= lag_s
    worth["straggler"] = lag_s
    found = [
        Lever(
            part=part,
            worth_s=seconds,
            worth_share=seconds / step_s,
            usd_per_day=None if usd_per_hour is None else seconds / step_s * usd_per_hour * 24,
            advice=ADVICE[part],
        )
        for part, seconds in worth.items()
        if seconds >= LEAST_SHARE * step_s
    ]
    return sorted(found, key=lambda lever: -lever.worth_s)


def _lag_s(events: Sequence[Timed], attempt: int) -> float:
    """The greatest lag of a straggler that was named in this attempt, as far as rank 0 waits for it."""
    named = [timed.event for timed in events if timed.event.kind == StragglerNamed.kind]
    others = [event.read(StragglerNamed) for event in named if event.attempt == attempt and event.rank != 0]
    return max((one.lag_ns for one in others if one.cause != "tokens"), default=0) / 1e9


def _planned(events: Sequence[Timed]) -> dict[str, float]:
    """Item -> seconds, of the plan that the run was started with."""
    for timed in reversed(events):
        if timed.event.kind == RunSubmitted.kind:
            found = child(timed.event.read(RunSubmitted).plan, "step_s_by_item")
            return {name: float(value) for name, value in found.items() if isinstance(value, int | float)}
    return {}
