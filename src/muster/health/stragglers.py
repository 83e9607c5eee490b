"""Which rank makes the others wait, step after step, and why; from each rank's own figures. Pure.

The ranks have found by then that one of them comes last too often for chance (``train.distributed.last_arrivals``:
less than one false alarm in 10,000 steps at any noise). It is named if it came last in more than half of at
least 20 steps, and if its lag matters: the median of how much earlier the others came must exceed 3 % of the step by
three of its standard errors (1.2533 s / sqrt(n) for a median of normal noise), and three robust standard deviations of
the others' own medians: if many ranks differ, none is a straggler. Its own clock must show half of that lag at
least: until then too few of the steps are slow ones to say why.

The cause is where its time to the sums exceeds the others' most. Work that is uneven (more tokens than the others, step
after step) is the batch's fault and never a host's.

Where other programs take the processors from all ranks, the lag of one of them is no fault of its host: a lag below
three times what the others wait for a processor is not assessed (healthy runs next to 18 ready threads on two
processors: one rank last in 20 of 20 steps by 138 ms, while the others waited 374 ms).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from statistics import median

from muster.core.event_details.training import RankPace

FEWEST_STEPS = 20
LEAST_SHARE = 0.03
#: A lag below this is not worth a word: it is what a thread of the process takes now and then.
LEAST_US = 1000
_ROBUST, _MEDIAN_ERROR = 1.4826, 1.2533
_DEVIATIONS, _ERRORS = 3, 3
NOT_ASSESSED = "not assessed"
#: What the others' threads wait for a processor, as share of a step, from which processors are shared; and how many
#: times that a lag must be.
_SHARED, _BEYOND_SHARED = 0.05, 3
#: Fewer others than this have no deviation among them.
_FEWEST_OTHERS = 3
#: More tokens cost at least in proportion; attention's part of them grows with their square.
_TOKENS_COST = 1.25


class Cause(StrEnum):
    """What makes a rank late."""

    LOADER = "loader"  # it waits for its batch
    SNAPSHOT = "snapshot"  # it is held by a snapshot or save
    HOST = "host"  # its thread waits for a processor: other load, a quota, a stolen or stopped processor
    PROCESSOR = "processor"  # the same work takes its processor longer
    TOKENS = "tokens"  # it has more work

    @property
    def blames_host(self) -> bool:
        return self is not Cause.TOKENS


_WORDS = {
    Cause.LOADER: "it waits for its batch",
    Cause.SNAPSHOT: "snapshots hold it",
    Cause.HOST: "its thread waits for a processor",
    Cause.PROCESSOR: "the same work takes its processor longer",
}


@dataclass(frozen=True, kw_only=True)
class Straggler:
    """The rank that the others wait for."""

    rank: int
    cause: Cause
    lag_us: float
    """What it costs a step."""
    step_us: float
    last: int
    steps: int
    evidence: str
    """One sentence with values."""


@dataclass(frozen=True, kw_only=True)
class NotAssessed:
    """One rank comes last, and noise hides why."""

    reason: str


def find_straggler(paces: Sequence[RankPace]) -> Straggler | NotAssessed | None:
    """The one rank that is slow; None: no rank is, or too little is known. ``paces``: one of each rank."""
    if len(paces) < 2:
        return None
    slow = max(paces, key=lambda one: (one.last, -one.ahead_us))
    others = [one for one in paces if one is not slow]
    if slow.steps < FEWEST_STEPS or 2 * slow.last <= slow.steps:
        return None
    lag = median(one.ahead_us for one in others) - slow.ahead_us
    step = median(one.late_us + one.wait_us for one in paces)
    limit = max(LEAST_US, LEAST_SHARE * step + _ERRORS * _error(others), _DEVIATIONS * _deviation(others))
    if lag <= limit or slow.late_us - median(one.late_us for one in others) < lag / 2:
        return None
    cause, excess = _cause(slow, others, lag, limit)
    shared = median(one.gap_us for one in others)
    if cause is not Cause.TOKENS and shared > _SHARED * step and lag < _BEYOND_SHARED * shared:
        waits = f"the other ranks' threads wait {shared / 1000:,.1f} ms of a step of {step / 1000:,.1f} ms for one"
        return NotAssessed(reason=f"stragglers {NOT_ASSESSED}: processors shared ({waits})")
    compared = f"{slow.tokens:,} tokens a step, the others {median(one.tokens for one in others):,.0f}"
    why = compared if cause is Cause.TOKENS else f"{_WORDS[cause]} ({excess / 1000:,.1f} ms more than theirs)"
    late = f"rank {slow.rank} came last in {slow.last} of {slow.steps} steps, {lag / 1000:,.1f} ms after the others"
    return Straggler(
        rank=slow.rank,
        cause=cause,
        lag_us=lag,
        step_us=step,
        last=slow.last,
        steps=slow.steps,
        evidence=f"{late} ({lag / step:.0%} of a step): {why}",
    )


def usd_per_day(lag_us: float, step_us: float, *, hosts: int, usd_per_host_hour: float | None) -> float | None:
    """What all hosts cost while they wait for it; None: no price is known."""
    if usd_per_host_hour is None or step_us <= 0:
        return None
    return lag_us / step_us * hosts * usd_per_host_hour * 24


def _deviation(others: Sequence[RankPace]) -> float:
    """Robust standard deviation of the others' medians."""
    if len(others) < _FEWEST_OTHERS:
        return 0.0
    middle = median(one.ahead_us for one in others)
    return _ROBUST * median(abs(one.ahead_us - middle) for one in others)


def _error(others: Sequence[RankPace]) -> float:
    """Standard error of one of their medians, by their noise from step to step."""
    return median(_MEDIAN_ERROR * one.ahead_spread_us / math.sqrt(max(1, one.steps)) for one in others)


def _cause(slow: RankPace, others: Sequence[RankPace], lag: float, limit: float) -> tuple[Cause, float]:
    """Where it loses the time, and how much of it there."""
    usual = median(one.tokens for one in others)
    if usual and slow.tokens > usual:
        explained = _TOKENS_COST * (slow.tokens / usual - 1) * median(_compute(one) for one in others)
        if lag - explained <= limit:
            return Cause.TOKENS, explained
    excess = {
        Cause.LOADER: slow.data_us - median(one.data_us for one in others),
        Cause.SNAPSHOT: slow.stall_us - median(one.stall_us for one in others),
        Cause.HOST: slow.gap_us - median(one.gap_us for one in others),
        Cause.PROCESSOR: _compute(slow) - median(_compute(one) for one in others),
    }
    cause = max(excess, key=lambda one: excess[one])
    return cause, excess[cause]


def _compute(one: RankPace) -> int:
    return max(0, one.late_us - one.data_us - one.stall_us - one.gap_us)
