"""What the JAX model computes: dense decoders of a few families, from a transformers config.

A setting that is not listed here is refused by name: ignoring it silently would train another model.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from muster.config.tpu_rules import not_on_tpus
from muster.core.errors import UsageError

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

ACTIVATIONS = {
    "silu": "silu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh",
    "gelu": "gelu",
}


@dataclass(frozen=True, kw_only=True)
class Architecture:
    """One dense decoder. Sizes as transformers names them."""

    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    norm_eps: float
    activation: str
    tied: bool
    """The head's weight is the embedding's."""
    norm_offset: float
    """Added to a norm's weight: Gemma's are stored around 0."""
    embedding_factor: float
    """Applied to looked-up embeddings: Gemma's square root of the hidden size."""
    window: int | None
    """A token sees this many, itself included; None: all before it in its document."""
    longest: int
    """Positions that the model was trained on."""


def architecture_of(config: PreTrainedConfig) -> Architecture:
    """The architecture of a transformers config.

    Raises:
        UsageError: a family or a setting that the JAX model does not compute.
    """
    family = config.model_type
    if (reason := not_on_tpus(family)) is not None:
        raise UsageError(reason[0], hint=reason[1])
    activation = getattr(config, "hidden_activation", None) or config.hidden_act
    if activation not in ACTIVATIONS:
        raise UsageError(f"model: activation {activation} is not computed on device tpu", hint=", ".join(ACTIVATIONS))
    if getattr(config, "mlp_bias", False):
        raise UsageError("model: mlp_bias is not computed on device tpu", hint="resources.device: cuda")
    if getattr(config, "attention_dropout", 0.0):
        raise UsageError("model: attention_dropout is not computed on device tpu", hint="attention_dropout: 0")
    heads = config.num_attention_heads
    return Architecture(
        layers=config.num_hidden_layers,
        heads=heads,
        kv_heads=getattr(config, "num_key_value_heads", None) or heads,
        head_dim=getattr(config, "head_dim", None) or config.hidden_size // heads,
        norm_eps=config.rms_norm_eps,
        activation=ACTIVATIONS[activation],
        tied=bool(config.tie_word_embeddings),
        norm_offset=1.0 if family == "gemma" else 0.0,
        embedding_factor=math.sqrt(config.hidden_size) if family == "gemma" else 1.0,
        window=_window(config),
        longest=int(getattr(config, "max_position_embeddings", None) or 1 << 20),
    )


def check_tp(architecture: Architecture, tp: int) -> None:
    """Raises UsageError where ``tp`` chips cannot share the heads."""
    for name, count in (("num_attention_heads", architecture.heads), ("num_key_value_heads", architecture.kv_heads)):
        if count % tp:
            raise UsageError(f"parallelism.tp {tp} does not divide {name} {count}", hint=f"tp must divide {count}")


def _window(config: PreTrainedConfig) -> int | None:
    """The sliding window of every layer; None: there is none. Raises UsageError where only some layers have one."""
    kinds = set(getattr(config, "layer_types", None) or ())
    if len(kinds) > 1:
        raise UsageError(
            f"model: layers of several kinds ({', '.join(sorted(kinds))}) are not computed on device tpu",
            hint="resources.device: cuda",
        )
    if kinds == {"full_attention"} or not getattr(config, "use_sliding_window", True):
        return None
    window = getattr(config, "sliding_window", None)
    return None if window is None else int(window)
