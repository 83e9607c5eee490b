"""Tensor parallel by the plan that a transformers model ships.

Decoder layers alone are cut: the embedding and the head stay whole on every tp rank (and sharded by FSDP), which
costs their memory and arithmetic tp times, but leaves the chunked loss as it is. Hidden states between layers
are equal on all tp ranks.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from muster.core.errors import UsageError

#: transformers' names of styles -> PyTorch's.
STYLES: dict[str, Callable[[], ParallelStyle]] = {
    "colwise": ColwiseParallel,
    "rowwise": RowwiseParallel,
    # A norm over each head (queries, keys): heads are split, its weight is not, and its gradient is summed.
    "replicated_with_grad_allreduce": partial(SequenceParallel, sequence_dim=2, use_local_output=True),
}


def split(model: Any, layers: list[nn.Module], mesh: DeviceMesh) -> None:
    """Cut the decoder layers of ``model`` over ``mesh``, before FSDP.

    Raises:
        UsageError: no plan, one that needs more than is done here, or numbers that tp does not divide.
    """
    tp = mesh.size()
    styles = plan_of(model, layers)
    check_divides(model.config.get_text_config(), tp)
    for module in model.modules():
        if type(module).__module__.startswith("peft."):
            raise UsageError("model.lora and parallelism.tp do not go together", hint="set parallelism.tp: 1")
    parallelize_module(model, mesh, {name: STYLES[style]() for name, style in styles.items()})


def plan_of(model: Any, layers: list[nn.Module]) -> dict[str, str]:
    """Full module name -> style, for modules inside the decoder layers."""
    rules = getattr(model, "tp_plan", None) or {}
    inside = {id(module) for layer in layers for module in layer.modules()}
    found: dict[str, str] = {}
    for name, module in model.named_modules():
        generic = re.sub(r"\.\d+(?=\.|$)", ".*", name)
        if id(module) in inside and generic in rules:
            found[name] = rules[generic]
    if not found:
        raise UsageError(
            f"{type(model).__name__} ships no tensor-parallel plan", hint="set parallelism.tp: 1 and use dp_shard"
        )
    foreign = sorted({style for style in found.values() if style not in STYLES})
    if foreign:
        raise UsageError(
            f"the tensor-parallel plan of {type(model).__name__} needs {', '.join(foreign)}, which is not supported",
            hint="set parallelism.tp: 1 and use dp_shard",
        )
    return found


def check_divides(config: Any, tp: int) -> None:
    """Raise UsageError where heads or the MLP cannot be shared out evenly."""
    for key in ("num_attention_heads", "num_key_value_heads", "intermediate_size"):
        value = getattr(config, key, None)
        if isinstance(value, int) and value % tp:
            raise UsageError(
                f"{key} {value} is not divisible by parallelism.tp {tp}",
                hint=f"use a tp that divides {value}, or tp: 1 and dp_shard",
            )


def shard_placement(dp_shard: int) -> Any:
    """Where FSDP cuts a parameter that tensor parallel has cut: along another dimension where that is even.

    Cutting the same dimension twice gives ``_StridedShard``, which checkpoints and sums have to treat apart.
    """

    def place(parameter: nn.Parameter) -> Shard | None:
        if not isinstance(parameter, DTensor) or parameter.ndim < 2:
            return None
        taken = {placement.dim for placement in parameter.placements if isinstance(placement, Shard)}
        if 0 in taken and 1 not in taken and parameter.shape[1] % dp_shard == 0:
            return Shard(1)
        return None

    return place
