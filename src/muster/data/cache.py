"""Folders of prepared data that appear whole or not at all, for every process that sees the cache, on any machine.

Guarantee, on a local disk, NFS (with or without locks) and a mounted bucket (Cloud Storage FUSE) alike:

* ``FINGERPRINT`` in the cache names whole data or none. Before it is there nothing is damaged.
* One process prepares; the others wait and say for whom. If it dies, another goes on with what it had tokenised.
* Nothing that a process in its work may need is removed by another. What a dead one made goes at the next start.

The protocol:

1. Who wants to prepare takes the lease ``FINGERPRINT`` (``storage.store.link_lease``); TOKEN names this holding of it.
2. Everything is written below names of its own: the data in ``FINGERPRINT.TOKEN/``, ``sums.json`` as their last file,
   tokens under way in ``.work-FINGERPRINT.TOKEN/``. No folder of data is ever renamed: on a mounted bucket that is one
   move for each of its files, and another host sees half of them. There both are built on a disk of the host, and the
   data are copied: on a mount a file that is not written once and in order is uploaded several times.
3. One last object publishes: the symbolic link ``FINGERPRINT`` to ``FINGERPRINT.TOKEN``, which a single one of any
   number of racing processes can create. Data are there if the link's folder holds ``sums.json``.
4. Damaged data are withdrawn under the lease: ``sums.json`` first, which unpublishes them, then the link and the rest.

A process may lose its lease while it is halted. What it had made is then removed, it finds ENOENT and looks again from
step 1; if it publishes at that very moment, its link names a folder without ``sums.json``: no data, step 3. ENOENT,
EEXIST and ESTALE are looked at again in any case: a mount, or NFS, that repeats a request whose answer was lost reports
them though all went well.

Where there are no symbolic links (FAT), each process prepares, and a rename of its folder publishes. Folders of earlier
versions, which were renamed, are read like these.
"""

from __future__ import annotations

import contextlib
import errno
import filecmp
import hashlib
import json
import math
import os
import re
import shutil
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import xxhash

from muster.core.errors import AccessError, MusterError
from muster.core.processes import sync_directory
from muster.core.typed_json import Json
from muster.storage.store.link_lease import NO_LINKS, Holder, LinkLease, Token, beating, traces

_WORK = ".work-"
#: What is made of one fingerprint, but for its final name itself; ``partial`` and ``kept`` by versions before 0.2.1.
_OURS = re.compile(r"(?=.{33})\.?(?:work-|partial-|kept-)?([0-9a-f]{32})(?:[.-].+)?")
#: Work that no process has resumed for so long is removed.
_KEPT_S = 3 * 86400
_SUMS = "sums.json"
#: Arrays are large and carry sums of their own (``sequences``).
_ARRAYS = ".npy"
#: What a repeated request reports although the first one, whose answer was lost, did what was asked for.
_LOOK_AGAIN = (errno.ENOENT, errno.EEXIST, errno.ESTALE)
_TRIES = 5
_COPY_BYTES = 1 << 24
Progress = Callable[[str, int, int], None]
"""(activity, done, total; total 0: not known)."""


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


def published(folder: Path) -> Path | None:
    """Where the data that ``folder`` names are, whole; None: there are none. Raises OSError: it cannot be known."""
    try:
        place = _place(folder)
        os.stat(place / _SUMS)
    except (FileNotFoundError, NotADirectoryError):
        return None
    return place


def build_once(
    folder: Path, build: Callable[[Path, Path], None], report: Progress, *, scratch: Path | None = None
) -> bool:
    """Make sure ``folder`` is published, built by ``build`` in a folder of its own; False where it was already.

    Safe among processes of any machines (see the module). The second folder that ``build`` is given is for work that
    outlasts a kill: the next build of the same ``folder`` finds it, as the kill left it. ``build`` may be called
    again. ``report`` is called every few seconds while another process builds, with its host.
    ``scratch``: a folder on a disk, in which ``build`` works where the cache is a mounted bucket; it is removed once
    ``folder`` is published.

    Raises:
        AccessError, MusterError: the folder cannot be written, or the disk is full. Nothing is left behind.
    """
    is_built, place = False, None
    with translated(folder.parent):
        for tries_left in reversed(range(_TRIES)):
            try:
                while (place := published(folder)) is None:
                    is_built = _build(folder, build, report, scratch)
                break
            except OSError as error:
                if error.errno not in _LOOK_AGAIN or not tries_left:
                    raise
    if place is not None and not is_built:
        publisher = place.name.partition(".")[2]  # which may have been killed since
        _clear(folder, lambda token: token.is_dead or str(token) == publisher)
    if scratch is not None:
        shutil.rmtree(scratch, ignore_errors=True)
    return is_built


