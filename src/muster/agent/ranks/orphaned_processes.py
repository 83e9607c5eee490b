"""Processes that were forked for an agent that died, and that have not found its successor: ranks that are stopped, or
hold the GIL, and answer nobody. While they live they hold their GPU."""

from __future__ import annotations

import contextlib
import functools
import os
import signal
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from muster.agent.ranks.rank_process import open_pidfd

if TYPE_CHECKING:
    from muster.agent.host_agent import Agent


class Strays:
    """``on_ended`` is called when the last of those that were killed is gone."""

    def __init__(self, *, agent: Agent, on_ended: Callable[[], None]) -> None:
        self._agent, self._on_ended = agent, on_ended
        self._silent: dict[int, int] = {}  # pid -> pidfd: the number alone may be another process's one day
        self._killed: dict[int, int] = {}

    @property
    def ending(self) -> bool:
        """Whether one that was killed still exists."""
        return bool(self._killed)

    def listed(self, pids: Iterable[int]) -> None:
        """Living children of the fork server that have not spoken to this agent."""
        for pid in set(pids) - set(self._silent) - set(self._killed):
            fd = open_pidfd(pid)
            if fd is not None:
                self._silent[pid] = fd

    def spoke(self, pid: int) -> None:
        """It is a standby or a rank of ours, or it is gone."""
        fd = self._silent.pop(pid, None)
        if fd is not None:
            os.close(fd)

    def end(self) -> None:
        """SIGKILL for all that have not spoken."""
        killed, self._silent = self._silent, {}
        for pid, fd in killed.items():
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(fd, signal.SIGKILL)
            self._killed[pid] = fd
            self._agent.hub.watch(fd, functools.partial(self._gone, pid))

    def _gone(self, pid: int) -> None:
        fd = self._killed.pop(pid)
        self._agent.hub.unwatch(fd)
        os.close(fd)
        if not self._killed:
            self._on_ended()
