"""The processes of ranks at the agent's edge: their ends, early and late, and what ``/proc`` says of them.

A thread for each rank sleeps until the kernel takes the rank's lock; the loop does the rest. Everything that a process
sent is read before an event says something about its end.
"""

from __future__ import annotations

import contextlib
import functools
import os
import signal
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from muster.agent.values.events import Event, Killed, Looked, ProcessGone, RankExiting, RankThreadsEnded, RankWatched
from muster.core import processes
from muster.core.errors import AccessError
from muster.storage.memory_dir import MemoryDir
from muster.transport import robust_lock
from muster.transport.connections import ConnectionPool

#: They end no process.
_STOP = (signal.SIGSTOP, signal.SIGTSTP, signal.SIGTTIN, signal.SIGTTOU)
#: Threads of a process that a signal ends are all on their way out within a millisecond, unless one is in the kernel
#: for longer: then only the pidfd tells.
EXITING_WITHIN_S = 0.05
LOOK_S = 0.0005
MEMORY = Path("/proc/meminfo")
#: Of a rank's log, its end, in which a library says why it aborts the process.
TAIL_BYTES = 16 << 10
#: What ``_wait`` writes in all: once as the rank begins to go, once as all of its threads do, or that takes too long.
_OVER = 2


@dataclass(frozen=True)
class Gone:
    """Token of a pidfd."""

    pid: int


@dataclass
class Lock:
    """Token of a rank's lock."""

    pid: int
    woken: int
    count: int = 0


class RankProcesses:
    """Those that are watched until they end: ranks and other children of the fork server."""

    def __init__(self, pool: ConnectionPool, memory: MemoryDir) -> None:
        self._pool, self._memory = pool, memory
        self._pidfds: dict[int, int] = {}
        self._logs: dict[int, str] = {}
        """Of ranks, by pid."""
        self._locked: set[int] = set()
        """Ranks whose lock was looked for."""

    def watch(self, pid: int, log: str | None) -> Iterator[Event]:
        """``log``: of a rank, perhaps another one than before; None: it has not registered."""
        if log is not None:
            self._logs[pid] = log
        if pid not in self._pidfds:
            try:
                fd = self._pidfds[pid] = os.pidfd_open(pid)
            except ProcessLookupError:  # gone and reaped: its exit code may have been dropped as a standby's
                self._logs.pop(pid, None)
                yield ProcessGone(pid)
                return
            self._pool.watch(fd, Gone(pid))
        if log is not None:
            yield RankWatched(pid, parent_of(pid), is_stopped(pid))

    def kill(self, pid: int) -> Iterator[Event]:
        """SIGKILL; gone is success. It looks immediately before: an exit that began earlier is reported."""
        was_exiting = is_exiting(pid)
        with contextlib.suppress(ProcessLookupError):
            if pid in self._pidfds:
                signal.pidfd_send_signal(self._pidfds[pid], signal.SIGKILL)
            else:
                os.kill(pid, signal.SIGKILL)
        yield Killed(pid, was_exiting)

    def look(self, pid: int) -> Iterator[Event]:
        yield Looked(pid, is_stopped(pid))

    def tail(self, pid: int, code: int | None) -> str:
        """The end of a rank's log, where SIGABRT ended it."""
        path = self._logs.get(pid)
        if path is None or code != -signal.SIGABRT:
            return ""
        with contextlib.suppress(OSError), open(path, "rb") as log:
            log.seek(max(0, log.seek(0, 2) - TAIL_BYTES))
            return log.read().decode(errors="replace")
        return ""

    def heard(self, pid: int) -> None:
        """A rank has sent something: by then it holds its lock. Without one, or where the host has no room for a thread
        more, only its pidfd tells."""
        if pid in self._locked or pid not in self._logs:
            return
        self._locked.add(pid)
        woken = -1
        try:
            lock = robust_lock.Lock(self._memory.open_file(robust_lock.name_of(pid), writable=True))
            woken = os.eventfd(0, os.EFD_CLOEXEC)
            wait = functools.partial(_wait, lock, woken, pid)
            threading.Thread(target=wait, name=f"rank-{pid}", daemon=True).start()
        except (OSError, AccessError, RuntimeError):  # RuntimeError: "can't start new thread"
            if woken >= 0:
                os.close(woken)
            return
        self._pool.watch(woken, Lock(pid, woken))

    def gone(self, token: Gone) -> Iterator[Event]:
        fd = self._pidfds.pop(token.pid)
        self._pool.unwatch(fd)
        os.close(fd)
        self._logs.pop(token.pid, None)
        self._locked.discard(token.pid)
        yield ProcessGone(token.pid)

    def woken(self, lock: Lock) -> Iterator[Event]:
        lock.count += os.eventfd_read(lock.woken)
        if lock.count >= _OVER:
            self._pool.unwatch(lock.woken)
            os.close(lock.woken)  # the thread has written, and does nothing more
            with contextlib.suppress(OSError):
                self._memory.unlink(robust_lock.name_of(lock.pid))
        if lock.pid not in self._pidfds:
            return
        number = fatal_signal(lock.pid)
        yield RankExiting(lock.pid, number, self.tail(lock.pid, None if number is None else -number))
        if lock.count >= _OVER and lock.pid in self._pidfds and all_threads_exiting(lock.pid):
            yield RankThreadsEnded(lock.pid, _has_room())


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


