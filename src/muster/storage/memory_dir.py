"""A host's folder in memory (tmpfs) for snapshots, sockets and pid files, which other users of the machine can neither
read nor prepare.

Its name ends in 64 random bits and it is made fresh; where it is, is written in the run's folder, which is its owner's
alone::

    <run_dir>/memory/<host>.json     path, inode and boot: ``of_run`` and a restarted agent find the folder by it

Where that record is damaged, a restarted agent takes the folder that has the host's name and is this user's: no
other user can have made it, its snapshots are verified like any, and otherwise it would never be deleted.

A program that may write under the root may empty it under a run (a desktop's logout does: systemd's ``RemoveIPC``). The
folder is then recreated under its own name, which the host's processes know, unless another user was quicker.

Small files and sockets are opened through the folder's descriptor; rings by path, with ``O_NOFOLLOW``, in a folder that
only its owner can enter. A link is never followed.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import re
import secrets
import shutil
import stat
import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from muster.core import environment, processes
from muster.core.errors import AccessError, UsageError
from muster.core.processes import read_plain
from muster.core.typed_json import Record, Unreadable, decode, encode
from muster.storage import run_registry

#: Of a Unix socket's name, its closing zero left out (unix(7)).
SOCKET_PATH_BYTES = 107
_LONGEST_SOCKET = "replicator.sock"
_SECRET_BYTES = 8
_RECORDS = "memory"
_FOLDER_FLAGS = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC


class MemoryDir:
    """One such folder, held open until the object goes. ``folder`` is its path, ``fd`` its descriptor."""

    def __init__(self, folder: Path, fd: int) -> None:
        """Use ``create``, ``open``, ``of_host`` or ``of_run``: they check what ``fd`` is."""
        self.folder, self.fd = folder, fd
        self.close = weakref.finalize(self, os.close, fd)

    # ------------------------------------------------------------ the folder

    @classmethod
    def create(cls, run_dir: Path, *, run_id: str, host: str) -> MemoryDir:
        """A new, empty folder, recorded in the run's.

        Raises:
            UsageError: others could exchange folders under the root (``MUSTER_MEMORY_DIR``), or its path is too long.
            AccessError: the root's file system keeps neither owner nor mode.
        """
        root = environment.current().memory_root
        check_path_length(root, run_dir, run_id=run_id, host=host)
        root.mkdir(mode=0o700, parents=True, exist_ok=True)
        while True:
            folder = root / f"{prefix(run_dir, run_id)}-{host}-{secrets.token_hex(_SECRET_BYTES)}"
            with contextlib.suppress(FileExistsError):
                return cls._made(folder, run_dir, host)

    @classmethod
    def open(cls, folder: Path | str, *, inode: int | None = None) -> MemoryDir:
        """The folder that another process of the run made; ``inode``: as recorded.

        Raises:
            AccessError: it is gone, a link, another user's, open to others, or not the recorded one.
            UsageError: others could exchange folders under its root.
        """
        folder = Path(folder)
        try:
            root_fd = _open_root(folder.parent)
            try:
                fd = os.open(folder.name, _FOLDER_FLAGS | os.O_NOFOLLOW, dir_fd=root_fd)
            finally:
                os.close(root_fd)
        except OSError as error:
            reason = "is a link or no folder" if error.errno in (errno.ELOOP, errno.ENOTDIR) else error.strerror
            raise AccessError(f"memory folder {folder}: {reason}") from error
        result = cls(folder, fd)
        status = os.fstat(fd)
        if status.st_uid != os.geteuid():
            raise AccessError(f"memory folder {folder} belongs to another user (uid {status.st_uid})")
        if status.st_mode & 0o077:
            raise AccessError(f"memory folder {folder} is open to other users (mode {status.st_mode & 0o777:04o})")
        if inode is not None and status.st_ino != inode:
            raise AccessError(f"memory folder {folder} is not the one that the run made")
        return result

    @classmethod
    def of_host(cls, run_dir: Path, *, run_id: str, host: str) -> MemoryDir:
        """The recorded folder of ``host``, where a dead agent left it; else a new one, under the recorded name where
        that is free: processes that outlived the agent look for its successor there. Raises as ``create``."""
        place = _read_record(_record_path(run_dir, host))
        if place is None:
            return cls._found(run_dir, run_id=run_id, host=host) or cls.create(run_dir, run_id=run_id, host=host)
        return _reopened(place) or cls._made_again(Path(place.path), run_dir, run_id=run_id, host=host)

    @classmethod
    def _found(cls, run_dir: Path, *, run_id: str, host: str) -> MemoryDir | None:
        """The folder of ``host`` whose record cannot be read, the newest of several; it is recorded again."""
        named = re.compile(rf"{re.escape(f'{prefix(run_dir, run_id)}-{host}')}-[0-9a-f]{{{2 * _SECRET_BYTES}}}")
        there = [path for path in left_over(run_dir, run_id)[0] if named.fullmatch(path.name)]
        for path in sorted(there, key=lambda path: path.lstat().st_mtime_ns, reverse=True):
            with contextlib.suppress(AccessError, UsageError):
                found = cls.open(path)
                found._record(run_dir, host)
                return found
        return None

    def _record(self, run_dir: Path, host: str) -> None:
        place = _Place(path=str(self.folder), inode=os.fstat(self.fd).st_ino, boot_id=processes.boot_id())
        with contextlib.suppress(OSError):  # a full disk must not prevent a start: a restarted agent looks by name
            _write_record(run_dir, host, place)

    @classmethod
    def recorded(cls, run_dir: Path, host: str) -> MemoryDir | None:
        """The folder that the agent of ``host``, on this machine, recorded last; None where it is not there."""
        place = _read_record(_record_path(run_dir, host))
        return _reopened(place) if place is not None else None

    @classmethod
    def of_run(cls, run_dir: Path) -> dict[str, MemoryDir]:
        """Host -> its folder, for each that was made on this machine since it booted and is still there."""
        opened = {path.stem: _reopened(place) for path, place in _records(run_dir)}
        return {host: folder for host, folder in opened.items() if folder is not None}

    def is_lost(self) -> bool:
        """Whether what others look up under its path is not in it: it was deleted, or the name is another folder's."""
        try:
            there = os.stat(self.folder, follow_symlinks=False)
        except OSError:
            return True
        return not os.path.samestat(there, os.fstat(self.fd))

    def renew(self, run_dir: Path, *, run_id: str, host: str) -> None:
        """Where it is lost: be a new, empty folder under the same path or, where that is taken, under a new name.

        Raises:
            OSError: none can be made now.
            UsageError, AccessError: as ``create``.
        """
        made = self._made_again(self.folder, run_dir, run_id=run_id, host=host)
        self.close()
        made.close.detach()  # the descriptor is this object's
        self.folder, self.fd = made.folder, made.fd
        self.close = weakref.finalize(self, os.close, self.fd)

    @classmethod
    def _made_again(cls, folder: Path, run_dir: Path, *, run_id: str, host: str) -> MemoryDir:
        try:
            folder.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            return cls._made(folder, run_dir, host)
        except (OSError, UsageError):  # taken, or no longer to be had there
            return cls.create(run_dir, run_id=run_id, host=host)

    @classmethod
    def _made(cls, folder: Path, run_dir: Path, host: str) -> MemoryDir:
        """A new folder, recorded. Raises FileExistsError."""
        _make(folder)
        result = cls.open(folder)
        result._record(run_dir, host)
        return result

    def remove(self) -> None:
        """Delete it and what is in it; absent is success. Nothing else is touched, even if its path was replaced.

        Raises:
            OSError: it could not be deleted.
        """
        if os.fstat(self.fd).st_nlink == 0:
            return
        root_fd = os.open(self.folder.parent, _FOLDER_FLAGS)
        try:
            there = os.stat(self.folder.name, dir_fd=root_fd, follow_symlinks=False)
            if os.path.samestat(there, os.fstat(self.fd)):
                shutil.rmtree(self.folder.name, dir_fd=root_fd)
        except FileNotFoundError:
            pass
        finally:
            os.close(root_fd)

    # ------------------------------------------------------------ what is in it

    def path(self, name: str) -> Path:
        """The path of ``name``, to be named to other processes."""
        return self.folder / _plain(name)

    def exists(self, name: str) -> bool:
        """Whether it is there, be it a link or a socket."""
        try:
            os.stat(_plain(name), dir_fd=self.fd, follow_symlinks=False)
        except FileNotFoundError:
            return False
        return True

    def open_file(self, name: str, *, writable: bool = False) -> int:
        """A descriptor, for reading (and writing), of an existing file.

        Raises:
            FileNotFoundError: it is not there.
            AccessError: it is a link, no plain file, another user's, or has a second name.
        """
        try:
            # O_NONBLOCK: a pipe under that name must not block before it is refused.
            flags = (os.O_RDWR if writable else os.O_RDONLY) | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
            fd = os.open(_plain(name), flags, dir_fd=self.fd)
        except OSError as error:
            if error.errno in (errno.ELOOP, errno.ENXIO):
                raise AccessError(f"{self.folder / name} is a link or no plain file") from error
            raise
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode) or status.st_uid != os.geteuid() or status.st_nlink > 1:
            os.close(fd)
            raise AccessError(f"{self.folder / name} is not a plain file of this user with a single name")
        return fd

    def create_file(self, name: str) -> int:
        """A descriptor, for reading and writing, of a new file. Raises FileExistsError where the name is taken."""
        return os.open(
            _plain(name), os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600, dir_fd=self.fd
        )

    def read(self, name: str) -> bytes:
        """The whole of a small file. Raises as ``open_file``."""
        with os.fdopen(self.open_file(name), "rb") as file:
            return file.read()

    def replace(self, name: str, data: bytes) -> None:
        """Write a small file whole, or leave the old one. Raises OSError."""
        temporary = f"{_plain(name)}.{secrets.token_hex(4)}.part"
        with os.fdopen(self.create_file(temporary), "wb") as file:
            try:
                file.write(data)
                file.flush()
                self.rename(temporary, name)
            except OSError:
                self.unlink(temporary)
                raise

    def rename(self, old: str, new: str) -> None:
        """``old`` is called ``new`` from now on; what was called so is gone."""
        os.rename(_plain(old), _plain(new), src_dir_fd=self.fd, dst_dir_fd=self.fd)

    def unlink(self, name: str) -> None:
        """Delete it; absent is success."""
        with contextlib.suppress(FileNotFoundError):
            os.unlink(_plain(name), dir_fd=self.fd)

    def bind_address(self, name: str) -> str:
        """What to bind a Unix socket to that others connect to by ``path(name)``; a dead predecessor's is deleted."""
        self.unlink(name)
        return f"/proc/self/fd/{self.fd}/{name}"


