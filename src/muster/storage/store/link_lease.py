"""A lease on a name in a folder: held by one process among all that see the folder, on any number of machines.

Guarantee: of processes that run, one holds the lease, in any kind of folder: a local disk, NFS with or without
locks, a bucket mounted with Cloud Storage FUSE. A holder whose process is gone is replaced at once by processes of its
own machine, and by others ``STALE_S`` after its last sign of life. A holder that was halted for longer than that, on
another machine, may believe that it still holds the lease: ``is_held`` shows it. What must never be wrong therefore
needs a condition of its own; the lease only saves work.

``flock`` cannot do this: on a FUSE mount, and on NFS mounted with ``nolock``, it is granted on every machine at once.
What every one of these file systems does, atomically and for all machines, is to create a symbolic link whose name
is free: one system call, with its content, and EEXIST for all but one. (GCSFuse: one insert with
``ifGenerationMatch=0``, ``createNewObject`` in internal/fs/inode/dir.go. It needs no credentials but the mount's, and
is right where only a folder of the bucket is mounted, which ``uri_of_mounted`` cannot know.)

The protocol, for a lease NAME:

1. ``.NAME.lease-N`` is a link whose target describes its holder; the highest N holds. The holder renews
   ``.NAME.beat-TOKEN`` every ``BEAT_S``.
2. A candidate lists all links. Where there is none, or the highest one's holder is dead, it creates the next number.
3. It lists them again. One that it has not seen in step 2 belongs to another candidate: it removes its own and starts
   over. Else it holds the lease, and removes the links of the dead.
4. The holder removes its link and its beat at the end.

Why step 3: a lease may be taken and released between steps 1 and 2, after which numbers start at 1 again. Both create
before they list, so that of two candidates at least one sees the other.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import hashlib
import os
import random
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from muster.core import processes
from muster.core.errors import ConflictError
from muster.storage.store.patient import start_thread

#: How often a holder shows that it is alive.
BEAT_S = 5.0
#: A holder on another machine that has not shown it for so long is dead. Longer than a bucket is away now and then.
STALE_S = 60.0
#: Pauses of those who wait: each is twice the one before.
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.02, 2.0
#: There are no symbolic links on this file system (FAT, some SMB shares).
NO_LINKS = (errno.EPERM, errno.ENOSYS, errno.EOPNOTSUPP)


@functools.cache
def here() -> str:
    """Where a process number means something: this boot of this machine and, in a container, its processes. Empty
    where the system does not say."""
    boot = processes.boot_id()
    if not boot:  # every machine's first process namespace has the same number
        return ""
    try:
        space = os.stat("/proc/self/ns/pid").st_ino
    except OSError:
        return ""
    return hashlib.sha256(f"{boot} {space}".encode()).hexdigest()[:12]


@dataclass(frozen=True)
class Token:
    """Names one holding of a lease, and in it the process; what it makes carries it in its name."""

    here: str
    pid: int
    start_ticks: int
    number: str

    def __str__(self) -> str:
        return f"{self.here}-{self.pid}-{self.start_ticks}-{self.number}"

    @classmethod
    def read(cls, text: str) -> Token | None:
        parts = text.rsplit("-", 3)
        if len(parts) != 4 or not (parts[1].isdecimal() and parts[2].isdecimal()):
            return None
        return cls(parts[0], int(parts[1]), int(parts[2]), parts[3])

    @classmethod
    def new(cls) -> Token:
        process = processes.look(os.getpid())
        return cls(here(), os.getpid(), process.start_ticks if process else 0, secrets.token_hex(4))

    @property
    def is_of_here(self) -> bool:
        return bool(self.here) and self.here == here()

    @property
    def is_dead(self) -> bool:
        """Whether its process is known to be gone; False also where one cannot know."""
        if not self.is_of_here or processes.lives(self.pid, self.start_ticks):
            return False
        try:
            os.kill(self.pid, 0)
        except PermissionError:
            return False  # another user's, which /proc may hide
        except ProcessLookupError:
            pass
        return True


@dataclass(frozen=True)
class Holder:
    token: Token
    host: str
    since_s: int
    """By the holder's clock, since 1970."""

    def __str__(self) -> str:
        return f"{self.token}:{self.since_s}:{self.host}"

    @classmethod
    def read(cls, text: str) -> Holder | None:
        token, _, rest = text.partition(":")
        since_s, _, host = rest.partition(":")
        made = Token.read(token)
        return cls(made, host, int(since_s)) if made and since_s.isdecimal() else None


