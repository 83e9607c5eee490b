"""Tensor parallel by the plan that a transformers model ships.

Only decoder layers are split: the embedding and the head are replicated on every tp rank (and sharded by FSDP), which
costs their memory and arithmetic tp times, but keeps the chunked loss simple. Hidden states between layers
are equal on all tp ranks.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Container
from functools import partial
from typing import TYPE_CHECKING

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from muster.core.errors import UsageError

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

#: transformers' names of styles -> PyTorch's.
STYLES: dict[str, Callable[[], ParallelStyle]] = {
    "colwise": ColwiseParallel,
    "rowwise": RowwiseParallel,
    # A norm over each head (queries, keys): heads are split, its weight is not, and its gradient is summed.
    "replicated_with_grad_allreduce": partial(SequenceParallel, sequence_dim=2, use_local_output=True),
}


def split(model: PreTrainedModel, layers: list[nn.Module], mesh: DeviceMesh) -> None:
    """Split the decoder layers of ``model`` over ``mesh``, before FSDP.

    Raises:
        UsageError: no plan, one with unsupported styles, or sizes that tp does not divide.
    """
    tp = mesh.size()
    styles = plan_of(model, layers)
    check_divides(model.config.get_text_config(), tp)
    colwise = [name for name, style in styles.items() if style == "colwise"]
    readers = Counter(name.rpartition(".")[0] for name in colwise)
    shared = {block: SharedInput(mesh, number) for block, number in readers.items()}
    for name, style in styles.items():
        module = model.get_submodule(name)
        matrix = getattr(module, "base_layer", module)
        parallelize_module(matrix, mesh, STYLES[style]())
        if style == "colwise":
            matrix.register_forward_pre_hook(shared[name.rpartition(".")[0]], prepend=True)
        if matrix is not module:
            split_adapter(module, style, mesh)


def split_adapter(module: nn.Module, style: str, mesh: DeviceMesh) -> None:
    """Split the adapter (peft's B after A) of a matrix that ``style`` splits.

    What is wide is split as the matrix is, and the other one is whole: its input, output and gradients are equal on all
    tp ranks. Between the two is a sum over them of as many columns as the adapter has: forward behind A of a rowwise
    matrix, backward before B of a colwise one.
    """
    wide: nn.ModuleDict = module.lora_B if style == "colwise" else module.lora_A  # type: ignore[assignment]
    for part in wide.values():
        parallelize_module(part, mesh, STYLES[style]())


class SharedInput:
    """Hook of the colwise matrices of a block: those that read one tensor read one replicated DTensor of it.

    Its gradients are then summed on each rank and all-reduced once (as with torch's ``PrepareModuleInput``, which would
    need a block that uses its input for nothing else). ``ColwiseParallel`` alone wraps the tensor, and reduces its
    gradient, for each matrix. Matrices that read different tensors share nothing.
    """

    def __init__(self, mesh: DeviceMesh, readers: int) -> None:
        self._mesh, self._readers = mesh, readers
        self._left = 0
        self._local: Tensor | None = None
        self._shared: DTensor | None = None

    def __call__(self, _: nn.Module, inputs: tuple[Tensor]) -> tuple[Tensor | None]:
        (local,) = inputs
        if local is not self._local:
            self._local, self._left = local, self._readers
            self._shared = DTensor.from_local(local, self._mesh, (Replicate(),), run_check=False)
        shared = self._shared
        self._left -= 1
        if self._left == 0:  # else the last layer's activations would outlive it
            self._local = self._shared = None
        return (shared,)


def plan_of(model: PreTrainedModel, layers: list[nn.Module]) -> dict[str, str]:
    """Full module name -> style, for modules inside the decoder layers."""
    rules = getattr(model, "tp_plan", None) or {}
    inside = {id(module) for layer in layers for module in layer.modules()}
    styles: dict[str, str] = {}
    for name, module in model.named_modules():
        generic = re.sub(r"\.\d+(?=\.|$)", ".*", name)
        if id(module) in inside and generic in rules:
            styles[name] = rules[generic]
    if not styles:
        raise UsageError(
            f"{type(model).__name__} ships no tensor-parallel plan", hint="set parallelism.tp: 1 and use dp_shard"
        )
    unsupported = sorted({style for style in styles.values() if style not in STYLES})
    if unsupported:
        raise UsageError(
            f"the tensor-parallel plan of {type(model).__name__} needs {', '.join(unsupported)}: not supported",
            hint="set parallelism.tp: 1 and use dp_shard",
        )
    return styles


def check_divides(config: PreTrainedConfig, tp: int) -> None:
    """Raise UsageError if heads or the MLP cannot be split evenly."""
    for key in ("num_attention_heads", "num_key_value_heads", "intermediate_size"):
        value = getattr(config, key, None)
        if isinstance(value, int) and value % tp:
            raise UsageError(
                f"{key} {value} is not divisible by parallelism.tp {tp}",
                hint=f"use a tp that divides {value}, or tp: 1 and dp_shard",
            )


def shard_placement(dp_shard: int, experts: Container[int] = ()) -> Callable[[nn.Parameter], Shard | None]:
    """Along which dimension FSDP shards a parameter, where it is not the first: one of ``experts`` (by ``id``), of
    which there may be fewer than ranks, or one that tensor parallel has split, if the second is even.

    Sharding the same dimension twice gives ``_StridedShard``, which checkpoints and sums do not support.
    """

    def place(parameter: nn.Parameter) -> Shard | None:
        if id(parameter) in experts:
            return Shard(1) if parameter.ndim == 3 and parameter.shape[1] % dp_shard == 0 else None
        if not isinstance(parameter, DTensor) or parameter.ndim < 2:
            return None
        taken = {placement.dim for placement in parameter.placements if isinstance(placement, Shard)}
        if 0 in taken and 1 not in taken and parameter.shape[1] % dp_shard == 0:
            return Shard(1)
        return None

    return place