def prefix(run_dir: Path | str, run_id: str) -> str:
    """What the name of every memory folder of this run begins with."""
    digest = hashlib.sha256(f"{Path(run_dir).resolve()}\0{run_id}".encode()).hexdigest()[:12]
    return f"muster-{os.getuid()}-{digest}"


def check_path_length(root: Path, run_dir: Path | str, *, run_id: str, host: str) -> None:
    """Raise UsageError where the sockets in a folder of this host would have longer names than the kernel takes."""
    folder = root / f"{prefix(run_dir, run_id)}-{host}-{'0' * 2 * _SECRET_BYTES}"
    too_long = len(os.fsencode(folder)) + len(f"/{_LONGEST_SOCKET}") - SOCKET_PATH_BYTES
    if too_long > 0:
        raise UsageError(
            f"the memory folder {folder} has {too_long} bytes too many for the sockets in it",
            hint="set MUSTER_MEMORY_DIR to a folder on tmpfs with a shorter path",
        )


def _plain(name: str) -> str:
    if "/" in name or name in ("", ".", ".."):
        raise AccessError(f"{name!r} is no file name")
    return name


def _make(folder: Path) -> None:
    """Make it, its owner's alone. Raises FileExistsError; UsageError: others could exchange it."""
    root_fd = _open_root(folder.parent)
    try:
        os.mkdir(folder.name, 0o700, dir_fd=root_fd)
    finally:
        os.close(root_fd)


