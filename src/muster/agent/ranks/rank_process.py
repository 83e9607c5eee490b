"""What an agent records of the rank processes on its host."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from collections.abc import Callable
from dataclasses import dataclass, field

from muster.protocol.rank_agent import RankCaptured
from muster.protocol.values import LastWords
from muster.transport.connections import Connection, ConnectionPool

#: They end no process.
_STOP = (signal.SIGSTOP, signal.SIGTSTP, signal.SIGTTIN, signal.SIGTTOU)


@dataclass(kw_only=True)
class Worker:
    """A process that runs a rank."""

    pid: int
    rank: int
    attempt: int
    peer: Connection | None
    pidfd: int
    parent: int = 0
    """The fork server that forked it: only its parent learns the exit code."""
    step: int = -1
    micro: int = 0
    first_step: int | None = None
    stepped: bool = False
    progress_s: float = 0.0
    """Monotonic time of the last progress (step or micro-batch)."""
    seen_s: float = 0.0
    """Monotonic time of the last message."""
    looked_s: float = 0.0
    """Monotonic time at which its process was last looked at, in silence."""
    stop_reported: bool = field(init=False)
    """Its parent has told that it was stopped, or a look has shown it, and no look since has found it going on."""
    stopped_s: float | None = None
    """Since when it has been seen stopped; None: it was not, or it has spoken since."""
    last: LastWords | None = None
    """Why it ends, in its own words."""
    exit_code: int | None = None
    orphaned: bool = False
    """Its parent died first: its exit code is a guess."""
    reported_hang: bool = False
    captured: RankCaptured | None = None
    """What it answered to the last ``CaptureRank``."""
    retained: bool = False
    """Its attempt ends, and it is to continue in the next one."""
    paused: int | None = None
    """It has paused after this step, and waits for its next rank."""
    was_killed: bool = False
    """Its agent has ended it, and it was not on its way out by then."""
    is_awaited: bool = False
    """``DyingRanks`` has looked for its lock."""
    is_dying: bool = False
    """Its exit code was known, and told, before it was gone."""
    only_memory_left: bool = False
    """And nothing of it runs any more: only its memory is still being freed, for which nobody waits."""

    def __post_init__(self) -> None:
        self.stop_reported = is_stopped(self.pid)  # what its parent told of a standby, nobody has kept

    @property
    def exists(self) -> bool:
        """Until its pidfd or the fork server that reaped it says that it is gone, or all but its memory is."""
        return self.pidfd >= 0 and (self.exit_code is None or self.is_dying) and not self.only_memory_left

    @property
    def is_owed(self) -> bool:
        """Whether its attempt waits for its end."""
        return self.paused is None and not self.only_memory_left

    def close_pidfd(self, hub: ConnectionPool) -> None:
        """It is gone."""
        hub.unwatch(self.pidfd)
        os.close(self.pidfd)
        self.pidfd = -1

    def begin(self, rank: int, attempt: int, *, now_s: float) -> None:
        """Become ``rank`` of ``attempt``."""
        self.rank, self.attempt = rank, attempt
        self.retained, self.paused, self.reported_hang, self.last = False, None, False, None
        self.first_step, self.stepped = None, False
        self.progress_s = now_s
        self.heard(now_s)

    def kill(self) -> None:
        """SIGKILL; gone is success."""
        self.was_killed = self.was_killed or not is_exiting(self.pid)
        kill(self.pid)

    def assume_killed(self) -> None:
        """Its parent died first, so its exit code cannot be known."""
        if self.exit_code is None:
            self.exit_code, self.orphaned = -signal.SIGKILL, True

    def on_stop_reported(self, now_s: float) -> None:
        """Its parent says so. Who is stopped for a moment is stopped right now: looks count from here."""
        self.stop_reported, self.looked_s, self.stopped_s = True, now_s, None

    def lose(self, peer: Connection) -> None:
        """``peer`` is gone; the rank may have connected again before that was seen."""
        if self.peer is peer:
            self.peer = None

    def heard(self, now_s: float) -> None:
        """It has said something."""
        self.seen_s, self.stopped_s = now_s, None

    def beat(self, step: int, micro: int, *, now_s: float) -> bool:
        """A new micro-batch is progress. True: a snapshot is ready, of a new step or of the attempt's beginning."""
        if (step, micro) == (self.step, self.micro):
            return False
        self.progress_s = now_s
        is_new, self.step, self.micro = step != self.step, step, micro
        if not is_new:
            return False
        if self.first_step is None:
            self.first_step = step
            return True
        self.stepped = self.stepped or step > self.first_step
        return step > self.first_step


