"""Every sum across micro-batches and ranks is taken here (or, for ``training.exact``, in ``exact``).

A step's loss is divided by the step's global number of supervised tokens before backward, so everything
below is a plain sum: over micro-batches, over the ranks of a sharded group (FSDP's reduce-scatter), over
replicas. ``Axes`` holds the process groups by axis name; a group can be replaced between steps, which is how
a lost replica is cut out without touching the ranks that remain.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Shard

from muster.train.distributed.process_groups import GroupAborter, all_reduce, confirm_completed

SHARD, REPLICATE, TENSOR = "dp_shard", "dp_replicate", "tp"
BUCKET_NUMEL = 8 * 1024 * 1024


@dataclass
class ReduceGroups:
    """Process group of each layout axis that has more than one rank."""

    groups: dict[str, dist.ProcessGroup] = field(default_factory=dict)
    aborter: GroupAborter | None = field(default=None, compare=False)
    """What breaks the group over replicas; None: nobody does."""
    _broken: RuntimeError | None = field(default=None, init=False, repr=False, compare=False)
    """Another replica was lost while gradients were summed; raised when this replica's own sums are done."""

    def size(self, axis: str) -> int:
        group = self.groups.get(axis)
        return 1 if group is None else group.size()

    def sum_(self, tensor: Tensor, axis: str) -> Tensor:
        """Sum ``tensor`` in place over the ranks of one axis. The one place where replicas meet."""
        group = self.groups.get(axis)
        if group is not None:
            all_reduce(tensor, group).wait()
        return tensor

    def sum_everywhere_(self, tensor: Tensor) -> Tensor:
        """Sum ``tensor`` in place over the ranks that read different data, and be sure of it.

        Raises:
            RuntimeError: another replica was lost meanwhile.
        """
        for axis in (SHARD, REPLICATE):
            self.sum_(tensor, axis)
        self._make_sure(tensor)
        return tensor

    def sum_scalars(self, values: Sequence[tuple[Tensor, frozenset[str]]]) -> list[Tensor]:
        """Sum 0-d tensors of one dtype, each over its own set of axes, in one collective an axis.

        They come last in a step: when this returns, every sum over replicas before them stands too.

        Raises:
            RuntimeError: another replica was lost, in these sums or in the buckets before them.
        """
        found = torch.stack([value for value, _ in values])
        for axis in (SHARD, TENSOR, REPLICATE):
            if axis == REPLICATE and self._broken is not None:
                error, self._broken = self._broken, None
                raise error
            chosen = [index for index, (_, axes) in enumerate(values) if axis in axes]
            if not chosen or axis not in self.groups:
                continue
            if len(chosen) == len(values):
                self.sum_(found, axis)
            else:
                part = self.sum_(torch.stack([found[index] for index in chosen]), axis)
                for index, value in zip(chosen, part.unbind(), strict=True):
                    found[index] = value
        self._make_sure(found)
        return list(found.unbind())

    def _make_sure(self, tensor: Tensor) -> None:
        group = self.groups.get(REPLICATE)
        if group is not None and self.aborter is not None:
            confirm_completed(group, self.aborter, tensor.device)

    def sum_buckets_(self, tensors: Sequence[Tensor], axis: str) -> None:
        """Sum tensors of one dtype in place over an axis, several to a message.

        Where another replica is lost meanwhile, the tensors are worth nothing and ``sum_scalars`` raises: this rank
        goes on to its replica's own sums first, in which ranks that have heard of no loss would wait for it.
        """
        if axis not in self.groups:
            return
        try:
            self._sum_buckets(tensors, axis)
        except RuntimeError as error:
            if axis != REPLICATE or not ({SHARD, TENSOR} & self.groups.keys()):
                raise
            self._broken = error

    def _sum_buckets(self, tensors: Sequence[Tensor], axis: str) -> None:
        for bucket in buckets(tensors):
            if len(bucket) == 1 and bucket[0].is_contiguous():
                self.sum_(bucket[0], axis)
                continue
            flat = self.sum_(torch.cat([tensor.reshape(-1) for tensor in bucket]), axis)
            parts = flat.split([tensor.numel() for tensor in bucket])
            torch._foreach_copy_(bucket, [part.view_as(old) for part, old in zip(parts, bucket, strict=True)])


