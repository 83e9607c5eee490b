"""Runs on this machine: their ids, their folders, and the registry that finds one by its id.

::

    <home>/runs/<run_id>/     a run's folder, unless run_dir names another
    <home>/index/<run_id>     one line: the folder of a run elsewhere

A run's folder holds ``run_id``, ``run.yaml`` (as given), ``resolved.json`` and a copy, ``token``, ``job.json``,
``lease.json``, ``events/``, ``logs/``, ``memory/``, ``checkpoints/``, ``traces/``, ``tensorboard/``, ``trackers/``,
``tokenizer/`` and exports. It is made for its owner alone (mode 0700), who may open it to readers later; no other user
may write in it.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import secrets
import shutil
import stat
import tempfile
import time
import unicodedata
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from muster.core import environment, processes, resolved_file
from muster.core.errors import AccessError, UsageError
from muster.core.processes import replace_text as replace_text  # of every file of a run's folder

MAX_ID = 50
#: Layout of a run's folder, with its keys and kinds of events. Older formats and the last commit that reads each:
FORMAT = 4
_READ_BY = {1: "commit 77c47f8", 2: "commit 861fac38", 3: "commit 331955c5"}
#: File of a local run folder that names the URI of the run's home; absent: the folder is the home.
HOME_FILE = "home"
SUBMIT_LOCK = ".submit.lock"
_ID = re.compile(r"^[a-z]([a-z0-9-]{0,48}[a-z0-9])?$")


def home(environ: Mapping[str, str] | None = None) -> Path:
    """``$MUSTER_HOME`` or ``~/.muster``."""
    return (environment.current() if environ is None else environment.read(environ)).home


def new_run_id(name: str, *, now_s: float | None = None, salt: str | None = None) -> str:
    """An id from the run's name, UTC time and 4 hex digits: a DNS label (at most 50 characters), unique in practice."""
    stamp = time.strftime("%Y%m%d-%H%M%S", time.gmtime(now_s))
    tail = f"-{stamp}-{salt or secrets.token_hex(2)}"
    return slug(name, MAX_ID - len(tail)) + tail


def slug(name: str, length: int) -> str:
    """``name`` in lower-case letters, digits and single dashes, beginning with a letter; ``run`` for nothing."""
    plain = unicodedata.normalize("NFKD", name).encode("ascii", "ignore").decode().lower()
    result = re.sub(r"[^a-z0-9]+", "-", plain).strip("-")
    if not result:
        return "run"
    if not result[0].isalpha():
        result = f"run-{result}"
    return result[:length].strip("-")


@dataclass(frozen=True)
class _Inside:
    """A path in a run's folder."""

    name: str

    def __get__(self, run: RunDir, owner: type[RunDir]) -> Path:
        return run.path / self.name


@dataclass(frozen=True)
class RunDir:
    """The paths of one run. Nothing is created by asking."""

    path: Path
    run_id: str

    run_file = _Inside("run.yaml")
    resolved = _Inside(resolved_file.NAME)
    token = _Inside("token")
    job = _Inside("job.json")
    lease = _Inside("lease.json")
    events = _Inside("events")
    logs = _Inside("logs")
    checkpoints = _Inside("checkpoints")

    @property
    def is_at_home(self) -> bool:
        """Whether its folder follows from its id."""
        return self.path == place(self.run_id, None)


def place(run_id: str, run_dir: str | None) -> Path:
    """Where the run lives."""
    return Path(os.path.expanduser(run_dir)).absolute() if run_dir else home() / "runs" / run_id


def export_folder(path: Path, step: int, kind: str) -> Path:
    """Where ``muster export`` puts a checkpoint of the run in ``path``; ``kind``: model, merged or adapter."""
    return path / "exports" / f"step-{step:08d}-{kind}"


def existing_id(path: Path) -> str | None:
    """The id of the run in ``path``, by this machine's registry where the file that states it is damaged; None where
    there is none."""
    try:
        run_id = processes.read_plain(path / "run_id", most=1 << 10).decode(errors="replace").strip()
    except OSError:
        return None
    return run_id if _ID.match(run_id) else _registered_as(path)


def _registered_as(path: Path) -> str | None:
    if path.parent == home() / "runs":
        return path.name if _ID.match(path.name) else None
    index = home() / "index"
    for entry in sorted(index.iterdir()) if index.is_dir() else []:
        with contextlib.suppress(OSError, ValueError):
            if _ID.match(entry.name) and entry.read_text() == f"{path}\n":
                return entry.name
    return None