def _build(folder: Path, build: Callable[[Path, Path], None], report: Progress, scratch: Path | None) -> bool:
    """Wait for the lease, and build if nothing is published then; whether it was this process that published."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    lease = LinkLease(folder.parent, folder.name)

    def is_needless(holder: Holder | None) -> bool:
        if holder is not None:
            since = time.strftime("%H:%M:%S", time.gmtime(holder.since_s))
            report(f"wait for {holder.host}, which prepares this data since {since} UTC", 0, 0)
        return published(folder) is not None

    if not lease.take(is_needless):
        return False
    with beating(lease):
        if published(folder) is not None:
            return False
        made = f"{folder.name}.{lease.token}"
        data, work = folder.with_name(made), (scratch or folder.parent) / (_WORK + made)
        built = work / "data" if scratch else data
        is_resumable = False
        try:
            _remove(folder)
            work.mkdir(parents=True, exist_ok=True)  # the name is this process's: what is there, it made
            kept = _resumed(folder, work, lease)
            _clear(folder, lambda token: token != lease.token and (lease.excludes or token.is_dead))
            _clear_others(folder)
            built.mkdir(exist_ok=True)
            build(built, kept)
            seal(built)
            if built == data:
                _sync(data)
            else:
                _copy(built, data, report)
            return lease.is_held() and _publish(data, folder)
        except (KeyboardInterrupt, OSError) as error:
            is_resumable = isinstance(error, KeyboardInterrupt) or error.errno in _LOOK_AGAIN
            raise
        finally:
            with contextlib.suppress(OSError):  # where one cannot know, it stays for the next start
                if not _is_published(data):
                    _remove(data)
            if not is_resumable:
                _remove(work)


def _publish(data: Path, folder: Path) -> bool:
    """Let ``folder`` name ``data``; False where it names those of another process. Raises OSError, AccessError."""
    for _ in range(_TRIES):
        try:
            os.symlink(data.name, folder)
        except FileExistsError:
            if _place(folder) != data:
                if published(folder) is not None:
                    return False
                _remove(folder)
                continue
        except OSError as error:
            if error.errno not in NO_LINKS:
                raise
            try:
                os.rename(data, folder)
            except OSError as refused:
                if refused.errno in (errno.ENOTEMPTY, errno.EEXIST):
                    return False
                raise
        sync_directory(folder.parent)
        return True
    raise AccessError(f"{folder} is there and holds no whole data", hint="remove it, or set data.cache_dir")


def _place(folder: Path) -> Path:
    """The folder that ``folder`` names, there or not; itself where it is no link. Raises OSError."""
    try:
        return folder.with_name(Path(os.readlink(folder)).name)
    except OSError as error:
        if error.errno == errno.EINVAL:
            return folder
        raise


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


def discard(folder: Path, place: Path, inode: int) -> None:
    """Withdraw the damaged data at ``place``, so that they are prepared again; what others have published since stays.

    On a disk what has them mapped goes on reading them. Data that cannot be removed stay, and while another process
    holds the lease: it prepares them, or withdraws these.
    """
    with contextlib.suppress(OSError, MusterError):
        lease = LinkLease(folder.parent, folder.name)
        lease.try_take()
        with beating(lease):
            if published(folder) == place and (place != folder or place.stat().st_ino == inode):
                _remove(place)
                if place != folder:
                    _remove(folder)


def _remove(path: Path) -> None:
    """Remove a link, a file, or a folder with what is in it: first what makes data count. It does what it can."""
    with contextlib.suppress(OSError):
        if path.is_symlink() or path.is_file():
            path.unlink(missing_ok=True)
        elif path.is_dir():
            (path / _SUMS).unlink(missing_ok=True)
            shutil.rmtree(path, ignore_errors=True)


def _sums(folder: Path) -> dict[str, str]:
    # By the listings' own word for what is a file: on a mounted bucket each question after one costs requests.
    files = [Path(parent, name) for parent, _, names in os.walk(folder, onerror=_raise) for name in names]
    return {
        path.relative_to(folder).as_posix(): xxhash.xxh3_64_hexdigest(path.read_bytes())
        for path in files
        if path.suffix != _ARRAYS and path != folder / _SUMS
    }


def _raise(error: OSError) -> None:
    raise error


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


def _resumed(folder: Path, work: Path, lease: LinkLease) -> Path:
    """The folder in ``work`` for what outlasts a kill, with what a dead process had in there.

    A dead process of this machine writes to it no more: it is renamed. Another machine's may only be halted, and is
    copied: each chunk is verified when it is read.
    """
    kept = work / "kept"
    for old, token in _made(work.parent, _WORK + folder.name):
        if token != lease.token and (lease.excludes or token.is_dead):
            with contextlib.suppress(OSError, shutil.Error):
                if token.is_of_here and not kept.exists():
                    with contextlib.suppress(OSError):
                        os.rename(old / kept.name, kept)
                if not kept.exists():
                    shutil.copytree(old / kept.name, kept)
            _remove(old)
    kept.mkdir(exist_ok=True)
    return kept


def _clear(folder: Path, is_over: Callable[[Token], bool]) -> None:
    """Remove what processes for which ``is_over`` made of ``folder`` and is not published. It does what it can."""
    with contextlib.suppress(OSError):
        made = [*_made(folder.parent, folder.name), *_made(folder.parent, _WORK + folder.name)]
        for path, token in (*made, *traces(folder.parent, folder.name)):
            if is_over(token) and not _is_published(path):  # in this order: a process that has ended publishes no more
                _remove(path)


def _clear_others(folder: Path) -> None:
    """Remove what is left of other data than ``folder``: what a dead process of this machine was writing, and what has
    not changed for days."""
    made: dict[str, list[Path]] = {}
    for path in folder.parent.iterdir():
        if (match := _OURS.fullmatch(path.name)) and match[1] != folder.name:
            made.setdefault(match[1], []).append(path)
    for name, paths in made.items():
        with contextlib.suppress(OSError):
            for path, token in _made(folder.parent, name):
                if token.is_dead and not _is_published(path):
                    _remove(path)
            left = [path for path in paths if not _is_published(path)]
            files = [each for path in left for each in (path, *path.rglob("*")) if not each.is_dir()]
            # On a mounted bucket a folder's time is that of the mount.
            if max((each.lstat().st_mtime for each in files or left), default=math.inf) < time.time() - _KEPT_S:
                for path in left:
                    _remove(path)


def _made(parent: Path, prefix: str) -> list[tuple[Path, Token]]:
    """The folders of builders, whose names are PREFIX.TOKEN."""
    names = [name for name in sorted(os.listdir(parent)) if name.startswith(f"{prefix}.")]
    tokens = [Token.read(name.removeprefix(f"{prefix}.")) for name in names]
    return [(parent / name, token) for name, token in zip(names, tokens, strict=True) if token is not None]


def _is_published(path: Path) -> bool:
    """Whether it is data that are named. Raises OSError where it cannot be known."""
    try:
        return path.name[0] != "." and _place(path.with_name(path.name.partition(".")[0])) == path
    except FileNotFoundError:
        return False


def _copy(source: Path, target: Path, report: Progress) -> None:
    """Copy a folder onto a mounted bucket: each file once and in order, ``sums.json`` last. Raises OSError."""
    target.mkdir(exist_ok=True)
    paths = sorted(source.rglob("*"), key=lambda path: (path == source / _SUMS, path))
    done, total = 0, sum(path.stat().st_size for path in paths if path.is_file())
    for path in paths:
        copy = target / path.relative_to(source)
        if path.is_dir():
            copy.mkdir(exist_ok=True)
            continue
        try:
            with open(path, "rb") as read, open(copy, "wb") as written:
                while block := read.read(_COPY_BYTES):
                    written.write(block)
                    done += len(block)
                    report("copy to the mounted bucket", done, total)
        except OSError as error:
            if error.errno not in _LOOK_AGAIN or not filecmp.cmp(path, copy, shallow=False):
                raise


def _sync(folder: Path) -> None:
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            with open(path, "rb") as file:
                os.fsync(file.fileno())
        else:
            sync_directory(path)
    sync_directory(folder)
