"""FSDP units: which modules are gathered together. Their gradients are summed, never averaged."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import _StridedShard

from muster.core.errors import UsageError
from muster.train.distributed.device_mesh import Meshes
from muster.train.model.tensor_parallel import shard_placement

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from muster.train.model.mixtures.load import Mixture

#: Models with fewer parameters are one FSDP unit instead of one per decoder layer: on gloo each unit costs about
#: 6 ms of host time per step at two ranks, more than its arithmetic.
WHOLE_BELOW = 16_000_000
#: An untied embedding larger than this is a unit of its own, so that it is not gathered together with the head.
EMBEDDING_UNIT_NUMEL = 64_000_000


def decoder_layers(model: PreTrainedModel) -> list[nn.Module]:
    """The repeated blocks: the longest list of modules that transformers calls indivisible, or of one class.

    Raises:
        UsageError: the model has no such list.
    """
    indivisible = set(getattr(model, "_no_split_modules", None) or ())
    best: list[nn.Module] = []
    for module in model.modules():
        if not isinstance(module, nn.ModuleList) or not len(module):
            continue
        classes = {type(child).__name__ for child in module}
        if (classes <= indivisible or len(classes) == 1) and len(module) > len(best):
            best = list(module)
    if not best:
        raise UsageError(f"{type(model).__name__} has no list of decoder layers", hint="choose another architecture")
    return best


def shard(
    root: nn.Module,
    model: PreTrainedModel,
    layers: list[nn.Module],
    mesh: Meshes,
    *,
    compute_dtype: torch.dtype,
    reshard_layers: bool,
    whole_below: int = WHOLE_BELOW,
    mixture: Mixture | None = None,
) -> None:
    """Cut ``root``, which holds the transformers ``model``, into FSDP units over ``mesh.shard``.

    One unit for each decoder layer, the rest in the root. Frozen parameters that one rank holds whole stay outside.
    Where there is nothing to cut and nothing to cast the model stays as it is (``stays_whole``).
    """
    if stays_whole(root, mesh, compute_dtype):
        return
    half = compute_dtype != torch.float32
    policy = MixedPrecisionPolicy(compute_dtype, torch.float32) if half else MixedPrecisionPolicy()
    experts = {id(p) for module in (mixture.experts if mixture else ()) for p in module.parameters(recurse=False)}
    placement = shard_placement(mesh.shard.size(), experts) if mesh.layout.tp > 1 or experts else None
    outside = kept_outside(root, mesh)
    cut = partial(
        fully_shard, mesh=mesh.shard, mp_policy=policy, shard_placement_fn=placement, ignored_params=outside or None
    )
    for part in mixture.routers if mixture and mixture.routes_in_float32 and half else ():
        cut(part, mp_policy=MixedPrecisionPolicy(torch.float32, torch.float32), reshard_after_forward=reshard_layers)
    parts = [parameter for layer in layers for parameter in layer.parameters()]
    apart = len(parts) == len(set(parts))  # Zamba 2's layers share a transformer, which FSDP wants in one unit
    if apart and sum(parameter.numel() for parameter in root.parameters()) >= whole_below:
        for layer in layers:
            cut(layer, reshard_after_forward=reshard_layers)
        embedding = model.get_input_embeddings()
        head = model.get_output_embeddings()
        weight = None if embedding is None else embedding.weight  # other stages of a pipeline have none
        tied = head is not None and head.weight is weight
        large = isinstance(weight, Tensor) and weight.numel() >= EMBEDDING_UNIT_NUMEL
        if not tied and large and weight not in outside:
            cut(embedding, reshard_after_forward=reshard_layers)
    # The backward pass starts with the head, which is in the root: resharding it before would gather it twice.
    cut(root, reshard_after_forward=False)
    for part in root.modules():
        if isinstance(part, FSDPModule):
            # Both are needed: gloo has no pre-multiplied sum, and the loss is already divided by the global tokens.
            part.set_force_sum_reduction_for_comms(True)
            part.set_gradient_divide_factor(1.0)


def stays_whole(root: nn.Module, mesh: Meshes, compute_dtype: torch.dtype) -> bool:
    """Whether FSDP would do nothing but copy: each rank has the whole model (one rank, or plain data parallel), and the
    trained parameters are in the type that is computed in. Elsewhere FSDP's mixed precision casts them."""
    if mesh.shard.size() > 1 or mesh.layout.tp > 1 or mesh.always_cut:
        return False
    return all(parameter.dtype == compute_dtype for parameter in root.parameters() if parameter.requires_grad)


def kept_outside(root: nn.Module, mesh: Meshes) -> set[nn.Parameter]:
    """Frozen parameters of a rank that shares its model with no other.

    FSDP would copy each of them whenever a unit is gathered, in the forward and in the backward pass. They are in the
    compute type already, and have no gradients to sum.
    """
    if mesh.layout.shards > 1 or mesh.layout.tp > 1:
        return set()
    return {parameter for parameter in root.parameters() if not parameter.requires_grad}


def reshard(module: nn.Module) -> None:
    """Drop the gathered parameters that a forward pass without backward leaves in the root.

    Without this the next forward pass would use them, although the shards may have changed (a restore).
    """
    for part in module.modules():
        if isinstance(part, FSDPModule):
            part.reshard()


@contextmanager
def evaluating(module: nn.Module) -> Iterator[None]:
    """Evaluation mode, and what was gathered dropped at the end."""
    was_training = module.training
    module.eval()
    try:
        yield
    finally:
        reshard(module)
        module.train(was_training)


def forget_gradients(module: nn.Module) -> None:
    """Drop the gradients of an unfinished step, so that the step can be repeated.

    FSDP2 accumulates micro-batches that are not reduced yet in ``unsharded_accumulated_grad``, which no public call
    clears.
    """
    for parameter in module.parameters():
        parameter.grad = None
    for part in module.modules():
        group = part._get_fsdp_state()._fsdp_param_group if isinstance(part, FSDPModule) else None
        for parameter_state in group.fsdp_params if group is not None else ():
            parameter_state.unsharded_accumulated_grad = None
            if hasattr(parameter_state, "_unsharded_param"):
                parameter_state._unsharded_param.grad = None


def check_sharded(model: nn.Module) -> None:
    """Refuse parameters whose placement would cause silent errors later.

    Trainable ones outside FSDP would diverge between ranks. Those sharded twice along one dimension
    (``_StridedShard``) are not a ``Shard`` to the code that sums norms, and checkpoints cannot describe them.

    Raises:
        UsageError: tensor parallel and FSDP would shard the same dimension.
    """
    for name, parameter in model.named_parameters():
        assert isinstance(parameter, DTensor) or not parameter.requires_grad, f"{name} is trainable, but not sharded"
        if isinstance(parameter, DTensor) and any(isinstance(place, _StridedShard) for place in parameter.placements):
            raise UsageError(
                f"{name} {list(parameter.shape)} cannot be sharded by tp and by dp_shard at once",
                hint="use tp: 1, or dp_shard: 1 (with dp_replicate), or a dp_shard that divides the hidden size and "
                "the rank of adapters",
            )
