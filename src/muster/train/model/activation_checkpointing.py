"""Activation checkpointing of decoder layers: what the forward pass keeps for the backward pass.

``none`` keeps everything. ``full`` keeps a layer's input and runs the layer again. ``selective`` keeps the
results of matrix products and attention and recomputes only the cheap rest.

A layer's ``forward`` is replaced on the instance, so that names of parameters stay as they are and FSDP's hooks,
which run around ``forward``, stay outside of what is repeated.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, ParamSpec, TypeVar

import torch
from torch import nn
from torch._ops import OpOverload
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

Given = ParamSpec("Given")
Result = TypeVar("Result")
#: Operators whose results ``selective`` keeps, by namespace; those that are not loaded are skipped.
KEPT = {
    "aten": (
        "mm",
        "addmm",
        "bmm",
        "_grouped_mm",
        "_scaled_mm",  # float8, as traced by the compiler; torchtitan's list has it too (activation_checkpoint.py)
        "_scaled_dot_product_flash_attention",
        "_scaled_dot_product_flash_attention_for_cpu",
        "_scaled_dot_product_efficient_attention",
        "_scaled_dot_product_cudnn_attention",
        "_flash_attention_forward",
        "_efficient_attention_forward",
    ),
    "muster": ("document_attention",),
    "torch_attn": ("_varlen_attn",),
    "flash_attn": ("_flash_attn_varlen_forward", "_flash_attn_forward"),
    "flash_attn_3": ("fwd", "_flash_attn_forward"),
}


def recompute(layers: Sequence[nn.Module], kind: str) -> None:
    """Apply activation checkpointing of ``kind`` (none, selective, full) to these layers."""
    if kind == "none":
        return
    kept = kept_operators() if kind == "selective" else frozenset()
    for layer in layers:
        layer.forward = checkpointed(layer.forward, kept)


def checkpointed(forward: Callable[Given, Result], kept: frozenset[OpOverload]) -> Callable[Given, Result]:
    """``forward`` that is recomputed in the backward pass, except the results of ``kept`` operators."""
    options: dict[str, Any] = {"use_reentrant": False}
    if kept:
        options["context_fn"] = partial(create_selective_checkpoint_contexts, partial(policy, kept))

    def run(*args: Given.args, **kwargs: Given.kwargs) -> Result:
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        result: Result = checkpoint(forward, *args, **options, **kwargs)  # type: ignore[arg-type]  # torch has keywords too
        return result

    return run


def policy(
    kept: frozenset[OpOverload], _: object, operator: OpOverload, *args: object, **kwargs: object
) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if operator in kept else CheckpointPolicy.PREFER_RECOMPUTE


def kept_operators() -> frozenset[OpOverload]:
    """Every overload of the operators in ``KEPT`` that are loaded in this process."""
    overloads = set()
    for namespace, names in KEPT.items():
        for name in names:
            packet = getattr(getattr(torch.ops, namespace), name, None)
            if packet is not None:
                overloads |= {getattr(packet, overload) for overload in packet.overloads()}
    return frozenset(overloads)
