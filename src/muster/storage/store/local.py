"""Objects as files: ``link(2)`` makes one winner, a locked atomic replace makes one successor.

A file is never changed in place: every write is a new file that takes the name once its bytes are on the
disk, so a reader opens an old version or a new one, and a killed writer leaves at most a hidden
temporary file. Conditional writes on a mounted bucket, which has neither links nor locks that reach
other machines, are refused, with the URI of the bucket. A generation is the modification time, which
each write forces above the one before it (the kernel's own stamps come in ticks of milliseconds), with
the inode. Locks are ``flock``: on a shared file system they must reach across its hosts (NFSv4, Lustre
with ``-o flock``, Filestore do).
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import tempfile
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

from muster.core.errors import AccessError, BackendError, ConflictError, UsageError
from muster.core.processes import open_plain, sync_directory
from muster.core.protocols import Stored
from muster.storage import mounts, uris

_HIDDEN = ".muster-"
_LOCK = f"{_HIDDEN}lock"
#: Of an object that is read whole, from a folder that anyone may have sent: indexes of large checkpoints have less.
_LARGEST_BYTES = 512 << 20
_UNSUPPORTED = (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.ENOLCK)
# What a file system's clock may round to: ns (ext4, xfs, tmpfs, NFS), 100 ns, 1 us, 1 ms, 1 s, 2 s (FAT).
_TICKS_NS = (1, 100, 1_000, 1_000_000, 1_000_000_000, 2_000_000_000)


class LocalStore:
    """The ``Store`` of plain paths and ``file://``."""

    def get(self, uri: str, *, start: int = 0) -> Stored:
        with translated(uri), open_plain(uris.local_path(uri)) as file:
            status = os.fstat(file.fileno())
            if status.st_size - start > _LARGEST_BYTES:
                raise OSError(errno.EFBIG, f"it has {status.st_size:,} bytes", uri)
            file.seek(start)
            return Stored(generation=_generation(status), data=file.read())

    def put(self, uri: str, data: bytes) -> str:
        path = uris.local_path(uri)
        with translated(uri), _locked(path.parent):
            return _replace(path, data, after_ns=_modified_ns(path))

    def put_if_absent(self, uri: str, data: bytes) -> str:
        path = _with_conditions(uri)
        with translated(uri):
            path.parent.mkdir(parents=True, exist_ok=True)
            temporary = _written(path, data, after_ns=0)
            try:
                generation = _generation(temporary.stat())
                os.link(temporary, path)
            except FileExistsError as error:
                raise ConflictError(f"{uri} exists already") from error
            except OSError as error:
                raise _without(error, "hard links", path.parent) from error
            finally:
                temporary.unlink(missing_ok=True)
            sync_directory(path.parent)
            return generation

    def put_if(self, uri: str, data: bytes, generation: str) -> str:
        path = _with_conditions(uri)
        with translated(uri):
            if not path.parent.is_dir():
                raise ConflictError(f"{uri} is gone; expected generation {generation}")
            with _locked(path.parent):
                try:
                    result = path.stat()
                except FileNotFoundError as error:
                    raise ConflictError(f"{uri} is gone; expected generation {generation}") from error
                if _generation(result) != generation:
                    raise ConflictError(f"{uri} is at generation {_generation(result)}, not {generation}")
                return _replace(path, data, after_ns=result.st_mtime_ns)

    def list(self, prefix: str) -> dict[str, int]:
        root = uris.local_path(prefix)
        result = {}
        with translated(prefix):
            for folder, folders, files in os.walk(root):
                folders.sort()
                for file in files:
                    path = Path(folder, file)
                    if not file.startswith(_HIDDEN):
                        with contextlib.suppress(FileNotFoundError):  # it was removed since
                            result[uris.join(prefix, path.relative_to(root).as_posix())] = path.stat().st_size
        return dict(sorted(result.items()))

    def delete(self, uri: str) -> None:
        path = uris.local_path(uri)
        with translated(uri):
            if path.parent.is_dir() and path.exists():
                with _locked(path.parent):
                    path.unlink(missing_ok=True)


