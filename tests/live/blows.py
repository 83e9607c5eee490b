"""How each strike of ``trials`` is done to a process, a file or a disk."""

from __future__ import annotations

import contextlib
import ctypes
import os
import random
import resource
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import trials
from trials import Strike

from muster.chaos.network import Disk
from muster.core import processes
from muster.core.errors import UsageError
from muster.storage.memory_dir import MemoryDir

_PIDFD_GETFD = 438  # of every architecture (pidfd_getfd(2))


class Skipped(Exception):
    """A strike that could not be done: its target is not there, or there is no right to it."""


class Later:
    """What ends a while after it began: on threads, since verbs are waited for meanwhile."""

    def __init__(self) -> None:
        self._timers: list[threading.Timer] = []

    def after(self, seconds: float, act: Callable[[], None]) -> None:
        timer = threading.Timer(seconds, act)
        timer.daemon = True
        timer.start()
        self._timers.append(timer)

    def join(self) -> None:
        """Wait for all: seconds at most."""
        for timer in self._timers:
            timer.join()


# ---------------------------------------------------------------- processes


def strike_process(strike: Strike, pid: int, later: Later) -> str:
    """Returns what was done. Raises Skipped, ProcessLookupError, psutil.Error, OSError."""
    if strike.kind in ("kill", "term"):
        os.kill(pid, signal.SIGKILL if strike.kind == "kill" else signal.SIGTERM)
        return f"pid {pid}"
    if strike.kind == "pause":
        ticks = getattr(processes.look(pid), "start_ticks", -1)
        os.kill(pid, signal.SIGSTOP)
        later.after(strike.amount, lambda: _go_on(pid, ticks))
        return f"pid {pid}, {strike.amount} s"
    if strike.kind == "memory limit":
        limit = psutil.Process(pid).memory_info().vms + int(strike.amount * (16 << 20))
        resource.prlimit(pid, resource.RLIMIT_AS, (limit, limit))
        return f"pid {pid}, {limit >> 20} MiB"
    if strike.kind == "file limit":
        limit = max(map(int, os.listdir(f"/proc/{pid}/fd"))) + 1 + int(strike.amount * 4)
        resource.prlimit(pid, resource.RLIMIT_NOFILE, (limit, limit))
        return f"pid {pid}, {limit} files"
    return f"pid {pid}, {_shut_a_socket(pid, strike.amount)}"


def _go_on(pid: int, ticks: int) -> None:
    if processes.lives(pid, ticks):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)


def _shut_a_socket(pid: int, share: float) -> str:
    """Shut both directions of one of another process's sockets; needs the right to trace it."""
    held = []
    for name in os.listdir(f"/proc/{pid}/fd"):
        with contextlib.suppress(FileNotFoundError):
            if os.readlink(f"/proc/{pid}/fd/{name}").startswith("socket:"):
                held.append(int(name))
    if not held:
        raise Skipped("it holds no socket")
    number = sorted(held)[int(share * len(held))]
    libc, pidfd = ctypes.CDLL(None, use_errno=True), os.pidfd_open(pid)
    try:
        fd = libc.syscall(_PIDFD_GETFD, pidfd, number, 0)
        if fd < 0:
            raise Skipped(os.strerror(ctypes.get_errno()))
    finally:
        os.close(pidfd)
    with socket.socket(fileno=fd) as copy:
        kind = f"{copy.family.name} fd {number}"
        copy.shutdown(socket.SHUT_RDWR)
    return kind


# ---------------------------------------------------------------- files


def damage(strike: Strike, run_dir: Path, data_dir: Path, later: Later) -> str:
    """Returns what was done. Raises Skipped, OSError."""
    host = f"host-{strike.host}"
    pattern, folder = trials.FILES[strike.target].format(host=host), run_dir
    if pattern.startswith("@"):
        memory = MemoryDir.of_run(run_dir).get(host)
        if memory is None:
            raise Skipped(f"{host} has no memory folder")
        pattern, folder = pattern[1:], memory.folder
    elif pattern.startswith("&"):
        pattern, folder = pattern[1:], data_dir
    found = sorted(path for path in folder.glob(pattern) if path.is_file() and path.stat().st_size)
    if not found:
        raise Skipped("no such file")
    newest = strike.target != "prepared data"  # all of those are as old
    path = max(found, key=lambda path: path.stat().st_mtime_ns) if newest else found[int(strike.amount * len(found))]
    data = path.read_bytes()
    broken = trials.damaged(data, strike.kind, strike.amount)
    if broken == data:
        raise Skipped("nothing changes")
    at = _write_over(path, data, broken)
    if strike.target in trials.PUT_BACK:
        later.after(2 + 4 * strike.amount, lambda: _put_back(path, data, broken))
    return f"{path.relative_to(folder)} of {len(data)} bytes, at {at}"