def _open_root(root: Path) -> int:
    """A descriptor of ``root``, in which no other user can rename or delete a folder of ours."""
    fd = os.open(root, _FOLDER_FLAGS)
    status = os.fstat(fd)
    others_write = status.st_mode & 0o022 and not status.st_mode & stat.S_ISVTX
    if others_write or status.st_uid not in _trusted_owners():
        os.close(fd)
        reason = "others may rename what is in it" if others_write else f"it belongs to uid {status.st_uid}"
        raise UsageError(
            f"{root} is not safe for memory folders: {reason}",
            hint="set MUSTER_MEMORY_DIR to a folder on tmpfs that is yours, or root's with the sticky bit",
        )
    return fd


def _trusted_owners() -> set[int]:
    """Root and this user; in a user namespace (Apptainer, enroot) also the unmapped user: the real root."""
    unmapped = Path("/proc/self/uid_map").read_text().split() != ["0", "0", "4294967295"]
    overflow = {int(Path("/proc/sys/kernel/overflowuid").read_text())} if unmapped else set()
    return {0, os.geteuid()} | overflow


# ---------------------------------------------------------------- the records in the run's folder


@dataclass(frozen=True, kw_only=True)
class _Place(Record):
    path: str
    inode: int
    boot_id: str
    """Of the machine; several machines may share the run's folder."""


def left_over(run_dir: Path, run_id: str) -> tuple[list[Path], list[Path]]:
    """Folders on this machine that are recorded or named as the run's: this user's, and others'."""
    found = {Path(place.path) for _, place in _records(run_dir)}
    found.update(environment.current().memory_root.glob(f"{prefix(run_dir, run_id)}-*"))
    ours: list[Path] = []
    theirs: list[Path] = []
    for path in sorted(found):
        with contextlib.suppress(FileNotFoundError):
            status = path.lstat()
            if stat.S_ISDIR(status.st_mode):
                (ours if status.st_uid == os.geteuid() else theirs).append(path)
    return ours, theirs


def _record_path(run_dir: Path, host: str) -> Path:
    return run_dir / _RECORDS / f"{host}.json"


def _records(run_dir: Path) -> Iterator[tuple[Path, _Place]]:
    for path in sorted((run_dir / _RECORDS).glob("*.json")):
        place = _read_record(path)
        if place is not None:
            yield path, place


def _read_record(path: Path) -> _Place | None:
    try:
        place = decode(_Place, read_plain(path))
    except (OSError, Unreadable):
        return None
    return place if place.boot_id == processes.boot_id() else None


def _write_record(run_dir: Path, host: str, place: _Place) -> None:
    path = _record_path(run_dir, host)
    run_registry.make_folder(path.parent)
    run_registry.replace_text(path, encode(place).decode())


def _reopened(place: _Place) -> MemoryDir | None:
    """The recorded folder; None where it is gone, or its name is another's now."""
    try:
        return MemoryDir.open(place.path, inode=place.inode)
    except (AccessError, UsageError):
        return None
