"""Export: a Hugging Face folder from a run's checkpoint, made and checked in processes of their own."""

from __future__ import annotations

import importlib.util
import json
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from muster.core.errors import MusterError, UsageError
from muster.core.processes import run_visibly
from muster.storage import run_registry


@dataclass(frozen=True, kw_only=True)
class Exported:
    """A folder that was written, reloaded and compared."""

    folder: Path
    lines: tuple[str, ...]
    """Messages about it."""


def export(reference: str, *, out: Path | None = None, step: int | None = None, merge: bool = True) -> Exported:
    """Write the folder, reload it in a fresh process, compare logits.

    Raises:
        UsageError: no such run, the folder is taken, or the trainer is not installed.
        MusterError: nothing to export, or the comparison failed.
    """
    run = run_registry.find(reference)
    if importlib.util.find_spec("torch") is None:
        raise UsageError("muster export needs torch", hint="pip install 'muster[train]'")
    argv = [sys.executable, "-P", "-m", "muster.train.export.hf_folder", "--run-dir", str(run.path)]
    if out is not None:
        argv += ["--out", os.path.abspath(os.path.expanduser(out))]
    if step is not None:
        argv += ["--step", str(step)]
    if not merge:
        argv.append("--adapter")
    code, printed = run_visibly(argv)
    found: dict[str, Any] = {}
    for line in reversed(printed.splitlines()):
        try:
            found = json.loads(line)
            break
        except ValueError:
            continue
    if code != 0 or "folder" not in found:
        error = MusterError(str(found.get("error", f"the export ended with code {code}")), hint=found.get("hint"))
        error.exit_code = int(found.get("exit_code", 1)) or 1
        raise error
    return Exported(folder=Path(found["folder"]), lines=tuple(found.get("lines", ())))
