"""Faults beyond a killed rank or host, as functions of a virtual cluster at a time."""

from __future__ import annotations

from muster.simulate.cluster import Cluster
from muster.supervise.recovery.state import SECOND_NS


def hang_rank(cluster: Cluster, rank: int, *, detect_s: float, why: str = "no progress") -> bool:
    """A rank stands still, and with it the world; a watchdog says so. False: nobody runs that rank now."""
    host = cluster.running(rank)
    if host is None:
        return False
    message = {"t": "rank_hang", "attempt": host.attempt, "rank": rank, "evidence": f"rank {rank}: {why}"}
    host.hung = message
    cluster.break_world(host, message, detect_s)
    return True


def false_alarm(cluster: Cluster, rank: int) -> bool:
    """A detector accuses a healthy rank. False: nobody runs that rank now."""
    host = cluster.running(rank)
    if host is None:
        return False
    evidence = f"rank {rank}: no progress (a false alarm)"
    cluster.receive_from(host, {"t": "rank_hang", "attempt": host.attempt, "rank": rank, "evidence": evidence})
    return True


def notice(cluster: Cluster, name: str, *, grace_s: float, what: str = "maintenance") -> None:
    """A host is told that it will go away."""
    host = cluster.hosts[name]
    cluster.receive_from(host, {"t": "notice", "notice": what, "source": "endpoint", "grace_s": grace_s})


def release_host(cluster: Cluster, name: str) -> None:
    """It is no longer paid for, and gone."""
    host = cluster.hosts[name]
    cluster.kill_host(name)
    if host.held_since_ns is not None:
        cluster.time.purchased_s += (cluster.now_ns - host.held_since_ns) / SECOND_NS
        host.held_since_ns = None
