"""Ranks of an attempt that wait for a process on their host: the data has to be there, and a standby."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable
from pathlib import Path

from muster.agent.ranks.standbys import Standbys
from muster.protocol.rank_agent import RunRank
from muster.protocol.ranks import RankContext
from muster.transport.connections import Connection, ConnectionPool


class RankQueue:
    """``waiting``: their contexts, in order."""

    def __init__(
        self,
        *,
        run_dir: Path,
        hub: ConnectionPool,
        standbys: Standbys,
        is_prepared: Callable[[], bool],
        spawn: Callable[[Iterable[int]], None],
        register: Callable[[RankContext, int, Connection], None],
    ) -> None:
        """``spawn``: have standbys forked for these local ranks; ``register``: from now on that process is a rank."""
        self._run_dir, self._hub, self._standbys = run_dir, hub, standbys
        self._is_prepared, self._spawn, self._register = is_prepared, spawn, register
        self.waiting: list[RankContext] = []

    def drop(self, attempt: int) -> None:
        """Those of attempts up to this one start no more."""
        self.waiting = [context for context in self.waiting if context.attempt > attempt]

    def assign(self) -> None:
        """Hand them to standbys, once the data is there; fork what is missing."""
        if not self._is_prepared():
            return
        for context in list(self.waiting):
            standby = self._standbys.take(context.local_rank)
            if standby is None:
                continue
            self.waiting.remove(context)
            log = self._run_dir / "logs" / f"rank-{context.rank}.a{context.attempt}.log"
            with contextlib.suppress(OSError):  # the rank starts without a log
                log.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._hub.send(standby.peer, RunRank(context=context, log=str(log)))
            self._register(context, standby.pid, standby.peer)
        if self.waiting:
            self._spawn(context.local_rank for context in self.waiting)
