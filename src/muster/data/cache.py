"""Folders that appear whole or not at all: built in a temporary one, synced, renamed; one builder per fingerprint."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import json
import os
import secrets
import shutil
import socket
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import xxhash

from muster.core.errors import AccessError, MusterError
from muster.core.typed_json import Json

_PARTIAL = ".partial-"
_KEPT = ".kept-"
#: Work that nobody has gone on with for so long is removed.
_KEPT_S = 3 * 86400
_SUMS = "sums.json"
#: Arrays are large and carry sums of their own (``sequences``).
_ARRAYS = ".npy"


def fingerprint(identity: Json) -> str:
    """32 hex digits that identify a JSON value; the order of its keys does not matter."""
    text = json.dumps(identity, sort_keys=True, separators=(",", ":"), ensure_ascii=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def code_version(modules: Iterable[str] = ()) -> str:
    """SHA-256 over the source of this package and of the packages of ``modules`` (source types, tasks): data prepared
    by other code is never used."""
    files = set(Path(__file__).parent.rglob("*.py"))
    for name in modules:
        module = sys.modules[name]
        path = Path(str(module.__file__))
        files |= set(path.parent.rglob("*.py")) if module.__package__ else {path}
    digest = hashlib.sha256()
    for path in sorted(files, key=lambda path: (path.name, str(path))):
        digest.update(path.name.encode() + path.read_bytes())
    return digest.hexdigest()[:16]


def build_once(folder: Path, build: Callable[[Path, Path], None]) -> bool:
    """Make sure ``folder`` exists, built by ``build`` in a temporary folder; False where it existed already.

    Safe among processes: one builds, the others wait; the next builder removes what a killed one left. The second
    folder that ``build`` is given is for work that outlasts a kill: the next build of the same ``folder`` finds it.

    Raises:
        AccessError, MusterError: the folder cannot be written, or the disk is full. Nothing is left behind.
    """
    if folder.is_dir():
        return False
    with translated(folder.parent):
        folder.parent.mkdir(parents=True, exist_ok=True)
        with _locked(folder.parent / f".{folder.name}.lock") as is_alone:
            if folder.is_dir():
                return False
            _clear_abandoned(folder.parent)
            partial = folder.parent / f"{_PARTIAL}{folder.name}{_mine()}"
            kept = folder.parent / f"{_KEPT}{folder.name}{'' if is_alone else _mine()}"
            goes_on = False
            try:
                partial.mkdir()
                kept.mkdir(exist_ok=is_alone)
                build(partial, kept)
                _sync(partial)
                os.rename(partial, folder)
                _sync_folder(folder.parent)
            except OSError as error:
                # A lock that does not hold across hosts (some network file systems) lets two builders meet here.
                if folder.is_dir() and error.errno in (errno.ENOTEMPTY, errno.EEXIST):
                    return False
                raise
            except KeyboardInterrupt:
                goes_on = is_alone
                raise
            finally:
                shutil.rmtree(partial, ignore_errors=True)
                if not goes_on:
                    shutil.rmtree(kept, ignore_errors=True)
    return True


def seal(folder: Path) -> None:
    """Write down the checksum of every file in it but the arrays. Raises OSError."""
    (folder / _SUMS).write_text(json.dumps(_sums(folder), indent=1, sort_keys=True))


def damage(folder: Path) -> str | None:
    """What is not as it was sealed: a file, or the seal; None: everything is whole. It is read twice before it is
    called damaged. Raises OSError where it cannot be read, which says nothing about what is there."""
    return _damage(folder) and _damage(folder)


def says_nothing(error: OSError) -> bool:
    """Whether it is trouble of the disk, the network or this process, after which the files may be whole."""
    return error.errno not in (None, errno.ENOENT, errno.ENOTDIR, errno.EISDIR)


def _damage(folder: Path) -> str | None:
    try:
        sealed, found = json.loads((folder / _SUMS).read_text()), _sums(folder)
    except (OSError, ValueError) as error:
        if isinstance(error, OSError) and says_nothing(error):
            raise
        return f"{_SUMS}: {error}"
    if not isinstance(sealed, dict):
        return f"{_SUMS} is no list of sums"
    return next((name for name in sorted({*sealed, *found}) if sealed.get(name) != found.get(name)), None)


def discard(folder: Path, inode: int) -> None:
    """Remove a damaged folder, so that it is built again; one that others have built there since stays.

    What has it mapped goes on reading it. A folder that cannot be removed stays.
    """
    with contextlib.suppress(OSError), _locked(folder.parent / f".{folder.name}.lock"):
        if folder.stat().st_ino == inode:
            away = folder.parent / f"{_PARTIAL}{folder.name}-damaged-{secrets.token_hex(4)}{_mine()}"
            os.rename(folder, away)
            shutil.rmtree(away, ignore_errors=True)


def _sums(folder: Path) -> dict[str, str]:
    files = [path for path in folder.rglob("*") if path.is_file() and path.suffix != _ARRAYS]
    return {
        path.relative_to(folder).as_posix(): xxhash.xxh3_64_hexdigest(path.read_bytes())
        for path in files
        if path != folder / _SUMS
    }


@contextmanager
def translated(place: Path) -> Iterator[None]:
    """Translate the file system's errors about ``place``."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise MusterError(
                f"no space left for prepared data in {place}", hint="free some, or set data.cache_dir"
            ) from error
        if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
            raise AccessError(
                f"{place} cannot be written: {error.strerror}", hint="set data.cache_dir to a folder that you own"
            ) from error
        if error.errno in (errno.ENOTDIR, errno.EEXIST):
            raise AccessError(f"{place} is not a folder", hint="set data.cache_dir to a folder") from error
        raise


