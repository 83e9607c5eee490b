"""What a sweep is, and which trials it has begun: ``sweep.json`` in its folder, written before anything is done.

A trial's losses, state and cost are in its run; a sweep that was killed is continued from this file and those runs.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, TypeAlias

from muster.core.errors import MusterError, UsageError
from muster.core.processes import read_plain, replace_text
from muster.core.typed_json import Json, JsonObject, Record, Unreadable, decode, encode
from muster.storage import run_registry

NAME = "sweep.json"
LOCK = ".sweep.lock"
TrialState: TypeAlias = Literal["open", "complete", "pruned", "failed"]


@dataclass(frozen=True, kw_only=True)
class TrialRecord(Record):
    """One trial. ``open``: it runs, was stopped, or lost its machine; the sweep goes on with it."""

    number: int
    values: Mapping[str, Json]
    """Key of the run file -> its value in this trial."""
    run_id: str | None = None
    """None: not submitted yet."""
    gpus: str | None = None
    """``CUDA_VISIBLE_DEVICES`` of it, where several trials share a machine's GPUs."""
    state: TrialState = "open"
    reason: str = ""
    """Why it was ended early, or has failed."""
    loss: float | None = None
    """Held-out, at its end: what trials are compared by."""
    max_usd: float | None = None
    """What the sweep set aside for it of ``limits.max_usd``."""


@dataclass(frozen=True, kw_only=True)
class SweepRecord(Record):
    """A sweep: what is varied and how, the resolved run file without the values of a trial, and its trials."""

    name: str
    run_file: Json
    over: tuple[JsonObject, ...]
    sampler: str
    pruner: str
    seed: int
    trials: tuple[TrialRecord, ...] = ()

    def with_trial(self, trial: TrialRecord) -> SweepRecord:
        """With this one instead of the one of its number, or after the others."""
        rest = self.trials[trial.number + 1 :]
        return replace(self, trials=(*self.trials[: trial.number], trial, *rest))


def read(folder: Path) -> SweepRecord | None:
    """The sweep in ``folder``; None where there is none.

    Raises:
        MusterError: the file cannot be read.
    """
    try:
        return decode(SweepRecord, read_plain(folder / NAME))
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, Unreadable) as error:
        raise MusterError(f"{folder / NAME} cannot be read: {error}", hint="start over with another run_dir") from error


def write(folder: Path, record: SweepRecord) -> None:
    """Replace the file: never a half one. Raises OSError."""
    replace_text(folder / NAME, json.dumps(json.loads(encode(record)), indent=1, ensure_ascii=False) + "\n")


def place(name: str) -> Path:
    """Where a sweep of this name lives, if its run file names no place."""
    return run_registry.home() / "sweeps" / run_registry.slug(name, 40)


def every() -> dict[Path, SweepRecord]:
    """Folder -> sweep, of all sweeps of this user that can be read: at home, or around one of the runs."""
    home = run_registry.home() / "sweeps"
    folders = set(home.iterdir()) if home.is_dir() else set()
    folders |= {path.parent for _, path in run_registry.registry() if (path.parent / NAME).is_file()}
    found: dict[Path, SweepRecord] = {}
    for folder in sorted(folders):
        with contextlib.suppress(MusterError):
            if (record := read(folder)) is not None:
                found[folder] = record
    return found


def find(reference: str) -> tuple[Path, SweepRecord] | None:
    """The sweep that ``reference`` names: a folder, its last name, or the sweep's name; None: it names none.

    Raises:
        UsageError: it names several.
    """
    as_path = Path(os.path.expanduser(reference)).absolute()
    if os.path.isdir(as_path) and (record := read(as_path)) is not None:  # is_dir() raises for a name that is too long
        return as_path, record
    named = {folder: record for folder, record in every().items() if reference in (folder.name, record.name)}
    if len(named) > 1:
        folders = ", ".join(map(str, named))
        raise UsageError(f"{reference!r} names {len(named)} sweeps", hint=f"give a folder: {folders}")
    return next(iter(named.items()), None)
