"""This host is being taken away (by a scheduler or the cloud): be replaced, or save and leave."""

from __future__ import annotations

import math
import signal
import time
from collections.abc import Callable

from muster.config.spec import RunSpec
from muster.protocol.to_supervisor import HostNotice
from muster.protocol.values import CommandRanks

#: Share of the grace time in which a host of several waits for a new supervisor, who can replace it. In the rest the
#: ranks save, as they do where there is nobody to ask.
WAIT_SHARE = 0.5


class Preemption:
    """A supervisor decides for a run of several hosts; without one the run is saved and ends as preempted."""

    def __init__(
        self,
        *,
        spec: Callable[[], RunSpec],
        has_ranks: Callable[[], bool],
        is_supervised: Callable[[], bool],
        send: Callable[[HostNotice], None],
        command: Callable[[CommandRanks], None],
        on_exit: Callable[[str], None],
    ) -> None:
        """``send``: to the supervisor; ``command``: to all ranks here."""
        self._spec, self._has_ranks, self._is_supervised = spec, has_ranks, is_supervised
        self._send, self._command, self._on_exit = send, command, on_exit
        self._untold = ""
        """The source of a notice that no supervisor has heard of."""
        self._told = ""
        """The source of one that a supervisor has heard of: whoever does not take the host away in time is helped."""
        self._gone_s = 0.0
        """When this host is gone."""

    def take_signals(self, *, ignore_term: bool) -> None:
        """SIGTERM and SIGINT are notices; ``ignore_term``: of SIGTERM the supervisor was told (Slurm)."""
        for name in (signal.SIGTERM, signal.SIGINT):
            signal.signal(name, lambda number, _frame: self.on_notice(signal.Signals(number).name))
        if ignore_term:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)  # inherited by all children of this process

    def on_notice(self, source: str) -> None:
        """``source``: who says so."""
        self._gone_s = time.monotonic() + self._spec().recovery.grace_s
        if not self._has_ranks():
            self._on_exit(f"got {source}")
        elif self._spec().resources.hosts == 1:
            self._save()
        elif self._is_supervised():
            self._tell(source)
        else:
            self._untold = source

    def due_s(self) -> float:
        """When ``watch`` acts, if no supervisor comes before."""
        if self._untold:
            return self._gone_s - (1 - WAIT_SHARE) * self._spec().recovery.grace_s
        return self._gone_s if self._told else math.inf

    def watch(self) -> None:
        """Act on a notice that came while there was no supervisor, and leave when the time is over: a supervisor that
        waits for the host to return would wait for ever for one that never left (a machine of one's own)."""
        if self._told and self._left_s() == 0:
            if not self._has_ranks():
                self._on_exit(f"got {self._told}")
            self._told = ""  # with ranks: it was not taken away, and nobody counts on that
        if not self._untold:
            return
        if self._is_supervised():
            self._tell(self._untold)
            self._untold = ""
        elif self._left_s() <= (1 - WAIT_SHARE) * self._spec().recovery.grace_s:
            self._untold = ""
            self._save()

    def _tell(self, source: str) -> None:
        self._send(HostNotice(notice="preemption", source=source, grace_s=self._left_s()))
        self._told = source

    def _save(self) -> None:
        self._command(CommandRanks(kind="stop", exit_code=75, deadline_s=self._left_s()))

    def _left_s(self) -> float:
        return max(0.0, self._gone_s - time.monotonic())