class LinkLease:
    """One process's part in the lease ``name`` of ``folder``, which exists."""

    def __init__(self, folder: Path, name: str) -> None:
        self.folder, self.name, self.token = folder, name, Token.new()
        self.excludes = True
        """False: the file system has no symbolic links, so that several may hold the lease at once."""
        self._mine = str(Holder(self.token, socket.gethostname(), int(time.time())))
        self._link: Path | None = None
        self._seen: tuple[str, bytes] | None = None
        self._seen_s = 0.0

    def take(self, is_needless: Callable[[Holder | None], bool]) -> bool:
        """Become the holder, however long that takes, and return True; False once ``is_needless``, which is called
        before each pause with the process that is waited for. Raises OSError."""
        pause_s = FIRST_PAUSE_S
        while (other := self._take()) is not None:
            if is_needless(Holder.read(other)):
                return False
            time.sleep(pause_s * random.uniform(0.5, 1.0))
            pause_s = min(2 * pause_s, LONGEST_PAUSE_S)
        return True

    def try_take(self) -> None:
        """Become the holder. Raises ConflictError where another process is, OSError."""
        if self._take() is not None:
            raise ConflictError(f"{self.folder / self.name} is in use by another process")

    def _take(self) -> str | None:
        """One try. None: it is ours; else the target of the link that was in the way."""
        links = self._links()
        if links and not self._is_dead(links[max(links)]):
            return links[max(links)]
        self._link = link = self._path(1 + max(links, default=0))
        try:
            os.symlink(self._mine, link)
        except FileExistsError:
            # Another was faster; or a mount, or NFS, repeated a request of ours whose answer was lost.
            other = _target(link)
            if other != self._mine:
                return other or ""
        except OSError as error:
            if error.errno not in NO_LINKS:
                raise
            self.excludes = False
            return None
        others = {number: target for number, target in self._links().items() if target != self._mine}
        if not others.items() <= links.items():
            self.release()
            return others[max(others)]
        for number, target in others.items():
            with contextlib.suppress(OSError):  # another user's: a lower number does no harm
                self._path(number).unlink(missing_ok=True)
                self._beat(target).unlink(missing_ok=True)
        return None

    def is_held(self) -> bool:
        """Whether no other process has taken the lease since. Raises OSError."""
        links = self._links()
        return not self.excludes or (bool(links) and links[max(links)] == self._mine)

    def renew(self) -> None:
        """Show that the holder is alive. Raises OSError."""
        self._beat(self._mine).write_bytes(str(time.monotonic_ns()).encode())

    def release(self) -> None:
        """Give the lease back. A link that cannot be removed is that of a dead process, soon."""
        with contextlib.suppress(OSError):
            self._beat(self._mine).unlink(missing_ok=True)
        with contextlib.suppress(OSError):
            if self._link is not None and _target(self._link) == self._mine:
                self._link.unlink(missing_ok=True)

    def _is_dead(self, target: str) -> bool:
        holder = Holder.read(target)
        if holder is not None and holder.token.is_of_here:
            return holder.token.is_dead
        try:
            beat = self._beat(target).read_bytes()
        except OSError:
            beat = b""
        if self._seen != (target, beat):
            self._seen, self._seen_s = (target, beat), time.monotonic()
        return time.monotonic() - self._seen_s >= STALE_S

    def _path(self, number: int) -> Path:
        return self.folder / f".{self.name}.lease-{number}"

    def _beat(self, target: str) -> Path:
        return self.folder / f".{self.name}.beat-{target.partition(':')[0]}"

    def _links(self) -> dict[int, str]:
        """Number -> target, of all that are there."""
        return {
            int(path.name.rpartition("-")[2]): target
            for path in _listed(self.folder, f".{self.name}.lease-")
            if (target := _target(path)) is not None
        }


def traces(folder: Path, name: str) -> list[tuple[Path, Token]]:
    """What there is of holders of the lease ``name``: their links and beats. Raises OSError."""
    links = [(path, (_target(path) or "").partition(":")[0]) for path in _listed(folder, f".{name}.lease-")]
    beats = [(path, path.name.partition(".beat-")[2]) for path in _listed(folder, f".{name}.beat-")]
    return [(path, token) for path, text in (*links, *beats) if (token := Token.read(text)) is not None]


def _listed(folder: Path, start: str) -> list[Path]:
    return [folder / entry for entry in sorted(os.listdir(folder)) if entry.startswith(start)]


def _target(link: Path) -> str | None:
    try:
        return os.readlink(link)
    except FileNotFoundError:
        return None


@contextmanager
def beating(lease: LinkLease) -> Iterator[None]:
    """Take part in ``lease`` as its holder: renew it in a thread, and release it at the end."""
    done = threading.Event()

    def beat() -> None:
        while True:
            with contextlib.suppress(OSError):  # a full disk, a bucket that is away: others wait STALE_S
                lease.renew()
            if done.wait(BEAT_S):
                return

    thread = start_thread(beat, "lease")
    try:
        yield
    finally:
        done.set()
        thread.join()
        lease.release()
