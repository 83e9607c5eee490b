"""A run's ``job.json``: what a back end without a server of its own writes down of its job, under a lock."""

from __future__ import annotations

import contextlib
import fcntl
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from muster.core import processes
from muster.core.errors import BackendError
from muster.core.typed_json import Record, Unreadable, decode, encode, parse_object, whole
from muster.storage import run_registry

SUBMISSION = "submission"
"""Label of a request, and key of ``job.json``: distinguishes the submissions of one run."""


_LOCK = ".job.lock"
_JobRecord = TypeVar("_JobRecord", bound="JobRecord")


@dataclass(frozen=True, kw_only=True)
class JobRecord(Record):
    """What every back end's record has; each adds its own."""

    version: int = 1
    run_id: str
    backend: str
    submission: int
    submitted_wall_ns: int


@contextlib.contextmanager
def locked(run_dir: Path) -> Iterator[None]:
    """One submit or cancel of the run at a time; the lock goes with its process."""
    with processes.open_log(run_dir / _LOCK) as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def is_locked(run_dir: Path) -> bool:
    """Whether a submit or a cancel is under way."""
    with processes.open_log(run_dir / _LOCK) as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            return True
    return False


def read(run_dir: Path, kind: type[_JobRecord], *, backend: str) -> _JobRecord | None:
    """The record; None where there is none, or it is another back end's.

    Raises:
        BackendError: it is there and cannot be read.
    """
    path = run_dir / "job.json"
    try:
        data = processes.read_plain(path)
        if parse_object(data).get("backend") != backend:
            return None
        return decode(kind, data)
    except FileNotFoundError:
        return None
    except (OSError, Unreadable) as error:
        raise BackendError(f"cannot read {path}: {error}", hint="muster down ends what runs") from error


def set_damaged_aside(run_dir: Path, error: BackendError) -> None:
    """Rename the record that ``read`` has refused to ``job.json.damaged``, so that a new one can be begun.

    Raises:
        BackendError: its text is not what ``read`` refused (``error`` itself), or it cannot be renamed.
    """
    if not isinstance(error.__cause__, Unreadable):
        raise error
    path = run_dir / "job.json"
    print(f"note: {error}: kept as {path.name}.damaged, a new one is begun", file=sys.stderr)
    try:
        os.replace(path, path.with_name(f"{path.name}.damaged"))
    except OSError as failed:
        raise BackendError(f"cannot rename {path}: {failed.strerror}") from failed


def submission(run_dir: Path) -> int:
    """How often the run has been submitted, by the record of any back end; 0 where that does not say."""
    try:
        return whole(parse_object(processes.read_plain(run_dir / "job.json")), SUBMISSION, default=1)
    except (OSError, ValueError):
        return 0


def write(run_dir: Path, record: JobRecord) -> None:
    """Replace the record. Raises BackendError."""
    try:
        run_registry.replace_text(run_dir / "job.json", encode(record).decode() + "\n")
    except OSError as error:
        raise BackendError(f"cannot write {run_dir / 'job.json'}: {os.strerror(error.errno or 0)}") from error
