"""The shape of a run file's model, found without network."""

from __future__ import annotations

import importlib.util
import json
import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from muster.app.inspect.status import spec_of
from muster.app.planning.source_run import source_run
from muster.catalog import rows
from muster.config.spec import Model, RunSpec, TrainedTokenizer
from muster.config.tpu_rules import not_on_tpus, not_submitted
from muster.config.validation import combinations, heads_problems, is_remote, model_features
from muster.core.clock import SystemShell
from muster.core.errors import MusterError, Problem, UsageError
from muster.core.flops import ModelShape
from muster.core.protocols import Shell
from muster.core.typed_json import JsonObject, parse_object, text
from muster.data.weights.model_types import untrained

TIMEOUT_S = 300.0
INDEX = "model.safetensors.index.json"


def unfit(spec: RunSpec) -> list[Problem]:
    """Why ``spec`` is neither planned nor submitted: TPUs where none are made, a model of a type that is not trained,
    or one that cannot be split as asked."""
    unable = not_submitted(spec) or _type_problem(spec)
    return [unable] if unable is not None else layout_problems(spec)


def _type_problem(spec: RunSpec) -> Problem | None:
    """What its config says against the model, where that is known here."""
    config = _config_here(spec.model) if spec.model is not None else None
    if spec.model is None or config is None:
        return None
    reason = untrained(config)
    if spec.resources.device == "tpu":
        reason = reason or not_on_tpus(config.get("model_type"))
    if reason is None:
        return None
    key = "model.source" if spec.model.source else "model.config"
    return Problem(key, reason[0].removeprefix("model: "), hint=reason[1])


def _config_here(model: Model) -> JsonObject | None:
    """Its config.json, of the run file, a local file or a local folder."""
    if isinstance(model.config, Mapping):
        return model.config
    path = Path(model.config or model.source or "")
    file = path / "config.json" if path.is_dir() else path
    try:
        return parse_object(file.read_bytes()) if file.is_file() else None
    except (OSError, ValueError):
        return None


def layout_problems(spec: RunSpec) -> list[Problem]:
    """Why the layout cannot be, with a model that is known here: heads that tp does not divide, experts."""
    features = model_features((spec.model and _config_here(spec.model)) or {})
    tp, heads = spec.parallelism.tp, list[Problem]()
    with suppress(UsageError):  # unknown here; its hosts will see
        shape = shape_of(spec)
        features |= {"experts": "a mixture of experts"} if shape.experts is not None else {}
        heads += heads_problems(tp, shape.heads, shape.kv_heads) if tp > 1 else ()
    return [*heads, *combinations(spec, features)]


def shape_of(spec: RunSpec) -> ModelShape:
    """The model's shape without network: from the file, a local folder, the catalogue, or the hub's local cache.

    Raises:
        UsageError: the model is not known on this machine.
    """
    model = spec.model
    if model is None:
        raise UsageError("a run with `command` cannot be planned: what it computes is not known")
    if isinstance(model.config, Mapping):
        config = dict(model.config)
        if isinstance(model.tokenizer, TrainedTokenizer):
            config.setdefault("vocab_size", model.tokenizer.vocab_size)
        return ModelShape.from_config(config)
    if (run := source_run(model)) is not None:
        return shape_of(spec_of(run))
    name = model.config if isinstance(model.config, str) else model.source
    assert name is not None
    path = Path(name)
    file = path / "config.json" if path.is_dir() else path
    if file.is_file():
        try:
            return ModelShape.from_config(json.loads(file.read_text(encoding="utf-8")))
        except (OSError, ValueError) as error:
            raise UsageError(f"{file} is not a model configuration: {error}") from error
    known = rows.find_model(name)
    if known is None:
        raise UsageError(
            f"the shape of {name} is not in the catalogue",
            hint="give model.source=FOLDER with a config.json, or model.config=PATH/config.json; known: "
            + ", ".join(list(rows.models())[:4])
            + "...",
        )
    return known.shape


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
