"""Model types and quantisations of transformers that are not trained, by their names in config.json."""

from __future__ import annotations

from muster.core.typed_json import JsonObject, at

#: What ``muster.train.model.conversion`` undoes while weights are read.
DEQUANTISED = ("mxfp4", "fp8")
_NOT_TRAINED = {
    **dict.fromkeys(("xlnet", "xlm", "cpmant"), "is not causal: each token sees those behind it"),
    "prophetnet": "predicts several tokens at once, and has no plain next-token loss",
    "reformer": "hashes its keys at random, so that a document's loss depends on its neighbours",
    **dict.fromkeys(("mllama", "emu3"), "has a text model that transformers does not load again by itself"),
    "blt": "reads bytes in patches that a second model finds",
}


def untrained(config: JsonObject) -> tuple[str, str] | None:
    """Why a model with this ``config.json`` is not trained, and what to do; None: nothing is against it."""
    kind = at(config, "model_type")
    if isinstance(kind, str) and kind in _NOT_TRAINED:
        return f"model: {kind} {_NOT_TRAINED[kind]}", "choose a causal language model"
    method = at(config, "quantization_config", "quant_method")
    if method is not None and method not in DEQUANTISED:
        hint = f"use the folder in bfloat16; {' and '.join(DEQUANTISED)} are dequantised when they are read"
        return f"model: weights quantised by {method} are not trained", hint
    return None
