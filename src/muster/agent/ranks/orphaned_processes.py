"""Orphaned ranks: forked for a previous agent process and never re-registered (stopped, or holding the GIL). They hold
GPU memory until killed."""

from __future__ import annotations

import contextlib
import functools
import os
import signal
from collections.abc import Callable, Iterable

from muster.agent.ranks.rank_process import open_pidfd
from muster.transport.connections import ConnectionPool


class OrphanedProcesses:
    """``on_ended`` is called when the last of those that were killed is gone."""

    def __init__(self, *, hub: ConnectionPool, on_ended: Callable[[], None]) -> None:
        self._hub, self._on_ended = hub, on_ended
        self._silent: dict[int, int] = {}  # pid -> pidfd: a pid alone may be reused
        self._killed: dict[int, int] = {}

    @property
    def silent(self) -> bool:
        """Whether one that lives has not registered."""
        return bool(self._silent)

    @property
    def ending(self) -> bool:
        """Whether one that was killed still exists."""
        return bool(self._killed)

    def add(self, pids: Iterable[int]) -> None:
        """Living children of the fork server that have not registered with this agent."""
        for pid in set(pids) - set(self._silent) - set(self._killed):
            fd = open_pidfd(pid)
            if fd is not None:
                self._silent[pid] = fd

    def mark_registered(self, pid: int) -> None:
        """It is a standby or a rank of ours, or it is gone."""
        fd = self._silent.pop(pid, None)
        if fd is not None:
            os.close(fd)

    def kill(self) -> None:
        """SIGKILL for all that have not registered."""
        killed, self._silent = self._silent, {}
        for pid, fd in killed.items():
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(fd, signal.SIGKILL)
            self._killed[pid] = fd
            self._hub.watch(fd, functools.partial(self._gone, pid))

    def _gone(self, pid: int) -> None:
        fd = self._killed.pop(pid)
        self._hub.unwatch(fd)
        os.close(fd)
        if not self._killed:
            self._on_ended()
