"""Wall time and dollars of a run, in the middle and at the 90th percentile.

Three things spread: the step time model (its median error against published runs), failures (a Poisson count of them,
each costing its recovery), and prices and Spot rates that are known between bounds. They are combined as independent
shares of the middle value; p90 is 1.28 standard deviations above (log-normal).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from muster.catalog.offers import Option
from muster.plan.goodput import START_S, Goodput
from muster.plan.workload import Workload

#: Standard deviation of log(step time): about 1.5 times the median absolute error of the checked anchors.
STEP_SIGMA = 0.15
#: The same after ``calibrate`` on this model and machine.
CALIBRATED_SIGMA = 0.05
P90 = 1.2816
HOUR_S = 3600.0


@dataclass(frozen=True, kw_only=True)
class Cost:
    """Hours and dollars of the whole run."""

    hours_p50: float
    hours_p90: float
    usd_p50: float | None = None
    """None: the price is unknown."""
    usd_p90: float | None = None
    usd_per_step: float | None = None
    usd_per_million_tokens: float | None = None
    usd_per_hour: float | None = None
    cuts: int
    """Times that the mode's longest term ends before the run does, so that machines are asked for again."""


def cost(
    work: Workload,
    option: Option,
    num_nodes: int,
    step_s: float,
    good: Goodput,
    pessimistic: Goodput,
    *,
    sigma: float = STEP_SIGMA,
) -> Cost:
    """Totals of ``work.steps`` steps. ``pessimistic``: goodput at the upper bound of the interruption rate."""
    train_s = work.steps * step_s
    evaluation_s = _evaluation(work, step_s)
    busy_s = train_s + evaluation_s
    start_s = START_S if option.start_s is None else option.start_s
    middle_s = busy_s / good.share + start_s
    cuts = 0
    if option.mode.max_hours:
        cuts = max(0, math.ceil(middle_s / HOUR_S / option.mode.max_hours) - 1)
        middle_s += cuts * (start_s + good.restore_s)
    days = middle_s / 86400.0
    failures = good.interruptions_per_day * days
    per_failure = (1 / good.share - 1) * busy_s / failures if failures > 0 else 0.0
    failure_sigma = math.sqrt(failures) * per_failure * math.sqrt(4 / 3) / middle_s if failures > 0 else 0.0
    rate_sigma = math.log(good.share / pessimistic.share) / P90 if pessimistic.share > 0 else 0.0
    spread = math.exp(P90 * math.sqrt(sigma**2 + failure_sigma**2 + rate_sigma**2))
    hours = middle_s / HOUR_S
    if option.offer.usd_per_node_hour is None or option.price is None:
        return Cost(hours_p50=hours, hours_p90=hours * spread, cuts=cuts)
    usd_hour = option.offer.usd_per_node_hour * num_nodes
    usd = hours * usd_hour
    dearer = option.price.high / option.price.usd_per_gpu_hour if option.price.usd_per_gpu_hour else 1.0
    tokens = work.steps * work.tokens_per_step * work.fill
    price_sigma = math.log(dearer) / P90
    usd_spread = math.exp(P90 * math.sqrt(sigma**2 + failure_sigma**2 + rate_sigma**2 + price_sigma**2))
    return Cost(
        hours_p50=hours,
        hours_p90=hours * spread,
        usd_p50=usd,
        usd_p90=usd * usd_spread,
        usd_per_step=usd_hour * step_s / HOUR_S,
        usd_per_million_tokens=usd / tokens * 1e6,
        usd_per_hour=usd_hour,
        cuts=cuts,
    )


def _evaluation(work: Workload, step_s: float) -> float:
    """Forward passes over held-out sequences, as a share of a step's three."""
    if not work.evaluation_tokens:
        return 0.0
    times = 2 + (work.steps // work.evaluation_every if work.evaluation_every else 0)
    return times * step_s * work.evaluation_tokens / work.tokens_per_step / 3.0
