"""Faults beyond a killed rank or host, as functions of a virtual cluster at a time."""

from __future__ import annotations

from muster.simulate.cluster import Cluster
from muster.supervise.recovery.state import SECOND_NS


def hang_rank(cluster: Cluster, rank: int, *, detect_s: float, reason: str = "no progress") -> bool:
    """A rank hangs, and with it all others; the hang detector reports it. False: no host runs that rank now."""
    host = cluster.running(rank)
    if host is None:
        return False
    message = {"t": "rank_hang", "attempt": host.attempt, "rank": rank, "evidence": f"rank {rank}: {reason}"}
    host.hung = message
    cluster.break_world(host, message, detect_s)
    return True


def false_alarm(cluster: Cluster, rank: int) -> bool:
    """A detector reports a healthy rank. False: no host runs that rank now."""
    host = cluster.running(rank)
    if host is None:
        return False
    evidence = f"rank {rank}: no progress (a false alarm)"
    cluster.receive_from(host, {"t": "rank_hang", "attempt": host.attempt, "rank": rank, "evidence": evidence})
    return True


def notice(cluster: Cluster, name: str, *, grace_s: float, kind: str = "maintenance") -> None:
    """A host gets notice that it will be taken away."""
    host = cluster.hosts[name]
    cluster.receive_from(host, {"t": "notice", "notice": kind, "source": "endpoint", "grace_s": grace_s})


def release_host(cluster: Cluster, name: str) -> None:
    """The host is released: no longer paid for."""
    host = cluster.hosts[name]
    cluster.kill_host(name)
    if host.held_since_ns is not None:
        cluster.time.purchased_s += (cluster.now_ns - host.held_since_ns) / SECOND_NS
        host.held_since_ns = None
