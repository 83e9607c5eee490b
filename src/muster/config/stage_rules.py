"""What a pipeline (``parallelism.pp``) cannot cut."""

from __future__ import annotations

from collections.abc import Iterator

from muster.config.spec import RunSpec
from muster.core.errors import Problem
from muster.core.flops import TIED_BY_DEFAULT
from muster.core.layout import FAMILIES
from muster.core.typed_json import JsonObject


def stage_combinations(spec: RunSpec) -> Iterator[Problem]:
    """What does not go with stages, whatever the model."""
    key, pp = "parallelism.pp", spec.parallelism.pp
    if pp == 1:
        return
    if spec.command is not None:
        yield Problem(key, "cannot be combined with `command`: it cuts no script", hint="pp: 1")
    if spec.parallelism.cp > 1:
        yield Problem(key, f"does not go with cp = {spec.parallelism.cp}: it was never tried", hint="pp: 1, or cp: 1")
    if spec.training.local_steps:
        text = "does not go with training.local_steps: stages would meet the other replicas at different moments"
        yield Problem(key, text, hint="pp: 1, or local_steps: 0")
    if spec.parallelism.splits_backward:
        yield from _weights_apart(spec)


def _weights_apart(spec: RunSpec) -> Iterator[Problem]:
    """What gradients of weights that come after the backward pass do not go with."""
    key, axes, name = "parallelism.pp_schedule", spec.parallelism, spec.parallelism.pp_schedule
    if axes.dp_shard != 1:
        text = f"{name} needs whole parameters: FSDP reduces a layer's gradients when its backward pass ends"
        yield Problem(key, text, hint="dp_shard: 1 (and dp_replicate), or interleaved")
    if axes.tp > 1:
        yield Problem(key, f"{name} does not go with tp = {axes.tp}: it was never tried", hint="tp: 1, or interleaved")
    if spec.training.compile is True:
        text = f"{name} does not go with training.compile: a compiled backward pass is not split"
        yield Problem(key, text, hint="compile: false, or interleaved")
    if spec.model is not None and spec.model.dtype != spec.model.trained_dtype:
        text = f"{name} needs one type: FSDP casts {spec.model.trained_dtype} weights to {spec.model.dtype}"
        same = "dtype: float32" if spec.model.lora else f"master_dtype: {spec.model.dtype}"
        yield Problem(key, text, hint=f"{same}, or interleaved")


def stage_problems(spec: RunSpec, config: JsonObject) -> Iterator[Problem]:
    """What cannot be cut into stages."""
    key, pp, family = "parallelism.pp", spec.parallelism.pp, config.get("model_type")
    layers, chunks = config.get("num_hidden_layers"), spec.parallelism.chunks
    if family not in FAMILIES:
        known = ", ".join(sorted(FAMILIES))
        yield Problem(key, f"{family} is not known to start in the middle of its layers", hint=f"pp: 1, or {known}")
    elif isinstance(layers, int) and pp * chunks > layers:
        each = f" of {chunks} chunks each" if chunks > 1 else ""
        less = "; or fewer pp_chunks" if chunks > 2 else "; or pp_schedule: 1f1b" if chunks > 1 else ""
        hint = f"pp: at most {max(1, layers // chunks)}{less}"
        yield Problem(key, f"{layers} layers do not make {pp} stages{each}", hint=hint)
    if not spec.training.exact:
        return
    if config.get("tie_word_embeddings", family in TIED_BY_DEFAULT):
        yield Problem(
            "training.exact",
            f"cannot hold with pp = {pp} and an embedding tied to the head: one process adds their gradients in float",
            hint="tie_word_embeddings: false, or pp: 1",
        )
    dropout = [name for name, value in config.items() if "dropout" in name and isinstance(value, float) and value > 0]
    dropout += ["model.lora.dropout"] if spec.model is not None and spec.model.lora and spec.model.lora.dropout else []
    if dropout:
        yield Problem(
            "training.exact",
            f"cannot hold with pp = {pp} and {dropout[0]}: the random numbers of a layer follow those of the layers "
            "before it in its process",
            hint="no dropout, or pp: 1",
        )
