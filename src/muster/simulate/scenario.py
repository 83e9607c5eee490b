"""What is rehearsed: hosts, spares, hours, faults, their detection and repair. Values only; the seed comes later."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from muster.config.spec import RunSpec
from muster.core import intervals
from muster.core.errors import UsageError
from muster.simulate.stage_times import Profile, shipped

DAY_S = 86400.0
HOUR_S = 3600.0
#: Longest automatic interval: a run that ends by its own decision loses its memory tiers.
LONGEST_S = HOUR_S
#: Machines of eight GPUs in a rack, and racks' machines in a block: NVIDIA's DGX SuperPOD reference architecture (H100,
#: RA-11333: scalable units of 32 machines; 127 machines in 32 racks, plus six racks of switches and storage).
RACK_HOSTS, BLOCK_HOSTS = 4, 32


@dataclass(frozen=True, kw_only=True)
class FaultKind:
    """One row of the mix."""

    share: float
    slow_s: float
    """Mean time to detect it with the usual timeouts."""
    fast_s: float
    """The same with push on death, progress watchdog and fast heartbeats."""
    swap: float = 0.0
    """Share of them after which the host must be replaced."""
    hangs: bool = False
    """Seen by a watchdog, not by a death."""
    hosts: int = 1
    """Hosts that fail at once: in one rack, as far as that has so many."""
    reset_s: float = 0.0
    """Where the host stays: its device is reset first."""


#: Shares, detection times and what must be replaced: Llama 3's table folded with ByteRobust's and DLRover's (75 % of
#: failures need new processes alone).
MIX: Mapping[str, FaultKind] = {
    "process": FaultKind(share=0.25, slow_s=2, fast_s=0.3),
    "hang": FaultKind(share=0.20, slow_s=30, fast_s=8, swap=0.1, hangs=True),
    "gpu": FaultKind(share=0.30, slow_s=5, fast_s=1, swap=0.5),
    "host": FaultKind(share=0.17, slow_s=8, fast_s=2, swap=1),
    "corruption": FaultKind(share=0.03, slow_s=60, fast_s=20, swap=1),
    "several_hosts": FaultKind(share=0.05, slow_s=8, fast_s=3, swap=1, hosts=3),
}


@dataclass(frozen=True, kw_only=True)
class Saves:
    """The disk or bucket tier. ``every_s`` None: the optimum for the failures that fall back to it."""

    every_s: float | None = None
    stall_s: float = 1.0
    drain_s: float = 180.0
    slowdown: float = 0.0
    """a: share of speed lost while a save drains; charged with the stall."""
    restore_s: float = 60.0

    @property
    def cost_s(self) -> float:
        return self.stall_s + self.slowdown * self.drain_s


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """One rehearsal's world. Rates are of the whole job of ``hosts`` hosts."""

    spec: RunSpec
    """Its recovery, parallelism and checkpoint settings drive the real supervisor."""
    hosts: int = 128
    spares: int = 2
    gpus_per_host: int = 8
    hours: float = 40.0
    failures_per_day: float = 5.0
    kinds: Mapping[str, FaultKind] = field(default_factory=lambda: MIX)
    weibull_shape: float = 1.0
    """Of the time between failures; below 1 they cluster. 1: exponential."""
    fast_detection: bool = True
    detect_cv: float = 0.5
    repair_h: float = 4.0
    """Mean."""
    repair_cv: float = 0.5
    correlated_per_day: float = 0.0
    """Additional rack or switch failures, each of ``correlated_hosts`` hosts in one rack and its neighbours."""
    correlated_hosts: int = 8
    rack_hosts: int = RACK_HOSTS
    block_hosts: int = BLOCK_HOSTS
    rack_labels: bool = True
    """The supervisor knows racks and blocks; else a host's copies are anywhere, perhaps in its rack."""
    maintenance_per_day: float = 0.0
    """Hosts taken away for ``maintenance_h``, with ``maintenance_notice_s`` of notice."""
    maintenance_notice_s: float = 60.0
    maintenance_h: float = 2.0
    false_alarms_per_day: float = 0.0
    slow_per_day: float = 0.0
    """Fail-slow episodes: a host slows the world 1.05 to 3 times for 30 s to 10 h."""
    trace: Trace | None = None
    """Spot capacity over time; instead of repairs. Host failures come from it too."""
    profile: Profile = field(default_factory=shipped)
    policy: str = "default"
    max_wait_s: float | None = None
    """Instead of the shipped policy's time to wait for capacity."""
    min_hosts: int | None = None
    """Continue with as few; None: with a single whole group."""
    quantum_hosts: int | None = None
    """Hosts of a sharded group; only whole ones run. None: what the run file's layout makes of them."""
    replicas: int = 1
    """``dp_replicate``: each holds the whole state."""
    memory_tier: bool = True
    replicate_snapshots: bool = True
    snapshot_every: int = 1
    saves: Saves | None = field(default_factory=Saves)
    micro_batches: int = 0
    """Micro-batches of a step; 0: they divide evenly over any number of hosts."""
    data_ranks_per_host: int = 1
    person_s: float = 3600.0
    """Until a person starts a failed run again."""
    usd_per_host_hour: float | None = None
    price_source: str = ""

    @property
    def mean_detect_s(self) -> float:
        """Over the mix, weighted by share."""
        return sum(kind.share * (kind.fast_s if self.fast_detection else kind.slow_s) for kind in self.kinds.values())

    @property
    def swaps_per_day(self) -> float:
        """Hosts that need repair, a day (each of several struck at once counts)."""
        mix = sum(kind.share * kind.swap * kind.hosts for kind in self.kinds.values())
        return self.failures_per_day * mix + self.correlated_per_day * self.correlated_hosts

    @property
    def copies(self) -> int:
        """Replicas that each hold the whole state."""
        return max(1, self.hosts // self.quantum_hosts) if self.quantum_hosts else self.replicas

    @property
    def disk_failures_per_day(self) -> float:
        """Those after which only the disk tier still has the state."""
        taken = self.trace.drops_per_day if self.trace else 0.0  # often several hosts at once, with every copy
        if not self.memory_tier:
            return taken + self.failures_per_day + self.correlated_per_day + self.false_alarms_per_day
        outside = self.replicate_snapshots and self.rack_labels and self.rack_hosts <= self.hosts // 2
        bursts = taken + (0.0 if self.copies > 1 or outside else self.correlated_per_day)
        for kind in self.kinds.values():
            several = kind.hosts > 1 and self.copies == 1 and not outside
            if several or (kind.swap and not self.replicate_snapshots and self.copies == 1):
                bursts += self.failures_per_day * kind.share * kind.swap
        return bursts

    @property
    def every_s(self) -> float:
        """Seconds of training between saves; math.inf: none."""
        if self.saves is None:
            return math.inf
        if self.saves.every_s is not None:
            return self.saves.every_s
        rate = self.disk_failures_per_day
        if rate <= 0:
            return LONGEST_S
        tier = intervals.Tier(
            stall_s=self.saves.stall_s,
            slowdown=self.saves.slowdown,
            drain_s=self.saves.drain_s,
            mtbf_s=DAY_S / rate,
        )
        return intervals.automatic(tier, longest_s=LONGEST_S)

    def with_(self, **changes: Any) -> Scenario:
        """The same but for ``changes``."""
        return replace(self, **changes)

    def run_spec(self) -> RunSpec:
        """The run file as the supervisor gets it: one rank stands for all GPUs of a host."""
        resources = self.spec.resources.model_copy(
            update={
                "hosts": self.hosts,
                "spare_hosts": self.spares,
                "min_hosts": self.min_hosts or (self.quantum_hosts or 1),
                "ranks_per_host": 1,
            }
        )
        axes = {"dp_shard": self.quantum_hosts or -1, "dp_replicate": self.copies, "tp": 1}
        longest = 4 * max(self.profile.mean_s(name) for name in ("start", "first_start", "warmup", "restore"))
        checkpoint = self.spec.checkpoint
        if not self.replicate_snapshots:
            checkpoint = checkpoint.model_copy(update={"replicate_snapshots": False})
        recovery = self.spec.recovery.model_copy(
            update={"start_timeout_s": max(self.spec.recovery.start_timeout_s, longest)}
        )
        return self.spec.model_copy(
            update={
                "resources": resources,
                "parallelism": self.spec.parallelism.model_copy(update=axes),
                "recovery": recovery,
                "checkpoint": checkpoint,
            }
        )


@dataclass(frozen=True, kw_only=True)
class Trace:
    """Capacity as steps: from ``times_s[i]`` on, ``counts[i]`` hosts."""

    name: str
    times_s: tuple[float, ...]
    counts: tuple[int, ...]
    hours: float

    @property
    def drops_per_day(self) -> float:
        """How often capacity is taken away."""
        drops = sum(after < before for before, after in zip(self.counts, self.counts[1:], strict=False))
        return drops / (self.hours / 24)


def read_trace(path: str | Path) -> Trace:
    """The trace of a file, in the format of skypilot-org/spot-traces (Wu et al., NSDI'24); equal counts are one step.

    Raises:
        UsageError: no such file, or not a trace.
    """
    try:
        content = json.loads(Path(path).read_text(encoding="utf-8"))
        gap_s, data = float(content["metadata"]["gap_seconds"]), [int(value) for value in content["data"]]
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror}") from error
    # int() of an infinite count overflows; brackets can be deeper than Python goes.
    except (ValueError, OverflowError, KeyError, TypeError, RecursionError) as error:
        raise UsageError(
            f"{path} is not a capacity trace: {type(error).__name__}: {error}",
            hint='wanted: {"metadata": {"gap_seconds": 300}, "data": [16, 15, ...]}',
        ) from error
    if not data or not 0 < gap_s < math.inf or min(data) < 0:
        raise UsageError(f"{path} is not a capacity trace: {len(data)} counts, gap {gap_s:g} s, all counts at least 0")
    changes = [index for index, value in enumerate(data) if index == 0 or value != data[index - 1]]
    return Trace(
        name=Path(path).stem,
        times_s=tuple(index * gap_s for index in changes),
        counts=tuple(data[index] for index in changes),
        hours=len(data) * gap_s / 3600,
    )