# ---------------------------------------------------------------- /proc


def parent_of(pid: int) -> int:
    """The parent's pid; 0 when the process is gone."""
    return int(_stat(pid)[1])


def is_stopped(pid: int) -> bool:
    """Whether the kernel holds the process stopped (SIGSTOP, a debugger, a freezer)."""
    return _stat(pid, 1)[0] in (b"T", b"t")


def is_exiting(pid: int) -> bool:
    """Whether the process is gone or has begun to go. Its memory is freed before its exit code can be learned."""
    fields = _stat(pid)
    return len(fields) <= 6 or _is_marked(fields)


def all_threads_exiting(pid: int) -> bool:
    """Whether every thread of the process is gone or has begun to go, and so is in no system call and returns to none
    of its program's code (``do_exit`` in kernel/exit.c). What it holds (memory, files, devices) may still be there.

    A thread that is new at a second look was started by one before that began to go.
    """
    seen: set[str] = set()
    try:
        while True:
            count, found = int(_fields(pid)[17]), set(os.listdir(f"/proc/{pid}/task"))
            if len(found) < count:  # one ended while the kernel listed them: the list may be short of others too
                return False
            if not found - seen:
                return True
            if not all(_thread_is_exiting(pid, thread) for thread in found - seen):
                return False
            seen |= found
    except (FileNotFoundError, ProcessLookupError):
        return True  # gone
    except (OSError, IndexError):  # nothing is known of it
        return False


def _thread_is_exiting(pid: int, thread: str) -> bool:
    try:
        return _is_marked(_fields(f"{pid}/task/{thread}"))
    except (FileNotFoundError, ProcessLookupError):
        return True


def fatal_signal(pid: int) -> int | None:
    """The signal that ends a process which has begun to go. None: none does, it is gone, or the kernel does not say
    (field 52 of proc_pid_stat(5) is for those who may trace the process).

    It is final: a fatal signal sets the code of the whole group before any thread goes (``SIGNAL_GROUP_EXIT``). Where
    the main thread has gone alone, that field may hold the signal which stopped the others.
    """
    fields = _stat(pid)
    if len(fields) <= 49 or not _is_marked(fields):
        return None
    number = int(fields[49]) & 0x7F
    return number if number and number not in _STOP else None


def _is_marked(fields: list[bytes]) -> bool:
    """``PF_EXITING`` of include/linux/sched.h, among the flags of proc_pid_stat(5)."""
    return bool(int(fields[6]) & 0x4)


def _stat(pid: int, most: int = -1) -> list[bytes]:
    """What the kernel says of a process after its name: its state, its parent, and more; ``most`` and the rest."""
    with contextlib.suppress(OSError, IndexError):
        return _fields(pid, most)
    return [b"", b"0"]


def _fields(pid: int | str, most: int = -1) -> list[bytes]:
    """The same. Raises FileNotFoundError or ProcessLookupError: it is gone; OSError, IndexError: nothing is known."""
    fd = os.open(f"/proc/{pid}/stat", os.O_RDONLY | os.O_CLOEXEC)
    try:
        return os.read(fd, 4096).rsplit(b")", 1)[1].split(None, most)
    finally:
        os.close(fd)
