"""Ranks that a signal ends: known as soon as they begin to go, which takes a while."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from pathlib import Path

from muster.agent.ranks.rank_process import Worker, fatal_signal
from muster.transport import robust_lock
from muster.transport.connections import ConnectionPool


class DyingRanks:
    """A thread for each rank sleeps until the kernel takes the rank's lock; the agent's loop does the rest."""

    def __init__(self, *, hub: ConnectionPool, folder: Callable[[], Path], on_dying: Callable[[Worker], None]) -> None:
        """``folder``: the host's, in memory. ``on_dying``: its exit code is known; it still exists."""
        self._hub, self._folder, self._on_dying = hub, folder, on_dying

    def watch(self, worker: Worker) -> None:
        """Call it once the rank has said something: by then it holds its lock. Without one only its pidfd tells."""
        if worker.is_awaited:
            return
        worker.is_awaited = True
        path = robust_lock.path_of(self._folder(), worker.pid)
        try:
            lock, woken = robust_lock.Lock(path), os.eventfd(0, os.EFD_CLOEXEC)
        except OSError:
            return

        def wait() -> None:
            lock.wait()
            os.eventfd_write(woken, 1)

        def ended() -> None:
            self._hub.unwatch(woken)
            os.close(woken)  # the thread has written, and does nothing more
            path.unlink(missing_ok=True)
            self._look(worker)

        self._hub.watch(woken, ended)
        threading.Thread(target=wait, name=f"rank-{worker.pid}", daemon=True).start()

    def _look(self, worker: Worker) -> None:
        """Unless its exit has been noticed, or this agent itself ends it: nobody waits for that news. One that is to
        continue may be given a place until it is gone, and its exit is one of that attempt then."""
        if worker.pidfd < 0 or worker.exit_code is not None or worker.was_killed or worker.retained:
            return
        number = fatal_signal(worker.pid)
        if number is not None:
            worker.exit_code, worker.is_dying = -number, True
            self._on_dying(worker)
