"""A lock that the kernel takes from a process as it begins to go, 20 ms or more before the process is gone.

A pidfd becomes readable at the end of an exit, and what takes long in it is that memory is freed (500 MB: 20 to 50 ms).
Before that ``do_exit`` gives up the thread's robust mutexes and wakes who waits (``exit_mm``, ``futex_exit_release`` in
kernel/exit.c and kernel/futex/core.c; nothing that an epoll could watch changes as early). Where there are no robust
mutexes no waiter is woken early.

What it does not say, so that who is woken has to look (``rank_process.fatal_signal``) and may fence nothing by it:

* The lock is one thread's: it is also taken where that thread alone ends, or executes another program.
* Other threads of the process run on for a moment, a system call of theirs to its end; its files, sockets, locks and
  device memory are given up after its memory. Only the pidfd says that all of it is over.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import mmap
import os
from pathlib import Path

#: For a ``pthread_mutex_t`` or ``pthread_mutexattr_t`` of glibc or musl: 48 bytes at most.
ROOM_BYTES = 64
_PROCESS_SHARED = _ROBUST = 1


def name_of(pid: int) -> str:
    """Of process ``pid``'s lock, in its host's folder in memory."""
    return f"rank-{pid}.lock"


def hold(path: Path) -> None:
    """The calling thread holds a new lock at ``path`` until it ends; where that cannot be had, there is no file.

    Call it after the fork, in the main thread: a child inherits no lock. The file has its name once the lock is held,
    or else a waiter could have it.
    """
    new = path.with_suffix(".new")
    with contextlib.suppress(OSError):
        fd = os.open(new, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        try:
            os.posix_fallocate(fd, 0, mmap.PAGESIZE)  # a full tmpfs would end this process at its first write
            mutex, attributes = _mutex(fd), ctypes.create_string_buffer(ROOM_BYTES)
            _do("pthread_mutexattr_init", attributes)
            _do("pthread_mutexattr_setpshared", attributes, _PROCESS_SHARED)
            _do("pthread_mutexattr_setrobust", attributes, _ROBUST)
            _do("pthread_mutex_init", mutex, attributes)
            _do("pthread_mutex_lock", mutex)
            _held.append(mutex)  # the kernel reads it when this thread ends
            os.rename(new, path)
        except (OSError, AttributeError):  # AttributeError: a C library without one of the functions
            new.unlink(missing_ok=True)
        finally:
            os.close(fd)


class Lock:
    """One that another process holds, or held."""

    def __init__(self, fd: int) -> None:
        """In a file that is open for reading and writing. It must be this user's: any user who may write it controls
        this process. ``fd`` is closed. Raises OSError: the file has no lock."""
        try:
            self._mutex = _mutex(fd)
        finally:
            os.close(fd)

    def wait(self) -> None:
        """Blocks, without the interpreter's lock, until its holder gives it up, which it never does by itself."""
        libc = _libc()
        libc.pthread_mutex_lock(self._mutex)
        libc.pthread_mutex_consistent(self._mutex)
        libc.pthread_mutex_unlock(self._mutex)


_Mutex = ctypes.Array[ctypes.c_char]
#: Mapped for as long as the process lives.
_held: list[_Mutex] = []


def _mutex(fd: int) -> _Mutex:
    """At the beginning of a file; it keeps the mapping."""
    try:
        return (ctypes.c_char * ROOM_BYTES).from_buffer(mmap.mmap(fd, mmap.PAGESIZE))
    except ValueError as error:  # an empty file
        raise OSError(str(error)) from error


@functools.cache
def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None)


def _do(name: str, *arguments: object) -> None:
    code = _libc()[name](*arguments)
    if code:
        raise OSError(code, os.strerror(code))
