"""How often to save: interval formulas, shared by the plan, the agent and the simulator. No torch.

Symbols, all in seconds: ``t`` work between saves, ``C`` stall per save, ``M`` mean time between
interruptions, ``R`` recovery, ``D`` snapshot taken to snapshot usable, ``a`` slowdown while it drains.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace


def young(*, stall_s: float, mtbf_s: float) -> float:
    """sqrt(2 C M): Young 1974, first order."""
    return math.sqrt(2 * stall_s * mtbf_s)


def daly_first_order(*, stall_s: float, mtbf_s: float) -> float:
    """sqrt(2 C M) - C: Daly's first-order form. Not positive where C >= 2 M."""
    return young(stall_s=stall_s, mtbf_s=mtbf_s) - stall_s


def daly(*, stall_s: float, mtbf_s: float) -> float:
    """Daly 2006, higher order: sqrt(2CM)[1 + sqrt(C/2M)/3 + (C/2M)/9] - C if C < 2M, else M."""
    if stall_s >= 2 * mtbf_s:
        return mtbf_s
    ratio = stall_s / (2 * mtbf_s)
    return young(stall_s=stall_s, mtbf_s=mtbf_s) * (1 + math.sqrt(ratio) / 3 + ratio / 9) - stall_s


def exact(*, stall_s: float, mtbf_s: float) -> float:
    """The optimum of ``complete_goodput``: M [1 + W0(-exp(-1 - C/M))]. Recovery time drops out."""
    return mtbf_s * (1 + _lambert_w0_near_branch(stall_s / mtbf_s))


def _lambert_w0_near_branch(ratio: float) -> float:
    """W0(-exp(-1 - ratio)) for ratio >= 0, accurate next to the branch point at -1/e.

    Near the branch w = -1 + u turns w e^w = -e^(-1-r) into u + log(1 - u) = -r, which does not cancel in the
    argument; Newton starts from the branch series u = sqrt(2r) - 2r/3 (Corless et al. 1996, eq. 4.22).
    Far from it w is about -e^(-1-r), and Newton on w e^w itself is accurate.
    """
    if ratio <= 0:
        return -1.0
    if ratio > 1:
        target = -math.exp(-1 - ratio)
        w = target
        for _ in range(8):
            w -= (w - target * math.exp(-w)) / (1 + w)
        return w
    u = min(math.sqrt(2 * ratio) * (1 - math.sqrt(2 * ratio) / 3), 0.9)
    for _ in range(60):
        # The derivative of u + log(1 - u) is -u / (1 - u).
        after = u + (_u_plus_log(u) + ratio) * (1 - u) / u
        after = min(max(after, u / 4), (1 + u) / 2)
        if abs(after - u) <= 1e-15 * u:
            return after - 1
        u = after
    return u - 1


def _u_plus_log(u: float) -> float:
    """u + log(1 - u) for u < 1, by its series -u^2/2 - u^3/3 - ... where the direct form cancels."""
    if u > 0.05:
        return u + math.log1p(-u)
    total, power = 0.0, u
    for n in range(2, 16):
        power *= u
        total -= power / n
    return total


def complete_goodput(interval_s: float, *, stall_s: float, mtbf_s: float, recovery_s: float) -> float:
    """Useful time / wall time by Daly's complete model: t / [M e^(R/M) (e^((t+C)/M) - 1)].

    Exponential failures that strike work, saves and recoveries alike.
    """
    segment = mtbf_s * math.exp(recovery_s / mtbf_s) * math.expm1((interval_s + stall_s) / mtbf_s)
    return interval_s / segment


def first_order_goodput(interval_s: float, *, stall_s: float, mtbf_s: float, recovery_s: float) -> float:
    """(1 - (R + t/2)/M) / (1 + C/t): Meta's closed form, for t and R far below M."""
    return (1 - (recovery_s + interval_s / 2) / mtbf_s) / (1 + stall_s / interval_s)


@dataclass(frozen=True, kw_only=True)
class Tier:
    """One place that state is saved to, and the failures for which it is the cheapest place that survives."""

    name: str = ""
    stall_s: float
    """C: pause of training per save."""
    slowdown: float = 0.0
    """a: share of speed lost while the save drains."""
    drain_s: float = 0.0
    """D: from the snapshot until it can be restored."""
    recovery_s: float = 0.0
    """R: from the failure until the restored step is loaded."""
    mtbf_s: float
    """Between failures that fall back to this tier. ``math.inf``: none."""

    @property
    def save_cost_s(self) -> float:
        """C + a D: what one save takes from training."""
        return self.stall_s + self.slowdown * self.drain_s


def asynchronous(tier: Tier) -> float:
    """max(D, sqrt(2 (C + aD) M)): one save in flight at most."""
    if math.isinf(tier.mtbf_s):
        return math.inf
    return max(tier.drain_s, math.sqrt(2 * tier.save_cost_s * tier.mtbf_s))


