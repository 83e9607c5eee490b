"""The JSON files of an exported folder, in the form that programs of several versions read."""

from __future__ import annotations

import json
from pathlib import Path

import torch

from muster.core.typed_json import Json, JsonObject, at, child
from muster.train.export.sources import ExportSources


def write_config(folder: Path, sources: ExportSources, dtype: torch.dtype) -> None:
    sources.config.architectures = [type(sources.model).__name__]
    sources.config.dtype = dtype
    sources.config.save_pretrained(folder)
    path = folder / "config.json"
    before = sources.folder.path / path.name if sources.folder else None
    base: JsonObject = json.loads(before.read_bytes()) if before is not None else {}
    written = with_old_names(json.loads(path.read_bytes()), base)
    path.write_text(json.dumps(written, indent=2, sort_keys=True) + "\n")


def with_old_names(config: JsonObject, base: JsonObject) -> dict[str, Json]:
    """``config``, as transformers 5 saves it, with the keys of transformers 4 in addition; ``base``: the source's.

    Without them transformers 4 (and ctranslate2 and optimum-onnx, which use it) takes its defaults, without a warning.
    Rope parameters that differ by kind of layer (Gemma 3, OLMo 3) stay as they are: the top has room for one set.
    """
    result: dict[str, Json] = {
        key: with_old_names(child(config, key), child(base, key)) if key.endswith("_config") else value
        for key, value in config.items()
    }
    if "dtype" in config:
        result["torch_dtype"] = config["dtype"]
    rope = child(config, "rope_parameters")
    if "rope_type" in rope:
        theta, share = at(rope, "rope_theta"), at(rope, "partial_rotary_factor")
        scaling = {key: value for key, value in rope.items() if key not in ("rope_theta", "partial_rotary_factor")}
        result["rope_theta"] = theta
        # Phi 3 and OLMo in transformers 4 refuse any other spelling than the base's.
        result["rope_scaling"] = None if scaling == {"rope_type": "default"} else base.get("rope_scaling") or scaling
        if share is not None:
            result["partial_rotary_factor"] = share
        if str(config.get("model_type")).startswith("gpt_neox"):
            result |= {"rotary_emb_base": theta, "rotary_pct": share}
    return result