def create(run_id: str, path: Path, *, run_file: str, resolved: str) -> RunDir:
    """Make (or complete) the run's folder, its token and its entry in the registry.

    Raises:
        UsageError: the folder cannot be made, holds something other than a run, or others can write in it.
    """
    run = RunDir(path=path, run_id=run_id)
    try:
        _check_place(path)
        make_folder(path)
        replace_text(path / "format", f"{FORMAT}\n")  # before the id: a folder with an id and no format is of 0.1.0
        replace_text(path / "run_id", run_id + "\n")
        replace_text(run.run_file, run_file)
        resolved_file.write(path, resolved)
        make_folder(run.logs)
        _make_token(run.token)
        if path != home() / "runs" / run_id:
            index = home() / "index"
            make_folder(index)
            replace_text(index / run_id, f"{path}\n")
    except OSError as error:
        raise _cannot_make(path, error) from error
    return run


def _cannot_make(path: Path, error: OSError) -> UsageError:
    """``path``: the run's folder. What failed may be the registry, which ``run_dir`` does not move."""
    failed = Path(os.fsdecode(error.filename)) if error.filename else path
    if failed.is_relative_to(home()) or home().is_relative_to(failed):
        what, hint = str(home()), "MUSTER_HOME=DIR chooses another place for runs and the list of them"
    else:
        what, hint = f"the run's folder {path}", "run_dir=PATH chooses another place"
    return UsageError(f"cannot make {what}: {error.strerror}", hint=hint)


def _check_place(path: Path) -> None:
    """Raise UsageError where ``path`` holds something other than a run, or one of another format; OSError."""
    if existing_id(path) is not None:
        check_format(path)
    elif path.is_dir() and any(entry.name != SUBMIT_LOCK for entry in path.iterdir()):
        raise UsageError(f"{path} is not empty and holds no run", hint="choose another run_dir")


def lock_submit(folder: Path, name: str = SUBMIT_LOCK) -> BinaryIO | None:
    """The lock for starting a run in ``folder``, which is made: held until it is closed, or its process ends.

    None: another one holds it.

    Raises:
        UsageError: as ``create``; nothing is written then.
    """
    try:
        if name == SUBMIT_LOCK:
            _check_place(folder)
            make_folder(home() / "index")  # first: nothing is made where the run could not be found again
        make_folder(folder)
        while True:
            file = processes.open_log(folder / name)
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                file.close()
                return None
            if os.fstat(file.fileno()).st_nlink:
                return file
            file.close()  # its holder removed the folder: a new lock file counts now
    except OSError as error:
        raise _cannot_make(folder, error) from error


def clear(folder: Path, *, made: bool) -> None:
    """Remove what a submit that failed has written into ``folder``; with ``made``, that too.

    The lock goes last, after the files that mark a run: meanwhile another submit there is refused.
    """
    with contextlib.suppress(OSError):
        for entry in sorted(folder.iterdir(), key=lambda entry: entry.name in ("run_id", "format")):
            if entry.name == SUBMIT_LOCK:
                continue
            if entry.is_dir() and not entry.is_symlink():
                shutil.rmtree(entry, ignore_errors=True)
            else:
                entry.unlink(missing_ok=True)
    _remove_empty(folder, made=made)


def unlock_submit(folder: Path, *, made: bool) -> None:
    """Remove the lock of ``lock_submit`` where nothing else has come into the folder; with ``made``, that too."""
    with contextlib.suppress(OSError):
        if [entry.name for entry in folder.iterdir()] == [SUBMIT_LOCK]:
            _remove_empty(folder, made=made)


def delete(run: RunDir) -> None:
    """Remove the run's folder and its entry in the registry. Links in it are removed, never followed.

    Raises:
        AccessError: something in it cannot be deleted.
    """
    clear(run.path, made=True)
    with contextlib.suppress(FileNotFoundError):
        left = [entry.name for entry in run.path.iterdir()]
        if left:
            raise AccessError(f"{len(left)} entries of {run.path} cannot be deleted: {left[0]}", hint="whose are they?")
    (home() / "index" / run.run_id).unlink(missing_ok=True)


def forgotten() -> list[str]:
    """Entries of the registry whose folder is gone from a place that is there, or holds another run now."""
    index = home() / "index"
    result = []
    for entry in sorted(index.iterdir()) if index.is_dir() else []:
        with contextlib.suppress(OSError, ValueError):
            target = Path(entry.read_text().strip())
            if _ID.match(entry.name) and target.parent.is_dir() and existing_id(target) != entry.name:
                result.append(entry.name)
    return result


def forget(run_id: str) -> None:
    """Remove an entry of ``forgotten``."""
    if run_id in forgotten():
        (home() / "index" / run_id).unlink(missing_ok=True)


def _remove_empty(folder: Path, *, made: bool) -> None:
    with contextlib.suppress(OSError):
        (folder / SUBMIT_LOCK).unlink(missing_ok=True)
        if made:
            folder.rmdir()


