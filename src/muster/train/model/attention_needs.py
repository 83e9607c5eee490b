"""What a model needs of an attention kernel: observed in a forward pass without memory, else read from its config."""

from __future__ import annotations

import copy
import re
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel


@dataclass(frozen=True)
class Needs:
    """What a model requires of its attention."""

    window: int | None
    """Sliding window that is shorter than the sequences, if any."""
    softcap: bool
    sinks: bool
    head_dim: int
    dropout: bool
    own_kernels: bool
    """The model was seen to call kernels through transformers' table, so that others can be registered."""
    sdpa: bool
    flash: bool
    flex: bool
    own_mask: bool = False
    """It masks more than the future, or adds to its scores: what a kernel without masks would drop."""
    value_dim: int | None = None
    """Head dimension of the values, where it differs."""
    takes_arguments: bool = True
    """Its layers hand our keyword arguments on to the kernel."""


#: Arguments of kernels that are looked at by name, and those that change no result.
_USUAL = re.compile(
    r"dropout|scaling|sliding_window|softcap|s_aux|sinks|position_ids|cache_position|is_causal|use_cache|return_dict|"
    r"logits_to_keep|output_\w+|cu_seq_lens_[qk]|max_length_[qk]|context"
)


@dataclass(frozen=True)
class Call:
    """One layer's call of its attention function."""

    head_dim: int
    value_dim: int
    masked: bool
    given: dict[str, Any]
    """Other keyword arguments."""


def needs_of(model: PreTrainedModel, sequence_length: int) -> Needs:
    """What a transformers model on the meta device needs, by its config and by what its layers ask of a kernel."""
    config = model.config.get_text_config()
    calls = observe(model)
    passed = [{name: value for name, value in call.given.items() if value is not None} for call in calls]
    kinds = getattr(config, "layer_types", None) or []
    window = getattr(config, "sliding_window", None)
    slides = "sliding_attention" in kinds if kinds else getattr(config, "use_sliding_window", True)
    windows = [window] if slides and window else []
    windows += [given["sliding_window"] for given in passed if "sliding_window" in given]
    if "chunked_attention" in kinds:
        windows.append(getattr(config, "attention_chunk_size", None) or sequence_length)
    heads = [call.head_dim for call in calls] or [_head_dim(config)]
    values = [call.value_dim for call in calls if call.value_dim != call.head_dim]
    return Needs(
        window=min((each for each in windows if each < sequence_length), default=None),
        softcap=bool(getattr(config, "attn_logit_softcapping", None)) or any("softcap" in given for given in passed),
        sinks=any("s_aux" in given or "sinks" in given for given in passed)
        or any(name.endswith("sinks") for name, _ in model.named_parameters()),
        head_dim=max(heads),
        dropout=attention_dropout(config) > 0 or any(given.get("dropout", 0.0) > 0 for given in passed),
        own_kernels=bool(calls),
        sdpa=bool(getattr(model, "_supports_sdpa", False)),
        flash=bool(getattr(model, "_supports_flash_attn", False)),
        flex=bool(getattr(model, "_supports_flex_attn", False)),
        own_mask=any(call.masked or unknown_arguments(call.given) for call in calls),
        value_dim=values[0] if values else None,
        takes_arguments=all("cu_seq_lens_q" in given for given in passed),
    )


def unknown_arguments(given: dict[str, Any]) -> list[str]:
    """What a layer hands to its kernel beyond transformers' usual arguments (Inkling: ``position_bias``)."""
    return [name for name, value in given.items() if value is not None and not _USUAL.fullmatch(name)]


def attention_dropout(config: PreTrainedConfig) -> float:
    """By any of the names that it has in configs (GPT-2: ``attn_pdrop``)."""
    values = config.to_dict()
    names = [name for name in values if name.startswith(("attention_", "attn_")) and "drop" in name]
    return max((float(values[name]) for name in names if isinstance(values[name], int | float)), default=0.0)


def _head_dim(config: PreTrainedConfig) -> int:
    heads = getattr(config, "num_attention_heads", 1)
    return int(getattr(config, "head_dim", None) or config.hidden_size // heads)


def observe(model: PreTrainedModel) -> tuple[Call, ...]:
    """The calls of attention that a training step of ``model`` makes, from a forward pass without memory of a copy.

    Those before the first operation that the meta device lacks; none of attention that takes no registered function.
    """
    from transformers import AttentionInterface

    key = f"{type(model).__name__} {model.config.to_json_string(use_diff=False)}"
    if key in _OBSERVED:
        return _OBSERVED[key]
    calls: list[Call] = []

    def record(
        module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **given: Any
    ) -> tuple[Tensor, None]:
        calls.append(Call(query.shape[3], value.shape[3], attention_mask is not None, given))
        return query.new_zeros(*query.shape[:3], value.shape[3]).transpose(1, 2), None

    AttentionInterface.register("muster_observer", record)
    probe = copy.deepcopy(model).train()  # transformers' rotary embeddings remember what they have seen
    tokens = torch.zeros(1, 8, dtype=torch.int64, device="meta")
    bounds = torch.zeros(2, dtype=torch.int32, device="meta")
    names = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k")
    ours = dict(zip(names, (bounds, bounds, 8, 8), strict=True))
    for arguments in (ours, {}):  # layers that need packages for packed sequences refuse ours
        calls.clear()
        with suppress(Exception), torch.no_grad():
            probe.set_attn_implementation("muster_observer")
            probe(input_ids=tokens, position_ids=torch.arange(8, device="meta")[None], use_cache=False, **arguments)
        if calls:
            break
    _OBSERVED[key] = tuple(calls)
    return _OBSERVED[key]


#: What ``observe`` saw in this process, by the model's class and config.
_OBSERVED: dict[str, tuple[Call, ...]] = {}
