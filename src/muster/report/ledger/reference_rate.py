"""The reference rate R*: what the same ranks do when nothing is lost."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from muster.core.event_details.training import BaselineRate
from muster.core.events import Event
from muster.report.ledger.categories import MIN_CLEAN_STEPS, WARMUP_STEPS
from muster.report.ledger.file_log import Floats, Ints
from muster.report.ledger.lineage import Steps
from muster.report.ledger.time_axis import Timed

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

    def ideal_ns(self, tokens: Ints, world_size: Ints) -> Ints:
        """What steps of ``tokens`` take ``world_size`` ranks at the reference rate."""
        return np.rint(tokens / (self.tokens_per_rank_s * np.maximum(1, world_size)) * 1e9).astype(np.int64)


def clean_steps(steps: Steps) -> Ints:
    """Positions of steps of the final lineage beyond each attempt's warm-up, with tokens and a length."""
    beyond = steps.number >= WARMUP_STEPS
    return np.flatnonzero(steps.final & beyond & (steps.tokens > 0) & (steps.measured_ns > 0))


def typical_steps(steps: Steps) -> Ints:
    """What speed is the median of: clean steps; before there are any, all of the final lineage that took time."""
    clean = clean_steps(steps)
    return clean if len(clean) else np.flatnonzero(steps.final & (steps.measured_ns > 0))


def reference_rate(events: Sequence[Timed], steps: Steps, given: float | None) -> Reference | None:
    """R*: the one given by hand, else the one measured into the log, else the median of clean steps.

    The median's own steps ran with fault tolerance on, so it cannot show what fault tolerance itself costs;
    ``source`` names which it is. None: too few clean steps.
    """
    clean = clean_steps(steps)
    sizes, counts = np.unique(steps.world_size[clean], return_counts=True)
    world = int(sizes[counts >= MIN_CLEAN_STEPS].max(initial=0))
    of_world = clean[steps.world_size[clean] == world] if world else clean[:0]
    waits = np.maximum(0, steps.counts("data_wait_ns")[of_world] + steps.counts("stall_ns")[of_world])
    nets = np.maximum(1, steps.measured_ns[of_world] - waits) / steps.tokens[of_world]
    per_token = float(np.median(nets)) if world else 0.0
    spread = _spread(nets, per_token) if world else None
    slow = 1 + max(_SLOW_AT_LEAST, _SLOW_DEVIATIONS * spread if spread is not None else _SLOW_AT_LEAST)
    measured = _measured(events)
    if given is not None:
        world = world or int(steps.world_size.max(initial=1))
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
    if not world:
        return None
    return Reference(
        tokens_per_s=1e9 / per_token,
        world_size=world,
        source="median of this run's clean steps (fault tolerance on)",
        steps=len(nets),
        spread=spread,
        slow_beyond=slow,
    )


def fault_tolerance_overhead(events: Sequence[Timed], steps: Steps) -> float | None:
    """What fault tolerance costs a step, as a share of the measured reference rate: stalls for snapshots, and what
    their copies slow down. None: no reference was measured, or too few clean steps of its world follow.

    Saves and recoveries are not in it: they have categories of their own. Slightly negative is noise.
    """
    measured = _measured(events)
    if measured is None:
        return None
    detail = measured.read(BaselineRate)
    rate, first = detail.tokens_per_s, detail.first_step or 0
    clean = clean_steps(steps)
    without = (steps.step[clean] >= first) & (steps.step[clean] <= (measured.step or first))
    clean = clean[(steps.world_size[clean] == detail.world_size) & ~without]
    if len(clean) < MIN_CLEAN_STEPS or rate <= 0:
        return None
    waits = np.maximum(0, steps.counts("data_wait_ns")[clean])
    per_token = float(np.median((steps.measured_ns[clean] - waits) / steps.tokens[clean]))
    return 1 - 1e9 / per_token / rate if per_token > 0 else None


def _measured(events: Sequence[Timed]) -> Event | None:
    return next((timed.event for timed in reversed(events) if timed.event.kind == BaselineRate.kind), None)


def _spread(values: Floats, middle: float) -> float:
    return float(1.4826 * np.median(np.abs(values - middle)) / middle)
