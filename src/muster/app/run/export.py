"""Export: a Hugging Face folder from a run's checkpoint, made and checked in processes of their own."""

from __future__ import annotations

import importlib.util
import os
import sys
from dataclasses import dataclass
from pathlib import Path

from muster.app.inspect.home_view import bring
from muster.app.inspect.status import spec_of
from muster.core.errors import MusterError, UsageError
from muster.core.processes import run_visibly
from muster.core.typed_json import JsonObject, parse_object, text, texts, whole
from muster.storage import run_registry


@dataclass(frozen=True, kw_only=True)
class Exported:
    """A folder that was written, reloaded and compared."""

    folder: Path
    lines: tuple[str, ...]
    """Messages about it."""


def export(
    reference: str, *, out: Path | None = None, step: int | None = None, best: bool = False, merge: bool = True
) -> Exported:
    """Write the folder, reload it in a fresh process, compare logits. ``best``: of the checkpoint with the lowest
    held-out loss; default: the newest.

    Raises:
        UsageError: both ``step`` and ``best``.
        UsageError: no such run, the folder is taken, or the trainer is not installed.
        MusterError: nothing to export, or the comparison failed.
    """
    if best and step is not None:
        raise UsageError("--best and --step name different checkpoints", hint="give one of them")
    run = run_registry.find(reference)
    if importlib.util.find_spec("torch") is None:
        raise UsageError("muster export needs torch", hint="pip install 'muster[train]'")
    bring(run, spec_of(run).backend, "events")
    bring(run, spec_of(run).backend, "outputs")
    argv = [sys.executable, "-P", "-m", "muster.train.export.hf_folder", "--run-dir", str(run.path)]
    if out is not None:
        argv += ["--out", os.path.abspath(os.path.expanduser(out))]
    if step is not None:
        argv += ["--step", str(step)]
    if best:
        argv.append("--best")
    if not merge:
        argv.append("--adapter")
    code, printed = run_visibly(argv)
    record: JsonObject = {}
    for line in reversed(printed.splitlines()):
        try:
            record = parse_object(line)
            break
        except ValueError:
            continue
    if code != 0 or "folder" not in record:
        reason = text(record, "error", default=f"the export ended with code {code}")
        error = MusterError(reason, hint=text(record, "hint") or None)
        error.exit_code = whole(record, "exit_code", default=1) or 1
        raise error
    return Exported(folder=Path(text(record, "folder")), lines=tuple(texts(record, "lines")))