@contextmanager
def _locked(path: Path) -> Iterator[bool]:
    """An exclusive lock that leaves no file behind: its holder removes the file, and a waiter that then finds
    itself on a removed file starts over. False: there are no locks on this file system."""
    while True:
        file = open(path, "a")  # noqa: SIM115 (held for the lock's life)
        try:
            fcntl.flock(file, fcntl.LOCK_EX)
        except OSError as error:
            file.close()
            if error.errno not in (errno.ENOLCK, errno.EOPNOTSUPP, errno.EINVAL):
                raise
            yield False  # the rename alone decides
            path.unlink(missing_ok=True)
            return
        try:
            if os.fstat(file.fileno()).st_ino == os.stat(path).st_ino:
                break
        except FileNotFoundError:
            pass
        file.close()
    try:
        yield True
    finally:
        path.unlink(missing_ok=True)
        file.close()


def _mine() -> str:
    """How the names of folders end that are removed once this process is gone."""
    return f"-{socket.gethostname()}-{os.getpid()}"


def _clear_abandoned(parent: Path) -> None:
    """Remove what killed builders of this host left, and work that nobody went on with."""
    here = f"-{socket.gethostname()}-"
    for path in (*parent.glob(f"{_PARTIAL}*{here}*"), *parent.glob(f"{_KEPT}*{here}*")):
        pid = path.name.rsplit("-", 1)[1]
        if path.name.endswith(f"{here}{pid}") and pid.isdigit() and not _alive(int(pid)):
            shutil.rmtree(path, ignore_errors=True)
    for path in parent.glob(f"{_KEPT}*"):
        with contextlib.suppress(OSError):
            newest = max(each.stat().st_mtime for each in (path, *path.iterdir()))
            if newest < time.time() - _KEPT_S:
                shutil.rmtree(path, ignore_errors=True)


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True


def _sync(folder: Path) -> None:
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            with open(path, "rb") as file:
                os.fsync(file.fileno())
        else:
            _sync_folder(path)
    _sync_folder(folder)


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