def buckets(tensors: Iterable[Tensor]) -> list[list[Tensor]]:
    """Neighbours grouped up to ``BUCKET_NUMEL`` elements: the same cut on every rank of the axis."""
    found: list[list[Tensor]] = []
    room = 0
    for tensor in tensors:
        if not found or tensor.numel() > room:
            found.append([])
            room = BUCKET_NUMEL
        found[-1].append(tensor)
        room -= tensor.numel()
    return found


def local(tensor: Tensor) -> Tensor:
    """This rank's part, as a plain tensor that shares the storage."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def sharded_axes(tensor: Tensor) -> frozenset[str]:
    """Axes over which a parameter's parts are disjoint, so that sums over elements must cross them."""
    if not isinstance(tensor, DTensor):
        return frozenset()
    names = tensor.device_mesh.mesh_dim_names or (SHARD,)
    return frozenset(
        name for name, placement in zip(names, tensor.placements, strict=True) if isinstance(placement, Shard)
    )


class GradientReducer(Protocol):
    """How a step's loss, gradients and norm come together."""

    def begin(self, *, micro_batches: int) -> None:
        """A step of so many micro-batches (all ranks) begins; gradients are empty."""
        ...

    def before_forward(self, *, last: bool) -> None:
        """A round begins; ``last``: gradients are complete after its backward."""
        ...

    def add_loss(self, loss: Tensor) -> None:
        """One micro-batch's share of the step's loss."""
        ...

    def finish(self) -> tuple[Tensor, Tensor, Tensor]:
        """Complete the gradients; return 0-d loss, global gradient norm, and a fault flag (0.0: fine)."""
        ...


class FloatReducer:
    """Sums in floating point: the order, and so the last bits, depend on the number of ranks.

    ``accumulate_locally``: reduce once a step, from gradients of the whole model held by each rank, instead
    of once a round. Saves communication, costs 4 bytes a trained parameter.
    """

    def __init__(self, module: nn.Module, axes: ReduceGroups, *, accumulate_locally: bool) -> None:
        self.axes = axes
        self.module = module
        self.accumulate_locally = accumulate_locally and isinstance(module, FSDPModule)
        self.parameters = [parameter for parameter in module.parameters() if parameter.requires_grad]
        self._axes_of = [sharded_axes(parameter) for parameter in self.parameters]
        self._axis_sets = axis_sets(self.parameters)
        self._synced = True

    def begin(self, *, micro_batches: int) -> None:
        for parameter in self.parameters:
            parameter.grad = None
        self._losses: list[Tensor] = []

    def before_forward(self, *, last: bool) -> None:
        wanted = last or not self.accumulate_locally
        if wanted != self._synced and isinstance(self.module, FSDPModule):
            self.module.set_requires_gradient_sync(wanted)
            self._synced = wanted

    def add_loss(self, loss: Tensor) -> None:
        self._losses.append(loss.detach().double())

    @torch.no_grad()
    def finish(self) -> tuple[Tensor, Tensor, Tensor]:
        gradients: list[Tensor] = []
        kinds: dict[frozenset[str], list[Tensor]] = {axes: [] for axes in self._axis_sets}
        for parameter, axes in zip(self.parameters, self._axes_of, strict=True):
            if parameter.grad is not None:
                gradients.append(local(parameter.grad))
                if gradients[-1].numel():
                    kinds[axes].append(gradients[-1])
        self.axes.sum_buckets_(gradients, REPLICATE)
        values = [(torch.stack(self._losses).sum(), frozenset((SHARD, REPLICATE)))]
        values += [(squared_norm(parts, like=values[0][0]), axes) for axes, parts in kinds.items()]
        loss, *parts = self.axes.sum_scalars(values)
        norm = torch.stack(parts).sum().sqrt() if parts else torch.zeros_like(loss)
        return loss, norm, torch.zeros_like(loss)


def axis_sets(parameters: Iterable[Tensor]) -> list[frozenset[str]]:
    """The distinct sets of axes, in an order that every rank shares."""
    return sorted({sharded_axes(parameter) for parameter in parameters}, key=sorted)


def squared_norm(gradients: Sequence[Tensor], *, like: Tensor) -> Tensor:
    """Sum of squares of this rank's parts, float64 from float32 partial norms."""
    if not gradients:
        return torch.zeros_like(like)
    return torch.stack(torch._foreach_norm(list(gradients))).double().square().sum()
