"""Export: a Hugging Face folder from a run's checkpoint, made and checked in processes of their own."""

from __future__ import annotations

import importlib.util
import json
import os
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from muster.app.handoff.model_card import model_card
from muster.app.handoff.push import CARD, open_repository
from muster.app.handoff.push import push as push_folder
from muster.app.inspect.home_view import bring
from muster.app.inspect.report import report
from muster.app.inspect.status import spec_of
from muster.app.planning.source_run import weights_of
from muster.config.spec import RunSpec
from muster.config.validation import looks_local
from muster.core import event_log
from muster.core.errors import MusterError, UsageError, install_command
from muster.core.processes import run_visibly
from muster.core.typed_json import JsonObject, parse_object, text, texts, whole
from muster.data.weights.model_files import licence_of
from muster.report.run_view import run_view
from muster.storage import run_registry
from muster.storage.run_registry import RunDir


@dataclass(frozen=True, kw_only=True)
class Exported:
    """A folder that was written, reloaded and compared."""

    folder: Path
    lines: tuple[str, ...]
    """Messages about it."""
    step: int
    kind: str
    """model, merged or adapter."""
    note: str = ""
    """How to load an adapter that does not simply load on its base."""
    url: str | None = None
    """Where it is on the hub."""


def export(
    reference: str,
    *,
    out: Path | None = None,
    step: int | None = None,
    best: bool = False,
    merge: bool = True,
    push: str | None = None,
    public: bool = False,
    base: str | None = None,
    verify: bool = True,
) -> Exported:
    """Write the folder; with ``verify`` reload it in a fresh process, compare logits and ids.

    ``best``: of the checkpoint with the lowest held-out loss; default: the newest. ``push``: a repository of the hub
    that it goes to with a model card, private unless ``public``; without ``out`` the folder is not kept then. ``base``:
    the hub's id that an adapter names.

    Raises:
        UsageError: both ``step`` and ``best``, or a ``base`` of a merged model.
        UsageError: no such run, the folder is taken, or the trainer is not installed.
        MusterError: nothing to export, or the comparison failed.
        AccessError, BackendError: the hub refuses, or is out of reach. Asked before anything is exported.
    """
    if best and step is not None:
        raise UsageError("--best and --step name different checkpoints", hint="give one of them")
    if base is not None and merge:
        raise UsageError(f"--base {base} is for an adapter, and this export is merged", hint="add --adapter")
    run = run_registry.find(reference)
    if importlib.util.find_spec("torch") is None:
        raise UsageError("muster export needs torch", hint=install_command("train"))
    bring(run, spec_of(run).backend, "events")
    bring(run, spec_of(run).backend, "outputs")
    hub = open_repository(push, public=public) if push is not None else None
    if hub is not None and out is None:
        with tempfile.TemporaryDirectory(prefix="push-", dir=run.path) as folder:
            found = _exported(run, Path(folder) / "export", step, best=best, merge=merge, base=base, verify=verify)
            return _pushed(hub, str(push), run, found, kept=False)
    found = _exported(run, out, step, best=best, merge=merge, base=base, verify=verify)
    return found if hub is None else _pushed(hub, str(push), run, found, kept=True)


def with_weights(spec: RunSpec, tell: Callable[[str], None]) -> RunSpec:
    """Where ``model.source`` names a run, what that trained: exported into its folder, unless it is there already.

    Raises:
        UsageError, MusterError: as ``export``, or as ``weights_of``.
    """
    weights = weights_of(spec)
    if weights is None:
        return spec
    run, folder = weights.run, weights.folder
    if not folder.is_dir():
        tell(f"model.source: exporting {run.run_id}, {folder.name}")
        export(str(run.path), step=weights.step)
    tell(f"model.source: {run.run_id}, {folder.name}: {folder}")
    return weights.source_of(spec)


def _pushed(hub: Any, repo: str, run: RunDir, found: Exported, *, kept: bool) -> Exported:
    """With its card, on the hub. The card stays in a folder that is kept."""
    seen = run_view(event_log.merged(run.events))
    document = report(str(run.path)).document
    licence = licence_of(found.folder)
    card = model_card(spec_of(run), seen, document, step=found.step, kind=found.kind, licence=licence, note=found.note)
    (found.folder / CARD).write_text(card)
    replaced, unnamed = _without_local_base(found)
    url = push_folder(hub, found.folder, repo, message=f"Step {found.step} of {run.run_id}", replaced=replaced)
    found = replace(found, lines=(*found.lines, *unnamed))
    lines = (*found.lines, f"pushed to {url}") if kept else (
        f"step {found.step} ({found.kind}), pushed to {url}", *([found.note] if found.note else []), *unnamed,
    )  # fmt: skip
    return replace(found, lines=lines, url=url)


def _without_local_base(found: Exported) -> tuple[dict[str, bytes], tuple[str, ...]]:
    """The adapter's settings for the hub, without a path of this machine, and a line about it; nothing of others."""
    path = found.folder / "adapter_config.json"
    settings = parse_object(path.read_bytes()) if found.kind == "adapter" else {}
    if not looks_local(text(settings, "base_model_name_or_path")):
        return {}, ()
    data = json.dumps({**settings, "base_model_name_or_path": None}, indent=2).encode()
    return {path.name: data}, ("on the hub the adapter names no base, a folder of this machine: --base ORG/NAME does",)


def _exported(
    run: RunDir, out: Path | None, step: int | None, *, best: bool, merge: bool, base: str | None, verify: bool
) -> Exported:
    argv = [sys.executable, "-P", "-m", "muster.train.export.hf_folder", "--run-dir", str(run.path)]
    if out is not None:
        argv += ["--out", os.path.abspath(os.path.expanduser(out))]
    if step is not None:
        argv += ["--step", str(step)]
    if best:
        argv.append("--best")
    if not verify:
        argv.append("--no-verify")
    if not merge:
        argv += ["--adapter", *(["--base", base] if base else [])]
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
    return Exported(
        folder=Path(text(record, "folder")), lines=tuple(texts(record, "lines")), step=whole(record, "step"),
        kind=text(record, "kind"), note=text(record, "note"),
    )  # fmt: skip
