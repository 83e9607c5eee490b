"""A run's ``job.json``: what a back end without a server of its own writes down of its job, under a lock."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from muster.core.errors import BackendError
from muster.storage import run_registry

_LOCK = ".job.lock"


@contextlib.contextmanager
def locked(run_dir: Path) -> Iterator[None]:
    """One submit or cancel of the run at a time; the lock goes with its process."""
    with open(run_dir / _LOCK, "a+b") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def is_locked(run_dir: Path) -> bool:
    """Whether a submit or a cancel is under way."""
    with open(run_dir / _LOCK, "a+b") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            return True
    return False


def read(run_dir: Path, *, mark: str) -> dict[str, Any] | None:
    """The record; None where there is none, or one without ``mark``, the key by which a back end knows its own.

    Raises:
        BackendError: it is there and cannot be read.
    """
    try:
        result = json.loads((run_dir / "job.json").read_text())
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise BackendError(f"cannot read {run_dir / 'job.json'}: {error}", hint="muster down ends what runs") from error
    return result if isinstance(result, dict) and mark in result else None


def write(run_dir: Path, record: Mapping[str, Any]) -> None:
    """Replace the record. Raises BackendError."""
    try:
        run_registry.replace_text(run_dir / "job.json", json.dumps(record, indent=1) + "\n")
    except OSError as error:
        raise BackendError(f"cannot write {run_dir / 'job.json'}: {os.strerror(error.errno or 0)}") from error
