"""``model.source`` that names a run: the folder into which its trained weights are exported for the next one."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from muster.app.inspect.status import spec_of, supervisor_status
from muster.checkpoint_format import manifest
from muster.config.spec import Model, RunSpec
from muster.core.errors import UsageError
from muster.storage import run_registry
from muster.storage.run_registry import RunDir
from muster.storage.store import open_store

BEST = "best"


def source_run(model: Model | None) -> RunDir | None:
    """The run that ``model.source`` names: by its folder, by its id, or by its folder's name; None: it names none.

    A name with a slash that is no folder here is a hub id.

    Raises:
        UsageError: several runs have folders of that name, or it was written in another format.
    """
    name = model.source if model is not None else None
    if name is None:
        return None
    folder = Path(os.path.expanduser(name))
    if os.path.isdir(folder):
        return run_registry.find(str(folder)) if (folder / "run_id").is_file() else None
    if "/" in name or not any(name in (run_id, path.name) for run_id, path in run_registry.registry()):
        return None
    return run_registry.find(name)


@dataclass(frozen=True, kw_only=True)
class Weights:
    """What a run has trained, as ``muster export`` keeps it."""

    run: RunDir
    step: int
    folder: Path
    """Whether it is there yet or not. The step is in its name, so the same name is the same weights."""

    def source_of(self, spec: RunSpec) -> RunSpec:
        """``spec`` with them as its source."""
        assert spec.model is not None
        model = spec.model.model_copy(update={"source": str(self.folder), "revision": None})
        return spec.model_copy(update={"model": model})


def weights_of(spec: RunSpec) -> Weights | None:
    """Those that ``model.source`` and ``model.revision`` name; None: no run's. Asks the run's checkpoints.

    Raises:
        UsageError: the run has no model or no such checkpoint, or still makes checkpoints and none is chosen.
    """
    run = source_run(spec.model)
    if run is None or spec.model is None:
        return None
    of = spec_of(run)
    if of.model is None:
        raise UsageError(
            f"model.source: {run.run_id} ran a command of its own: there is no model that Muster knows",
            hint="give the folder that it wrote",
        )
    step, kind = _step(run, of, spec.model.revision), "merged" if of.model.lora else "model"
    return Weights(run=run, step=step, folder=run_registry.export_folder(run.path, step, kind))


def located(spec: RunSpec) -> RunSpec:
    """``spec`` with the weights' folder as its source, where it names a run. Raises as ``weights_of``."""
    weights = weights_of(spec)
    return spec if weights is None else weights.source_of(spec)


def _step(run: RunDir, of: RunSpec, revision: str | None) -> int:
    found = manifest.committed(open_store(), of.checkpoint_uri(run.path))
    steps = ", ".join(str(each.step) for each in found) or "none"
    if revision is not None and revision != BEST:
        if not any(str(each.step) == revision for each in found):
            raise UsageError(
                f"model.revision: {run.run_id} has no checkpoint of step {revision}", hint=f"{BEST}, or one of: {steps}"
            )
        return int(revision)
    if supervisor_status(run) is not None:
        raise UsageError(
            f"model.source: {run.run_id} is running: its newest checkpoint will be another one",
            hint=f"wait until it has ended, or name a step that it keeps: model.revision: one of {steps}",
        )
    chosen = manifest.best(found) if revision == BEST else found
    if not chosen:
        what = "no checkpoint that was evaluated" if found else "no checkpoint"
        raise UsageError(f"model.source: {run.run_id} has {what}", hint=f"there are: {steps}")
    return chosen[0].step
