"""Remove runs that have ended: their folders, their folders in memory, and their entries in the registry.

Nothing outside a run's own folder is deleted: links in it go, never what they name, and what the run keeps elsewhere (a
bucket, a shared ``checkpoint.dir``) stays and is named.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from muster.app.inspect.home_view import home_of
from muster.app.inspect.status import job, spec_of, status
from muster.app.inspect.supervisor_client import backend_of
from muster.core.errors import AccessError, ConflictError, MusterError, UsageError
from muster.core.typed_json import JsonObject
from muster.core.types import JobState
from muster.storage import memory_dir, run_registry, sweep_record
from muster.storage.memory_dir import MemoryDir
from muster.storage.run_registry import RunDir
from muster.storage.store import local


@dataclass(frozen=True, kw_only=True)
class Removal:
    """A run that can be removed, and what that frees."""

    run: RunDir
    state: JobState
    began_ns: int | None
    bytes: int
    """On disk."""
    memory: tuple[Path, ...] = ()
    """Its folders in this machine's memory."""
    memory_bytes: int = 0
    kept: tuple[str, ...] = ()
    """What it keeps elsewhere, which stays."""

    def to_json(self) -> JsonObject:
        return {
            "run_id": self.run.run_id,
            "run_dir": str(self.run.path),
            "state": self.state.value,
            "bytes": self.bytes,
            "memory_bytes": self.memory_bytes,
            "kept": list(self.kept),
        }


def removals(references: Sequence[str]) -> tuple[list[Removal], list[Path]]:
    """What removing these runs and sweeps would free, each run once, and the folders of the sweeps; of a sweep the runs
    of its trials.

    Raises as ``removal``; a trial whose run is gone already is passed over.
    """
    named: list[str] = []
    folders: list[Path] = []
    for reference in references:
        sweep = sweep_record.find(reference)
        if sweep is None:
            named.append(reference)
            continue
        folder, record = sweep
        known = {run_id for run_id, _ in run_registry.registry()}
        named += [str(trial.run_id) for trial in record.trials if trial.run_id in known]
        folders.append(folder)
    return list({each.run.run_id: each for each in map(removal, named)}.values()), folders


def emptied_sweeps(named: Sequence[Path], chosen: Sequence[Removal]) -> list[Path]:
    """The sweeps' folders ``named``, and those of sweeps that the removal of ``chosen`` leaves without a run.

    Raises:
        ConflictError: such a sweep runs.
    """
    going = {each.run.run_id for each in chosen}
    here = {run_id for run_id, _ in run_registry.registry()} - going
    folders = list(named)
    for folder, record in sweep_record.every().items():
        runs = {trial.run_id for trial in record.trials}
        if runs & going and not runs & here and folder not in folders:
            folders.append(folder)
    for folder in folders:
        _lock_sweep(folder).close()
    return folders


def remove_sweep(folder: Path) -> None:
    """Delete a sweep's record, and its folder where nothing else is in it. Raises ConflictError: it runs."""
    with _lock_sweep(folder):
        (folder / sweep_record.NAME).unlink(missing_ok=True)
        (folder / sweep_record.LOCK).unlink(missing_ok=True)
    with contextlib.suppress(OSError):  # it holds a user's files
        folder.rmdir()


def _lock_sweep(folder: Path) -> BinaryIO:
    lock = run_registry.lock_submit(folder, sweep_record.LOCK)
    if lock is None:
        raise ConflictError(f"a muster sweep runs in {folder}", hint="end it with Ctrl-C first")
    return lock


def removal(reference: str) -> Removal:
    """What removing the run would free. Nothing is changed.

    Raises:
        UsageError: no such run; its folder is a link, or holds a mount, another run or what another run needs.
        ConflictError: it has not ended.
        BackendError: its back end cannot say whether it has.
    """
    run = run_registry.find(reference)
    found = status(run.run_id)
    _check_over(run, found.status.state)
    _check_own(run)
    launcher, _ = job(run, backend_of(run))
    memory = tuple(_memory(run))
    home = home_of(run, launcher)
    kept = [home.uri] if home is not None else []
    with contextlib.suppress(MusterError):
        if (elsewhere := spec_of(run).checkpoint.dir) and not _inside(elsewhere, run.path):
            kept.append(elsewhere)
    return Removal(
        run=run,
        state=found.status.state,
        began_ns=found.summary.began_ns,
        bytes=size_of(run.path),
        memory=memory,
        memory_bytes=sum(size_of(folder) for folder in memory),
        kept=tuple(kept),
    )


