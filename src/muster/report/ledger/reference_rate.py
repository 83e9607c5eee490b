"""The reference rate R*: what the same ranks do when nothing is lost."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from muster.core.event_details.training import BaselineRate
from muster.core.events import Event
from muster.report.ledger.lineage import Step
from muster.report.ledger.time_axis import Timed

#: Steps at the start of each attempt that are warm-up, never reference.
WARMUP_STEPS = 2
#: Fewer clean steps than this give no reference.
MIN_CLEAN_STEPS = 5
#: A step is slow beyond the median + 3 robust standard deviations (1.4826 MAD each), and 5 % at least.
_SLOW_DEVIATIONS = 3
_SLOW_AT_LEAST = 0.05


@dataclass(frozen=True, kw_only=True)
class Reference:
    """R*, per rank so that it holds for any number of ranks."""

    tokens_per_s: float
    """Of ``world_size`` ranks together."""
    world_size: int
    source: str
    steps: int
    spread: float | None
    """Robust standard deviation over the median; None: not known."""
    slow_beyond: float
    """A step slower than this multiple of its share counts as slow."""

    @property
    def tokens_per_rank_s(self) -> float:
        return self.tokens_per_s / self.world_size

    def ideal_ns(self, tokens: int, world_size: int) -> int:
        """What a step of ``tokens`` takes ``world_size`` ranks at the reference rate."""
        return round(tokens / (self.tokens_per_rank_s * max(1, world_size)) * 1e9)


def net_ns(step: Step) -> int:
    """The step's time without waits for data and stalls for snapshots."""
    waits = (step.detail.data_wait_ns or 0) + (step.detail.stall_ns or 0)
    return max(1, step.measured_ns - max(0, waits))


def clean_steps(steps: Sequence[Step]) -> list[Step]:
    """Steps of the final lineage beyond each attempt's warm-up, with tokens and a length. ``steps``: in time order."""
    seen: dict[int, int] = defaultdict(int)
    clean = []
    for step in steps:
        seen[step.attempt] += 1
        if step.final and seen[step.attempt] > WARMUP_STEPS and step.tokens > 0 and step.measured_ns > 0:
            clean.append(step)
    return clean


def typical_steps(steps: Sequence[Step]) -> list[Step]:
    """What speed is the median of: clean steps; before there are any, all of the final lineage that took time."""
    return clean_steps(steps) or [step for step in steps if step.final and step.measured_ns > 0]


def reference_rate(events: Sequence[Timed], steps: Sequence[Step], given: float | None) -> Reference | None:
    """R*: the one given by hand, else the one measured into the log, else the median of clean steps.

    The median's own steps ran with fault tolerance on, so it cannot show what fault tolerance itself costs;
    ``source`` names which it is. None: too few clean steps.
    """
    clean = clean_steps(steps)
    worlds: dict[int, list[float]] = defaultdict(list)
    for step in clean:
        worlds[step.world_size].append(net_ns(step) / step.tokens)
    enough = [world for world, result in worlds.items() if len(result) >= MIN_CLEAN_STEPS]
    world = max(enough) if enough else 0
    per_token = median(worlds[world]) if enough else 0.0
    spread = _spread(worlds[world], per_token) if enough else None
    slow = 1 + max(_SLOW_AT_LEAST, _SLOW_DEVIATIONS * spread if spread is not None else _SLOW_AT_LEAST)
    measured = _measured(events)
    if given is not None:
        world = world or max((step.world_size for step in steps), default=1)
        return Reference(tokens_per_s=given, world_size=world, source="given", steps=0, spread=None, slow_beyond=slow)
    if measured is not None:
        detail = measured.read(BaselineRate)
        return Reference(
            tokens_per_s=detail.tokens_per_s,
            world_size=detail.world_size,
            source="measured with fault tolerance off",
            steps=detail.steps,
            spread=detail.spread,
            slow_beyond=slow,
        )
    if not enough:
        return None
    return Reference(
        tokens_per_s=1e9 / per_token,
        world_size=world,
        source="median of this run's clean steps (fault tolerance on)",
        steps=len(worlds[world]),
        spread=spread,
        slow_beyond=slow,
    )


def fault_tolerance_overhead(events: Sequence[Timed], steps: Sequence[Step]) -> float | None:
    """What fault tolerance costs a step, as a share of the measured reference rate: stalls for snapshots, and what
    their copies slow down. None: no reference was measured, or too few clean steps of its world follow.

    Saves and recoveries are not in it: they have categories of their own. Slightly negative is noise.
    """
    measured = _measured(events)
    if measured is None:
        return None
    detail = measured.read(BaselineRate)
    rate, first = detail.tokens_per_s, detail.first_step or 0
    without = range(first, (measured.step or first) + 1)
    result = [
        (step.measured_ns - max(0, step.detail.data_wait_ns or 0)) / step.tokens
        for step in clean_steps(steps)
        if step.world_size == detail.world_size and step.step not in without
    ]
    if len(result) < MIN_CLEAN_STEPS or rate <= 0 or median(result) <= 0:
        return None
    return 1 - 1e9 / median(result) / rate


def _measured(events: Sequence[Timed]) -> Event | None:
    """The newest ``baseline_rate`` event."""
    return next((timed.event for timed in reversed(events) if timed.event.kind == BaselineRate.kind), None)


def _spread(values: Sequence[float], middle: float) -> float:
    return 1.4826 * median(abs(value - middle) for value in values) / middle
