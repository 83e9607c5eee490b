"""Ranks that a signal ends: known as soon as they begin to go, which takes a while."""

from __future__ import annotations

import contextlib
import functools
import os
import threading
from collections.abc import Callable

from muster.agent.ranks.rank_process import Worker, fatal_signal
from muster.core.errors import AccessError
from muster.storage.memory_dir import MemoryDir
from muster.transport import robust_lock
from muster.transport.connections import ConnectionPool


class DyingRanks:
    """A thread for each rank sleeps until the kernel takes the rank's lock; the agent's loop does the rest."""

    def __init__(self, *, hub: ConnectionPool, memory: MemoryDir, on_dying: Callable[[Worker], None]) -> None:
        """``memory``: the host's. ``on_dying``: the worker's exit code is known; it still exists."""
        self._hub, self._memory, self._on_dying = hub, memory, on_dying

    def watch(self, worker: Worker) -> None:
        """Call it once the rank has said something: by then it holds its lock. Without one, or where the host has no
        room for a thread more, only its pidfd tells."""
        if worker.is_awaited:
            return
        worker.is_awaited = True
        name, woken = robust_lock.name_of(worker.pid), -1
        try:
            lock, woken = robust_lock.Lock(self._memory.open_file(name, writable=True)), os.eventfd(0, os.EFD_CLOEXEC)
            wait = functools.partial(_wait, lock, woken)
            threading.Thread(target=wait, name=f"rank-{worker.pid}", daemon=True).start()
        except (OSError, AccessError, RuntimeError):  # RuntimeError: "can't start new thread"
            if woken >= 0:
                os.close(woken)
            return

        def ended() -> None:
            self._hub.unwatch(woken)
            os.close(woken)  # the thread has written, and does nothing more
            with contextlib.suppress(OSError):
                self._memory.unlink(name)
            self._look(worker)

        self._hub.watch(woken, ended)

    def _look(self, worker: Worker) -> None:
        """Unless its exit has been noticed, or this agent itself ends it: nobody waits for that news. One that is to
        continue may be given a place until it is gone, and its exit is one of that attempt then."""
        if worker.pidfd < 0 or worker.exit_code is not None or worker.was_killed or worker.retained:
            return
        number = fatal_signal(worker.pid)
        if number is not None:
            worker.exit_code, worker.is_dying = -number, True
            self._on_dying(worker)


def _wait(lock: robust_lock.Lock, woken: int) -> None:
    lock.wait()
    os.eventfd_write(woken, 1)