def _write_over(path: Path, data: bytes, broken: bytes) -> int:
    """In place: others have it open or mapped. Only what differs: they may write the rest meanwhile."""
    size = min(len(data), len(broken))
    at = next((n for n in range(size) if data[n] != broken[n]), size)
    end = next((n for n in range(size, at, -1) if data[n - 1] != broken[n - 1]), at)
    with open(path, "r+b") as file:
        if len(broken) < len(data):
            file.truncate(len(broken))
        else:
            file.seek(at)
            file.write(broken[at:end])
    return at


def _put_back(path: Path, data: bytes, broken: bytes) -> None:
    until = time.monotonic() + 30
    while not path.exists() and time.monotonic() < until:  # its disk may be away
        time.sleep(0.1)
    if path.exists() and path.read_bytes() == broken:
        with open(path, "r+b") as file:
            file.write(data)


# ---------------------------------------------------------------- disks


class Disks:
    """Disks that can be filled, where this machine lets us mount them, or taken away."""

    def __init__(self) -> None:
        self._full: dict[Path, Disk] = {}
        self._filled: set[Path] = set()
        self._away: set[Path] = set()

    def put(self, folder: Path) -> None:
        """From now on ``folder``, which may be new, is a disk that can be filled."""
        disk = Disk(folder)
        with contextlib.suppress(UsageError):  # said where it is to be filled
            disk.up()
            self._full[folder] = disk

    def fill(self, folder: Path, seconds: float, later: Later) -> str:
        """Returns what was done. Raises Skipped."""
        disk = self._full.get(folder)
        if disk is None:
            raise Skipped("nothing can be mounted")
        disk.fill()
        self._filled.add(folder)
        later.after(seconds, lambda: self._free(folder))
        return f"{seconds} s"

    def _free(self, folder: Path) -> None:
        self._filled.discard(folder)
        if not any(folder.is_relative_to(away) for away in self._away):  # `mount` would find what covers it
            self._full[folder].free()

    def take_away(self, folder: Path, seconds: float, later: Later) -> str:
        """An empty folder that takes nothing is in its place. Returns what was done. Raises Skipped."""
        if folder in self._away or os.geteuid() != 0 or not folder.is_dir():
            raise Skipped("away already, not root, or no folder")
        mount = ["mount", "-t", "tmpfs", "-o", "ro", "muster-away", str(folder)]
        if subprocess.run(mount, check=False, capture_output=True).returncode != 0:
            raise Skipped("nothing can be mounted")
        self._away.add(folder)
        later.after(seconds, lambda: self._back(folder))
        return f"{seconds} s"

    def down(self) -> None:
        for folder in list(self._away):
            self._back(folder)
        for disk in reversed(self._full.values()):
            disk.down()

    def _back(self, folder: Path) -> None:
        subprocess.run(["umount", "--lazy", str(folder)], check=False, capture_output=True)
        self._away.discard(folder)
        for full, disk in self._full.items():  # what was to be freed while it was away
            if full not in self._filled and full.is_relative_to(folder):
                disk.free()


def lose_power(folder: Path, synced: Path, amount: float) -> str:
    """Leave of each file what had reached the disk by its last fsync (``synced``: see ``weather.cpp``), and of the rest
    nothing, a part, zeros or all; what was never synced may be gone. Names that a folder's fsync made stay. Returns the
    event files that lost something, as ``verdict.judge`` reads them."""
    dice, cut = random.Random(amount), []
    sizes = {int(inode): int(size) for inode, size in map(str.split, synced.read_text().splitlines())}
    for path in sorted(path for path in folder.rglob("*") if path.is_file() and not path.is_symlink()):
        size, kept = path.stat().st_size, sizes.get(path.stat().st_ino)
        if kept is not None and kept >= size:
            continue
        how, at = dice.choice(("cut", "cut", "zeroed", "kept")), dice.choice((kept or 0, dice.randint(kept or 0, size)))
        if kept is None and how == "kept":
            path.unlink()
        elif how != "kept":
            os.truncate(path, at)
            os.truncate(path, size if how == "zeroed" else at)
        if path.parent.name == "events":
            cut.append(f"events/{path.name} of {size} bytes, {how} at {at}")
    return ") (".join(cut or ["no event file lost anything"])
