"""Whether the weights of ``model.source`` can be loaded, by config and tensor names, before hosts are paid for."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path

from muster.catalog import rows
from muster.config.spec import Model, RunSpec
from muster.config.validation import is_remote
from muster.core.clock import SystemShell
from muster.core.errors import MusterError, Problem
from muster.core.protocols import Shell
from muster.core.typed_json import parse_object, text

TIMEOUT_S = 300.0
INDEX = "model.safetensors.index.json"


def weights_problems(spec: RunSpec, *, shell: Shell | None = None) -> list[Problem]:
    """Why the model cannot be loaded from its source; none where that is not known here: the hub cannot be reached,
    torch is not installed, or the weights are in a bucket. Models of the catalogue are known to load."""
    model = spec.model
    if model is None or model.source is None or is_remote(model.source) or rows.find_model(model.source) is not None:
        return []
    if not all(map(importlib.util.find_spec, ("torch", "transformers"))):
        return []
    try:
        folder, names = _published(model)
        done = (shell or SystemShell()).run(
            [sys.executable, "-P", "-m", "muster.train.fits"],
            env={"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
            stdin=json.dumps({"spec": spec.model_dump(mode="json"), "folder": folder, "names": names}),
            timeout_s=TIMEOUT_S,
        )
    except (MusterError, OSError, ValueError, KeyError):
        return []
    answer = parse_object(done.stdout.encode()) if done.returncode == 0 else {}
    if "problem" not in answer:
        return []
    return [
        Problem("model.source", str(answer["problem"]).replace(folder, model.source), hint=text(answer, "hint") or None)
    ]


def _published(model: Model) -> tuple[str, list[str] | None]:
    """The folder of the model's config.json, and the names of its tensors; None: the folder has the tensors, too.
    Raises KeyError where the hub has no config.json."""
    assert model.source is not None
    if Path(model.source).is_dir():
        return model.source, None
    from muster.data.hub import fetch_model_files, tensor_names

    files = fetch_model_files(model.source, model.revision, ("config.json", INDEX))
    folder = str(files["config.json"].parent)
    if INDEX not in files:
        return folder, tensor_names(model.source, model.revision, "model.safetensors")
    return folder, list(json.loads(files[INDEX].read_text())["weight_map"])
