"""Faults beyond a killed rank or host, as functions of a virtual cluster at a time."""

from __future__ import annotations

from muster.core.snapshots import SnapshotCopy, Tier
from muster.protocol.to_supervisor import HostNotice, RankHang
from muster.simulate.cluster import Cluster
from muster.supervise.recovery.inputs import SECOND_NS


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