def _with_conditions(uri: str) -> Path:
    """The path. Raises UsageError on a mounted bucket, which would let several writers win."""
    path = uris.local_path(uri)
    bucket = mounts.uri_of_mounted(path)
    if bucket is not None:
        hint = f"name the bucket instead of the path: {bucket} (below it, where only a folder of it is mounted)"
        raise UsageError(f"{uri} is on a mount of a bucket, which has no conditional writes", hint=hint)
    return path


@contextlib.contextmanager
def translated(uri: str) -> Iterator[None]:
    """Turn operating-system errors into the store's; FileNotFoundError passes as it is."""
    try:
        yield
    except FileNotFoundError:
        raise
    except PermissionError as error:
        raise AccessError(f"{uri}: {error.strerror}", hint="check the owner and mode of the folder") from error
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise BackendError(f"{uri}: {error.strerror}", hint="free some space or choose another folder") from error
        if error.errno == errno.EROFS:
            raise AccessError(f"{uri}: {error.strerror}") from error
        raise BackendError(f"{uri}: {error.strerror or error}") from error


def _replace(path: Path, data: bytes, *, after_ns: int) -> str:
    temporary = _written(path, data, after_ns=after_ns)
    try:
        generation = _generation(temporary.stat())
        os.replace(temporary, path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise
    sync_directory(path.parent)
    return generation


def _written(path: Path, data: bytes, *, after_ns: int) -> Path:
    """A hidden sibling with ``data`` on the disk and a modification time later than ``after_ns``."""
    temporary = path.parent / f"{_HIDDEN}{path.name[:100]}.{os.getpid()}.{uuid.uuid4().hex[:8]}"
    try:
        with open(temporary, "xb") as file:
            file.write(data)
            file.flush()
            _stamp_after(file.fileno(), after_ns)
            os.fsync(file.fileno())
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    return temporary


def _stamp_after(fd: int, after_ns: int) -> None:
    now = max(time.time_ns(), after_ns)
    for tick in _TICKS_NS:
        os.utime(fd, ns=(now + tick, now + tick))
        if os.fstat(fd).st_mtime_ns > after_ns:
            return
    raise BackendError("the file system keeps no usable modification times; conditional writes need them")


def _generation(stat: os.stat_result) -> str:
    return f"{stat.st_mtime_ns}.{stat.st_ino}"


def _modified_ns(path: Path) -> int:
    try:
        return path.stat().st_mtime_ns
    except FileNotFoundError:
        return 0


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / _LOCK, "ab") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX)
        except OSError as error:
            raise _without(error, "file locks", folder) from error
        yield


def _without(error: OSError, feature: str, folder: Path) -> Exception:
    """What to raise for ``error``: the missing feature by name, where the file system has none."""
    if error.errno not in _UNSUPPORTED:
        return error
    mount = next(path for path in (folder.absolute(), *folder.absolute().parents) if os.path.ismount(path))
    hint = "choose a folder on a local disk, NFSv4, Lustre with -o flock, or a bucket's URI"
    return UsageError(f"the file system at {mount} has no {feature}, which a run needs ({error.strerror})", hint=hint)


def check_conditional_writes(folder: Path) -> None:
    """Make and replace an object in ``folder``, which keeps nothing of it.

    Raises:
        UsageError: its file system has no hard links or no locks, or is a mounted bucket.
        AccessError, BackendError: as the store.
    """
    store = LocalStore()
    _with_conditions(str(folder))
    with translated(str(folder)), tempfile.TemporaryDirectory(prefix=_HIDDEN, dir=folder) as scratch:
        uri = f"{scratch}/object"
        store.put_if(uri, b"2", store.put_if_absent(uri, b"1"))
