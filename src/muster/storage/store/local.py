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
import re
import tempfile
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from muster.core.errors import AccessError, BackendError, ConflictError, UsageError
from muster.core.processes import open_plain, sync_directory
from muster.core.protocols import Stored
from muster.storage import uris

_HIDDEN = ".muster-"
_LOCK = f"{_HIDDEN}lock"
#: Of an object that is read whole, from a folder that anyone may have sent: indexes of large checkpoints have less.
_LARGEST_BYTES = 512 << 20
_UNSUPPORTED = (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.ENOLCK)
# What a file system's clock may round to: ns (ext4, xfs, tmpfs, NFS), 100 ns, 1 us, 1 ms, 1 s, 2 s (FAT).
_TICKS_NS = (1, 100, 1_000, 1_000_000, 1_000_000_000, 2_000_000_000)
MOUNTS = Path("/proc/self/mountinfo")
#: Bucket names, by Google's rules for them.
_BUCKET = re.compile(r"^[a-z0-9][a-z0-9._-]{1,220}[a-z0-9]$")
#: Sources of a mount that shows all buckets as folders.
_ALL_BUCKETS = ("_", "gcsfuse")
_OCTAL = re.compile(r"\\([0-7]{3})")


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
    bucket = uri_of_mounted(path)
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


class _Mount(NamedTuple):
    root: str
    """What of the file system is shown here (a folder, where a folder of it was bound)."""
    point: str
    kind: str
    source: str


def uri_of_mounted(path: str | os.PathLike[str], *, mounts: Path | None = None) -> str | None:
    """``gs://BUCKET/...`` of a path on a mounted bucket, None of any other; the path need not exist.

    Right unless only a folder of the bucket was mounted (``--only-dir``), which a mount does not show: say it to users,
    do not write there. The GKE driver's mounts are of kind ``fuse``, the program's own of kind ``fuse.gcsfuse``.
    """
    real = os.path.realpath(path)
    mount = _mount_of(real, mounts or MOUNTS)
    if mount is None or mount.kind not in ("fuse", "fuse.gcsfuse"):
        return None
    inside = os.path.relpath(real, mount.point)
    shown = [part for part in (mount.root.strip("/"), "" if inside == "." else inside) if part]
    if mount.source in _ALL_BUCKETS and mount.kind == "fuse.gcsfuse":
        return f"gs://{'/'.join(shown)}"
    return f"gs://{'/'.join([mount.source, *shown])}" if _BUCKET.match(mount.source) else None


def points(*, mounts: Path | None = None) -> list[str]:
    """Where something is mounted, as this process sees it; nothing where the system does not say."""
    try:
        lines = (mounts or MOUNTS).read_text(errors="surrogateescape").splitlines()
    except OSError:  # not Linux
        return []
    return [_plain(fields[4]) for line in lines if len(fields := line.partition(" - ")[0].split(" ")) >= 5]


def _mount_of(real: str, mounts: Path) -> _Mount | None:
    """The mount that a path without links lies on; of several at one point, the last one hides the others."""
    try:
        lines = mounts.read_text(errors="surrogateescape").splitlines()
    except OSError:  # not Linux
        return None
    found: _Mount | None = None
    for line in lines:
        left, _, right = line.partition(" - ")
        fields, of_file_system = left.split(" "), right.split(" ")
        if len(fields) < 5 or len(of_file_system) < 2:
            continue
        mount = _Mount(_plain(fields[3]), _plain(fields[4]), of_file_system[0], _plain(of_file_system[1]))
        if _is_below(real, mount.point) and (found is None or len(mount.point) >= len(found.point)):
            found = mount
    return found


def _is_below(path: str, point: str) -> bool:
    return path == point or path.startswith(point.rstrip("/") + "/")


def _plain(text: str) -> str:
    """The kernel writes spaces and backslashes as octal numbers."""
    return _OCTAL.sub(lambda match: chr(int(match[1], 8)), text)
