"""How often to save: interval formulas, shared by the plan, the agent and the simulator. No torch.

Symbols, all in seconds: ``t`` work between saves, ``C`` stall per save, ``M`` mean time between
interruptions, ``R`` recovery, ``D`` snapshot taken to snapshot usable, ``a`` slowdown while it drains.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace


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


#: What ``checkpoint.snapshot_every_steps: auto`` (the default) lets snapshots in memory take of training time, how long
#: it lets a failure throw back at most, and up to which size of a rank's state it does not ask: such a copy takes
#: milliseconds.
SNAPSHOT_SHARE = 0.01
SNAPSHOT_LONGEST_S = 600.0
SNAPSHOT_SMALL_BYTES = 64 << 20


def snapshot_steps(
    stall_s: float, step_s: float, *, bytes_: float, takes_s: float = 0.0, mtbf_s: float = math.inf
) -> int:
    """What ``checkpoint.snapshot_every_steps: auto`` means, in the plan and the trainer alike: the fewest steps between
    snapshots at which their stall (``stall_s`` each) is at most ``SNAPSHOT_SHARE`` of the steps' time; fewer where
    failures are so frequent that the steps redone after them would cost more than the stalls (``asynchronous``); but
    never so few that one begins before the one before counts, for which it would wait.

    ``bytes_``: of a rank's snapshot. ``takes_s``: until it counts, copy and checksum, most of it during the next steps.
    ``mtbf_s``: between failures. Where failures are rare that optimum would be longer than one per cent asks for: a
    snapshot that costs so little is taken as often as that allows, because what it saves is also the work of people who
    wait.
    """
    if bytes_ <= SNAPSHOT_SMALL_BYTES or step_s <= 0:
        return 1
    ended = max(1, math.ceil(takes_s / step_s - 1e-9))
    if stall_s <= 0:
        return ended
    fewest = math.ceil(stall_s / (SNAPSHOT_SHARE * step_s) - 1e-9)
    optimum_s = asynchronous(Tier(stall_s=stall_s, mtbf_s=mtbf_s))
    return max(ended, min(fewest, int(min(optimum_s, SNAPSHOT_LONGEST_S) / step_s)))


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
