"""Forked processes that wait for a rank."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass

from muster.protocol.rank_agent import WarmUp
from muster.transport.connections import Connection, ConnectionPool


@dataclass(kw_only=True)
class Standby:
    """A forked process that waits for a rank."""

    pid: int
    peer: Connection
    local_rank: int = 0
    """The rank of the host that it was forked for."""
    bound: bool = False
    """It holds a CUDA context on that local rank's GPU, so that it can take no other."""
    warm: bool = False
    """It has run the work of a first step in advance, or cannot."""


def standby_for(local_rank: int, standbys: Iterable[Standby]) -> Standby | None:
    """The one that was forked for this local rank, else one that fits any; None where there is neither.

    One that holds a context on another GPU would keep that memory for as long as it lives.
    """
    usable = [standby for standby in standbys if standby.local_rank == local_rank or not standby.bound]
    return min(usable, key=lambda standby: standby.local_rank != local_rank, default=None)


class Standbys:
    """Those of one host that are connected."""

    def __init__(self) -> None:
        self._by_pid: dict[int, Standby] = {}

    def __len__(self) -> int:
        return len(self._by_pid)

    @property
    def pids(self) -> Collection[int]:
        return self._by_pid.keys()

    def add(self, standby: Standby) -> None:
        self._by_pid[standby.pid] = standby

    def take(self, local_rank: int) -> Standby | None:
        """One for this local rank, which leaves; None: there is none that fits."""
        standby = standby_for(local_rank, self._by_pid.values())
        if standby is not None:
            del self._by_pid[standby.pid]
        return standby

    def remove(self, pid: int) -> None:
        self._by_pid.pop(pid, None)

    def remove_peer(self, peer: Connection) -> Standby | None:
        """The one of this connection, which leaves; None: it was none."""
        found = next((standby for standby in self._by_pid.values() if standby.peer is peer), None)
        return None if found is None else self._by_pid.pop(found.pid)

    def clear(self) -> None:
        self._by_pid.clear()

    def look(self, hub: ConnectionPool) -> None:
        """Have those with a context see whether it still works: what ended a rank may have been its GPU's error."""
        for standby in self._by_pid.values():
            if standby.bound:
                hub.send(standby.peer, WarmUp())

    def missing(self, ranks_per_host: int) -> list[int]:
        """Local ranks for which none was forked."""
        present = {standby.local_rank for standby in self._by_pid.values()}
        return [local_rank for local_rank in range(ranks_per_host) if local_rank not in present]

    def on_warm(self, peer: Connection) -> None:
        for standby in self._by_pid.values():
            standby.warm = standby.warm or standby.peer is peer

    def are_warm(self, ranks_per_host: int) -> bool:
        """Whether a warm one waits for each rank of the host."""
        return len(self) >= ranks_per_host and all(standby.warm for standby in self._by_pid.values())
