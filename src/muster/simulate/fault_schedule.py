"""Which fault happens when: drawn once from the seed, so that two policies meet the same faults."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from dataclasses import dataclass

from muster.core.snapshots import SnapshotCopy, Tier
from muster.protocol.to_supervisor import HostNotice, RankHang
from muster.simulate.cluster import Cluster
from muster.simulate.scenario import DAY_S, HOUR_S, FaultKind, Scenario
from muster.simulate.stage_times import log_normal
from muster.supervise.recovery.inputs import SECOND_NS

#: Fail-slow episodes: excess factor and duration (FALCON: tens of seconds to about 10 h).
SLOW_FACTOR = (1.05, 3.0)
SLOW_MEDIAN_S, SLOW_SIGMA, SLOW_LIMITS_S = 600.0, 1.5, (30.0, 36_000.0)


@dataclass(frozen=True, kw_only=True)
class Fault:
    """One fault. ``where`` in [0, 1) chooses the host among those that run then."""

    at_s: float
    kind: str
    where: float = 0.0
    hosts: int = 1
    swap: bool = False
    hangs: bool = False
    detect_s: float = 0.0
    repair_s: float = 0.0
    reset_s: float = 0.0
    factor: float = 1.0
    """Of a slow host."""


def schedule(scenario: Scenario, seed: int) -> list[Fault]:
    """Every fault of one rehearsal, in order of time. Each source has a random stream of its own, so that a changed
    rate of one leaves the others alone; spares, interval and policy change nothing."""
    faults = [
        *_failures(scenario, random.Random(f"{seed}:failures")),
        *_rack_failures(scenario, random.Random(f"{seed}:bursts")),
        *_maintenance(scenario, random.Random(f"{seed}:maintenance")),
        *_false_alarms(scenario, random.Random(f"{seed}:alarms")),
        *_slow(scenario, random.Random(f"{seed}:slow")),
    ]
    return sorted(faults, key=lambda fault: fault.at_s)


def _gaps(rng: random.Random, per_day: float, hours: float, shape: float = 1.0) -> Iterator[float]:
    """Times of a renewal process with this mean rate; ``shape`` of its Weibull gaps."""
    if per_day <= 0:
        return
    scale_s = DAY_S / per_day / math.gamma(1 + 1 / shape)
    at_s = 0.0
    while True:
        at_s += rng.weibullvariate(scale_s, shape)
        if at_s >= hours * HOUR_S:
            return
        yield at_s


def _failures(scenario: Scenario, rng: random.Random) -> Iterator[Fault]:
    names, shares = list(scenario.kinds), [kind.share for kind in scenario.kinds.values()]
    for at_s in _gaps(rng, scenario.failures_per_day, scenario.hours, scenario.weibull_shape):
        name = rng.choices(names, shares)[0]
        yield _failure(scenario, scenario.kinds[name], name, at_s, rng)


def _failure(scenario: Scenario, kind: FaultKind, name: str, at_s: float, rng: random.Random) -> Fault:
    # Every fault takes as many numbers from the stream, so that a changed mix does not shift those after it.
    where, swapped, detection, repair = rng.random(), rng.random(), rng.getrandbits(32), rng.getrandbits(32)
    measured = scenario.profile.detect_s.get(name)
    if measured:
        detect_s = random.Random(detection).choice(measured)
    else:
        mean_s = kind.fast_s if scenario.fast_detection else kind.slow_s
        detect_s = log_normal(random.Random(detection), mean_s, scenario.detect_cv)
    return Fault(
        at_s=at_s,
        kind=name,
        where=where,
        hosts=kind.hosts,
        swap=swapped < kind.swap,
        hangs=kind.hangs,
        detect_s=detect_s,
        repair_s=log_normal(random.Random(repair), scenario.repair_h * HOUR_S, scenario.repair_cv),
        reset_s=kind.reset_s,
    )


def _rack_failures(scenario: Scenario, rng: random.Random) -> Iterator[Fault]:
    kind = FaultKind(share=1, slow_s=8, fast_s=3, swap=1, hosts=scenario.correlated_hosts)
    for at_s in _gaps(rng, scenario.correlated_per_day, scenario.hours):
        yield _failure(scenario, kind, "rack", at_s, rng)


def _maintenance(scenario: Scenario, rng: random.Random) -> Iterator[Fault]:
    for at_s in _gaps(rng, scenario.maintenance_per_day, scenario.hours):
        yield Fault(
            at_s=at_s, kind="maintenance", where=rng.random(), swap=True, repair_s=scenario.maintenance_h * HOUR_S
        )


def _false_alarms(scenario: Scenario, rng: random.Random) -> Iterator[Fault]:
    for at_s in _gaps(rng, scenario.false_alarms_per_day, scenario.hours):
        yield Fault(at_s=at_s, kind="false_alarm", where=rng.random())


def _slow(scenario: Scenario, rng: random.Random) -> Iterator[Fault]:
    for at_s in _gaps(rng, scenario.slow_per_day, scenario.hours):
        lasts_s = rng.lognormvariate(math.log(SLOW_MEDIAN_S), SLOW_SIGMA)
        lasts_s = min(max(lasts_s, SLOW_LIMITS_S[0]), SLOW_LIMITS_S[1])
        yield Fault(at_s=at_s, kind="slow", repair_s=lasts_s, factor=rng.uniform(*SLOW_FACTOR))


def hang_rank(cluster: Cluster, rank: int, *, detect_s: float, reason: str = "no progress") -> bool:
    """A rank hangs, and with it all others; the hang detector reports it. False: no host runs that rank now."""
    host = cluster.running(rank)
    if host is None:
        return False
    host.hung = RankHang(attempt=host.attempt, rank=rank, evidence=f"rank {rank}: {reason}")
    cluster.break_world(host, host.hung, detect_s)
    return True


def false_alarm(cluster: Cluster, rank: int) -> bool:
    """A detector reports a healthy rank. False: no host runs that rank now."""
    host = cluster.running(rank)
    if host is None:
        return False
    evidence = f"rank {rank}: no progress (a false alarm)"
    cluster.receive_from(host, RankHang(attempt=host.attempt, rank=rank, evidence=evidence))
    return True


def notice(cluster: Cluster, name: str, *, grace_s: float, kind: str = "maintenance") -> None:
    """A host gets notice that it will be taken away."""
    cluster.receive_from(cluster.hosts[name], HostNotice(notice=kind, source="endpoint", grace_s=grace_s))


def rot_snapshot(cluster: Cluster, rank: int, tier: Tier, *, versions: int = 1) -> list[SnapshotCopy]:
    """Bytes change in the newest ``versions`` of a rank's state in one tier; return those copies. The damage is
    detected when a rank starts from one or writes it to the disk."""
    cluster.settle_steps()
    held = [(copy, host) for host in cluster.hosts.values() for copy in host.list_snapshots()
            if (copy.rank, copy.tier) == (rank, tier)]  # fmt: skip
    struck = sorted(held, key=lambda pair: pair[0].step, reverse=True)[:versions]
    for copy, host in struck:
        host.rotten.add(copy)
    return [copy for copy, _ in struck]


def release_host(cluster: Cluster, name: str) -> None:
    """The host is released: no longer paid for."""
    host = cluster.hosts[name]
    cluster.kill_host(name)
    if host.held_since_ns is not None:
        cluster.time.purchased_s += (cluster.now_ns - host.held_since_ns) / SECOND_NS
        host.held_since_ns = None