def find(reference: str, *, any_format: bool = False) -> RunDir:
    """The run that ``reference`` names: an id, the beginning of one id, a folder, its last name, or ``last``.

    ``any_format``: also one that this version does not read, whose id and back end are all that may be used.

    Raises:
        UsageError: none, several, or one that was written in another format.
    """

    def readable(path: Path, run_id: str) -> RunDir:
        if not any_format:
            check_format(path)
        return RunDir(path=path, run_id=run_id)

    if not reference:
        raise UsageError("no run named", hint="a run is named by its id, its folder, or `last`")
    as_path = Path(os.path.expanduser(reference))
    is_folder = os.path.isdir(as_path)  # as_path.is_dir() raises for a name that is too long
    if is_folder and (run_id := existing_id(as_path.absolute())):
        return readable(as_path.absolute(), run_id)
    known = dict(registry())
    if reference == "last" and known:
        newest = max(known, key=lambda run_id: _made(known[run_id]))
        return readable(known[newest], newest)
    matching = (
        [run_id for run_id in known if run_id == reference]
        or [run_id for run_id, path in known.items() if path.name == reference]
        or [run_id for run_id in known if run_id.startswith(reference)]
    )
    if len(matching) == 1:
        return readable(known[matching[0]], matching[0])
    if len(matching) > 1:
        named = sorted(matching, key=lambda run_id: _made(known[run_id]), reverse=True)
        more = ", ..." if len(named) > 5 else ""
        raise UsageError(
            f"{reference!r} names {len(matching)} runs: {', '.join(named[:5])}{more}",
            hint="newest first: give one's id, or `last` for the newest of all",
        )
    if is_folder:
        raise UsageError(f"{reference} holds no run", hint="muster status lists the runs of this machine")
    if os.path.isfile(as_path):
        raise UsageError(f"no run {reference!r}: it is a file", hint="a run is named by its id, its folder, or `last`")
    raise UsageError(f"no run {reference!r}", hint="muster status lists the runs of this machine")


def registry() -> Iterator[tuple[str, Path]]:
    """``(run id, folder)`` of every run of this user that still has its folder."""
    runs, index = home() / "runs", home() / "index"
    for path in sorted(runs.iterdir()) if runs.is_dir() else []:
        if _ID.match(path.name) and (path / "run_id").is_file():
            yield path.name, path
    for entry in sorted(index.iterdir()) if index.is_dir() else []:
        with contextlib.suppress(OSError):
            target = Path(entry.read_text().strip())
            if _ID.match(entry.name) and existing_id(target) == entry.name:
                yield entry.name, target


def format_of(path: Path) -> int:
    """The format that the run in ``path`` was written in."""
    try:
        return int(processes.read_plain(path / "format", most=1 << 10))
    except (OSError, ValueError):
        return 1  # 0.1.0 wrote no such file


def is_readable(path: Path) -> bool:
    """Whether this version reads the run in ``path``. Format 3 differs in homes in buckets alone."""
    written = format_of(path)
    return written == FORMAT or (written == 3 and not (path / HOME_FILE).exists())


def check_format(path: Path) -> None:
    """Raise UsageError where the run in ``path`` was written in a format that this version does not read."""
    if not is_readable(path):
        written = format_of(path)
        reader = _READ_BY.get(written, "a newer commit")
        raise UsageError(
            f"{path} holds a run of format {written}; this version reads format {FORMAT}",
            hint=f"{reader} of Muster's repository reads it, muster down ends it; a new run needs another folder",
        )


def make_folder(path: Path) -> None:
    """Make ``path`` and what is missing above it, for this user alone; a folder that exists keeps its readers.

    Raises:
        UsageError: it exists, and others could exchange what is written in it.
        OSError: it cannot be made.
    """
    if not path.parent.exists():
        make_folder(path.parent)
    try:
        path.mkdir(mode=0o700)
        processes.sync_directory(path.parent)
        return
    except FileExistsError:
        status = path.stat()
        if not stat.S_ISDIR(status.st_mode):
            raise
    if status.st_uid != os.geteuid() and not _gives_files_to(path, status.st_uid):
        raise UsageError(f"{path} belongs to another user (uid {status.st_uid})", hint="choose another one")
    if status.st_mode & 0o022:
        mode = f"mode {stat.S_IMODE(status.st_mode):04o}"
        raise UsageError(f"others can write in {path} ({mode})", hint=f"chmod go-w {path}, or another folder")


def _gives_files_to(folder: Path, uid: int) -> bool:
    """Whether what this user writes there is ``uid``'s: a share with one owner for all (NFS with all_squash)."""
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            return os.fstat(file.fileno()).st_uid == uid
    except OSError:
        return False


def _make_token(path: Path) -> None:
    """32 random bytes as hex, readable by the user alone; kept where there is one."""
    try:
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError:
        if path.stat().st_size >= 64:
            return
        path.unlink()  # a writer was killed before its first byte
        _make_token(path)
        return
    except PermissionError as error:
        raise AccessError(f"cannot write {path}: {error.strerror}") from error
    with os.fdopen(fd, "w") as file:
        file.write(secrets.token_hex(32))
        file.flush()
        os.fsync(fd)
    processes.sync_directory(path.parent)


def _made(path: Path) -> float:
    with contextlib.suppress(OSError):
        return (path / resolved_file.NAME).stat().st_mtime
    return 0.0
