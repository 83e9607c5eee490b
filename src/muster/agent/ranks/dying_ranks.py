"""Ranks that a signal ends: known as soon as they begin to go, and as soon as nothing of them runs any more.

Neither waits until the kernel has freed a rank's memory, which takes 20 ms or more of an exit.
"""

from __future__ import annotations

import contextlib
import functools
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path

from muster.agent.ranks.rank_process import Worker, all_threads_exiting, fatal_signal
from muster.config.spec import RunSpec
from muster.core import processes
from muster.core.errors import AccessError
from muster.storage.memory_dir import MemoryDir
from muster.transport import robust_lock
from muster.transport.connections import ConnectionPool

#: Threads of a process that a signal ends are all on their way out within a millisecond, unless one is in the kernel
#: for longer: then only the pidfd tells.
EXITING_WITHIN_S = 0.05
LOOK_S = 0.0005
MEMORY = Path("/proc/meminfo")


class DyingRanks:
    """A thread for each rank sleeps until the kernel takes the rank's lock; the agent's loop does the rest."""

    def __init__(
        self,
        *,
        hub: ConnectionPool,
        memory: MemoryDir,
        spec: Callable[[], RunSpec],
        on_dying: Callable[[Worker], None],
        on_ended: Callable[[], None],
    ) -> None:
        """``memory``: the host's. ``on_dying``: the worker's exit code is known; it still exists. ``on_ended``: what
        waits for the end of ranks may look again."""
        self._hub, self._memory, self._spec = hub, memory, spec
        self._on_dying, self._on_ended = on_dying, on_ended

    def watch(self, worker: Worker) -> None:
        """Call it once the rank has said something: by then it holds its lock. Without one, or where the host has no
        room for a thread more, only its pidfd tells."""
        if worker.is_awaited:
            return
        worker.is_awaited = True
        name, woken = robust_lock.name_of(worker.pid), -1
        try:
            lock, woken = robust_lock.Lock(self._memory.open_file(name, writable=True)), os.eventfd(0, os.EFD_CLOEXEC)
            wait = functools.partial(_wait, lock, woken, worker.pid)
            threading.Thread(target=wait, name=f"rank-{worker.pid}", daemon=True).start()
        except (OSError, AccessError, RuntimeError):  # RuntimeError: "can't start new thread"
            if woken >= 0:
                os.close(woken)
            return

        said = 0

        def look() -> None:
            nonlocal said
            said += os.eventfd_read(woken)
            if said >= _OVER:
                self._hub.unwatch(woken)
                os.close(woken)  # the thread has written, and does nothing more
                with contextlib.suppress(OSError):
                    self._memory.unlink(name)
            self._look(worker)
            if said >= _OVER and worker.pidfd >= 0 and all_threads_exiting(worker.pid) and self._may_be_passed_by():
                self._end_early(worker)

        self._hub.watch(woken, look)

    def _look(self, worker: Worker) -> None:
        """Unless its exit has been noticed, or this agent itself ends it: nobody waits for that news. One that is to
        continue may be given a place until it is gone, and its exit is one of that attempt then."""
        if worker.pidfd < 0 or worker.exit_code is not None or worker.was_killed or worker.retained:
            return
        number = fatal_signal(worker.pid)
        if number is not None:
            worker.exit_code, worker.is_dying = -number, True
            self._on_dying(worker)

    def _may_be_passed_by(self) -> bool:
        """Whether all that a rank leaves behind is memory of the host, of which there is enough: Muster's own trainer
        on the CPU. A device's memory is given up later; what a user's program holds (ports, locks) nobody knows."""
        spec = self._spec()
        return spec.command is None and spec.resources.on_cpu and _has_room()

    def _end_early(self, worker: Worker) -> None:
        """Nothing of it runs any more. One that left by itself is owed its exit code, which its parent alone learns."""
        if worker.peer is not None:
            for event in self._hub.drain(worker.peer):
                self._hub.dispatch(event)  # what its threads sent to the last
        if worker.was_killed and worker.exit_code is None:
            worker.assume_killed()
            worker.is_dying = True
            self._on_dying(worker)
        worker.only_memory_left = worker.is_dying
        self._on_ended()


#: What ``_wait`` writes in all: once as the rank begins to go, once as all of its threads do, or that takes too long.
_OVER = 2


def _wait(lock: robust_lock.Lock, woken: int, pid: int) -> None:
    lock.wait()
    os.eventfd_write(woken, 1)
    until = time.monotonic() + EXITING_WITHIN_S
    try:
        while not all_threads_exiting(pid) and time.monotonic() < until:
            time.sleep(LOOK_S)
    finally:
        os.eventfd_write(woken, 1)


def _has_room() -> bool:
    """Whether all that is in use on this host, and in this container, has room there once more: the ranks that come
    take theirs while that of the others is being freed, which takes a second or two of a process of 20 GB."""
    host = processes.host_memory(MEMORY)
    return host is not None and all(left >= used for used, left in [host, *processes.memory_groups()])