def prunable(
    *, older_than_s: float, now_ns: int, states: Sequence[str] = (), keep: int = 0
) -> tuple[list[Removal], list[str]]:
    """Ended runs that began longer ago than that, newest first, but for the ``keep`` newest; and why others are not
    among them, a sentence each. ``states``: only these."""
    found: list[tuple[int, Removal]] = []
    left: list[str] = []
    for run_id, _ in list(run_registry.registry()):
        try:
            each = removal(run_id)
        except ConflictError:
            continue  # it runs: not asked about
        except MusterError as error:
            left.append(f"{run_id} is left alone: {error}")
        else:
            if each.began_ns is not None:
                found.append((each.began_ns, each))
            else:
                left.append(f"{run_id} is left alone: when it was started is not known")
    newest = sorted(found, key=lambda dated: dated[0], reverse=True)
    old = [each for began_ns, each in newest[keep:] if began_ns < now_ns - older_than_s * 1e9]
    return [each for each in old if not states or each.state.value in states], left


def remove(chosen: Removal) -> None:
    """Delete it. Interrupted, it is done again by the same command: what says that this is a run goes last.

    Raises:
        ConflictError: it has been started again meanwhile.
        AccessError: something cannot be deleted; what is deleted stays so.
    """
    run = chosen.run
    lock = run_registry.lock_submit(run.path)
    if lock is None:
        raise ConflictError(f"{run.run_id} is being started", hint="muster status shows it")
    with lock:
        _check_over(run, status(run.run_id).status.state)
        _check_own(run)
        for folder in _memory(run):
            try:
                MemoryDir.open(folder).remove()
            except OSError as error:
                raise AccessError(f"cannot delete {folder}: {error.strerror}") from error
        run_registry.delete(run)


def forgotten() -> list[str]:
    """Entries of the registry whose folder is gone."""
    return run_registry.forgotten()


def forget(run_id: str) -> None:
    run_registry.forget(run_id)


def size_of(folder: Path) -> int:
    """Bytes that it takes on its disk; a file with several names counts once, links count as themselves."""
    seen: set[tuple[int, int]] = set()
    total = 0
    for path, folders, files in os.walk(folder):
        for name in (*folders, *files):
            with contextlib.suppress(OSError):
                status = os.lstat(os.path.join(path, name))
                if (status.st_dev, status.st_ino) not in seen:
                    seen.add((status.st_dev, status.st_ino))
                    total += status.st_blocks * 512
    return total


def _check_over(run: RunDir, state: JobState) -> None:
    """Raise ConflictError where it has not ended, or a process of it is left."""
    if not state.ended:
        raise ConflictError(f"{run.run_id} is {state.value}", hint=f"muster stop {run.run_id} first")
    launcher, handle = job(run, backend_of(run))
    left = [line for line in launcher.remaining(handle) if not line.startswith("memory ")]
    if left:
        raise ConflictError(f"of {run.run_id} is left: {left[0]}", hint=f"muster down {run.run_id} first")


def _check_own(run: RunDir) -> None:
    """Raise UsageError where the run's folder is not its own alone."""
    place = run.path
    if place.is_symlink():
        raise UsageError(f"{place} is a link to {os.readlink(place)}", hint="remove the link and its target yourself")
    mounted = [point for point in local.points() if point != os.path.realpath(place) and _inside(point, place)]
    if mounted:
        raise UsageError(f"{mounted[0]} is mounted in {place}", hint=f"umount {mounted[0]} first")
    for run_id, path in run_registry.registry():
        if run_id == run.run_id:
            continue
        if _inside(str(path), place):
            raise UsageError(f"{run_id} lies in {place}", hint=f"muster rm {run_id} first")
        if any(_inside(name, place) for name in _needed(RunDir(path=path, run_id=run_id))):
            raise UsageError(f"{run_id} uses what lies in {place}", hint=f"muster rm {run_id} first")


def _needed(run: RunDir) -> list[str]:
    """Paths that its run file names; none of one that cannot be read."""
    try:
        spec = spec_of(run)
    except MusterError:
        return []
    return [name for name in (spec.checkpoint.dir, spec.model.source if spec.model is not None else None) if name]


def _inside(name: str, folder: Path) -> bool:
    """Whether the local path ``name`` is ``folder`` or below it."""
    if "://" in name:
        return False
    return Path(os.path.realpath(os.path.expanduser(name))).is_relative_to(os.path.realpath(folder))


def _memory(run: RunDir) -> Iterator[Path]:
    """Folders that are named as the run's; one that its folder records under another name is not trusted."""
    ours, _ = memory_dir.left_over(run.path, run.run_id)
    name = memory_dir.prefix(run.path, run.run_id)
    yield from (folder for folder in ours if folder.name.startswith(f"{name}-"))