def parent_of(pid: int) -> int:
    """The parent's pid; 0 when the process is gone."""
    return int(_stat(pid)[1])


def is_stopped(pid: int) -> bool:
    """Whether the kernel holds the process stopped (SIGSTOP, a debugger, a freezer)."""
    return _stat(pid, 1)[0] in (b"T", b"t")


def is_exiting(pid: int) -> bool:
    """Whether the process is gone or has begun to go. Its memory is freed before anybody learns its exit code."""
    found = _stat(pid)
    return len(found) <= 6 or _is_marked(found)


def all_threads_exiting(pid: int) -> bool:
    """Whether every thread of the process is gone or has begun to go, and so is in no system call and returns to none
    of its program's code (``do_exit`` in kernel/exit.c). What it holds (memory, files, devices) may still be there.

    A thread that is new at a second look was started by one before that began to go.
    """
    seen: set[str] = set()
    try:
        while True:
            count, found = int(_told(pid)[17]), set(os.listdir(f"/proc/{pid}/task"))
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
        return _is_marked(_told(f"{pid}/task/{thread}"))
    except (FileNotFoundError, ProcessLookupError):
        return True


def fatal_signal(pid: int) -> int | None:
    """The signal that ends a process which has begun to go. None: none does, it is gone, or the kernel does not say
    (field 52 of proc_pid_stat(5) is for those who may trace the process).

    It is final: a fatal signal sets the code of the whole group before any thread goes (``SIGNAL_GROUP_EXIT``). Where
    the main thread has gone alone, that field may hold the signal which stopped the others.
    """
    found = _stat(pid)
    if len(found) <= 49 or not _is_marked(found):
        return None
    number = int(found[49]) & 0x7F
    return number if number and number not in _STOP else None


def _is_marked(told: list[bytes]) -> bool:
    """``PF_EXITING`` of include/linux/sched.h, among the flags of proc_pid_stat(5)."""
    return bool(int(told[6]) & 0x4)


def _stat(pid: int, most: int = -1) -> list[bytes]:
    """The kernel's words about a process after its name: its state, its parent, and more; ``most`` and the rest."""
    with contextlib.suppress(OSError, IndexError):
        return _told(pid, most)
    return [b"", b"0"]


def _told(pid: int | str, most: int = -1) -> list[bytes]:
    """The same. Raises FileNotFoundError or ProcessLookupError: it is gone; OSError, IndexError: nothing is known."""
    fd = os.open(f"/proc/{pid}/stat", os.O_RDONLY | os.O_CLOEXEC)
    try:
        return os.read(fd, 4096).rsplit(b")", 1)[1].split(None, most)
    finally:
        os.close(fd)


def kill(pid: int) -> None:
    """SIGKILL; gone is success."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def end_child(child: subprocess.Popen[bytes] | None) -> None:
    """Kill it; never waits long."""
    if child is not None:
        child.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(1)


def on_exit(hub: ConnectionPool, pid: int, callback: Callable[[], None]) -> None:
    """Call back once process ``pid`` is gone, now if it is; the exit status of a child is still to be read."""
    fd = open_pidfd(pid)
    if fd is None:
        return callback()

    def gone() -> None:
        hub.unwatch(fd)
        os.close(fd)
        callback()

    hub.watch(fd, gone)


def open_pidfd(pid: int) -> int | None:
    """A file descriptor that becomes readable when ``pid`` is gone; None when it is gone already."""
    try:
        return os.pidfd_open(pid)
    except ProcessLookupError:
        return None