def automatic(tier: Tier, *, shortest_s: float = 0.0, longest_s: float = math.inf) -> float:
    """What ``checkpoint.every_steps: auto`` means, in the plan, the trainer and the simulator alike: seconds of
    training between saves, the optimum of ``asynchronous`` within bounds."""
    return max(shortest_s, min(asynchronous(tier), longest_s))


#: Share of failures after which the machine and its memory are still there (DLRover: 75 % of failures restart
#: processes; ByteRobust's and Llama 3's mixes agree within 10 points).
PROCESS_SHARE = 0.75
#: Share of lost machines that go together with the machine which holds their copy: the mix's events of several hosts.
SEVERAL_SHARE = 0.05


def disk_share(*, memory: bool, peer: bool) -> float:
    """Share of failures after which only a disk or bucket save still holds the state.

    ``memory``: the host's own memory holds a snapshot; ``peer``: another machine's memory holds its copy.
    """
    if not memory:
        return 1.0
    return (1 - PROCESS_SHARE) * (SEVERAL_SHARE if peer else 1.0)


def waste(interval_s: float, tier: Tier) -> float:
    """Share of time lost to one tier: (C + aD)/t + (R + D + t/2)/M, first order (t far below M)."""
    saves = 0.0 if math.isinf(interval_s) else tier.save_cost_s / interval_s
    if math.isinf(tier.mtbf_s):
        return saves
    return saves + (tier.recovery_s + tier.drain_s + interval_s / 2) / tier.mtbf_s


@dataclass(frozen=True, kw_only=True)
class TierPlan:
    """A tier with its interval. ``first_order_holds``: t is below a tenth of the tier's MTBF."""

    tier: Tier
    interval_s: float
    waste: float
    first_order_holds: bool


def tiers(given: Sequence[Tier], *, nested: bool = False) -> list[TierPlan]:
    """Each tier's interval, cheapest tier first (as given).

    ``nested``: each interval is a whole multiple of the one before (a save to tier l+1 is one of tier l's
    moments); floor and ceiling are compared by waste.
    """
    result: list[TierPlan] = []
    for tier in given:
        best = asynchronous(tier)
        if nested and result and not math.isinf(best):
            below = result[-1].interval_s
            low = max(1, math.floor(best / below))
            lowest = max(1, math.ceil(tier.drain_s / below))
            multiples = {max(low, lowest), max(low + 1, lowest)}
            best = min((k * below for k in sorted(multiples)), key=lambda t: waste(t, tier))
        result.append(
            TierPlan(
                tier=tier,
                interval_s=best,
                waste=waste(best, tier),
                first_order_holds=best < tier.mtbf_s / 10 or math.isinf(tier.mtbf_s),
            )
        )
    return result


def tiers_goodput(result: Sequence[TierPlan]) -> float:
    """1 - the sum of the tiers' waste."""
    return 1 - sum(plan.waste for plan in result)


def whole_steps(interval_s: float, step_s: float, goodput: Callable[[float], float]) -> int:
    """Steps between saves: of k - 1, k, k + 1 around t/step (at least 1) the one with the best ``goodput(t)``."""
    near = max(1, round(interval_s / step_s))
    return max((k for k in (near - 1, near, near + 1) if k >= 1), key=lambda k: goodput(k * step_s))


#: Gamma prior of the failure rate at the reference scale: one failure in 4.8 h at 1,024 GPUs (5 a day).
PRIOR_FAILURES = 1.0
PRIOR_HOURS = 4.8
PRIOR_GPUS = 1024


@dataclass(frozen=True, kw_only=True)
class FailureRate:
    """Failures per second as it is learnt on line: (a0 + n) / (b0 + T), one per tier."""

    prior_failures: float = PRIOR_FAILURES
    prior_s: float
    failures: int = 0
    observed_s: float = 0.0

    @classmethod
    def at_scale(cls, gpus: int) -> FailureRate:
        """The prior for ``gpus``: failures scale with hardware, so a small job's first one is far off."""
        return cls(prior_s=PRIOR_HOURS * 3600 * PRIOR_GPUS / max(1, gpus))

    def observed(self, *, seconds: float, failures: int = 0) -> FailureRate:
        """The estimate after more seconds of running and failures."""
        return replace(self, observed_s=self.observed_s + seconds, failures=self.failures + failures)

    @property
    def per_second(self) -> float:
        return (self.prior_failures + self.failures) / (self.prior_s + self.observed_s)

    @property
    def mtbf_s(self) -> float:
        return 1 / self.per_second


def adapt(current_s: float, tier: Tier, *, since_restart_s: float = math.inf, shortest_s: float = 0.0) -> float:
    """The next interval for a tier: the optimum at the rate learnt by now, changed by at most 2x, never below D.

    For the first M/10 after a restart the interval does not grow: failures cluster there (Weibull shape
    below 1), and a longer interval learnt in quiet times would be wrong just then.
    """
    best = asynchronous(tier)
    upper = current_s if since_restart_s < tier.mtbf_s / 10 else 2 * current_s
    return max(min(max(best, current_s / 2), upper), tier.drain_s, shortest_s)
