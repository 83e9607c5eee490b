"""Every sum across micro-batches and ranks is taken here (or, for ``training.exact``, in ``fixed_point``).

A step's loss is divided by the step's global number of supervised tokens before backward, so everything
below is a plain sum: over micro-batches, over the ranks of a sharded group (FSDP's reduce-scatter), over
replicas. ``ReduceGroups`` holds the process groups by axis name; a group can be replaced between steps, which
removes a lost replica without touching the ranks that remain.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Shard

from muster.train.distributed.early_sums import EarlySums, flattened, storages, units_of
from muster.train.distributed.process_groups import GroupAborter, Waits, all_reduce, confirm_completed

SHARD, REPLICATE, TENSOR, STAGE = "dp_shard", "dp_replicate", "tp", "pp"
#: All ranks of a replica.
REPLICA = "replica"


@dataclass
class ReduceGroups:
    """Process group of each layout axis (and of the replica) that has more than one rank."""

    by_axis: dict[str, dist.ProcessGroup] = field(default_factory=dict)
    aborter: GroupAborter | None = field(default=None, compare=False)
    """Aborts the group over replicas; None: nothing does."""
    waits: Waits = field(default_factory=Waits, compare=False)
    along: Callable[[], Tensor | None] = field(default=lambda: None, compare=False)
    """A vector that is summed in place with a step's scalars, as its loss is."""
    _failure: RuntimeError | None = field(default=None, init=False, repr=False, compare=False)
    """Another replica was lost while gradients were summed; raised when this replica's own sums are done."""

    def size(self, axis: str) -> int:
        group = self.by_axis.get(axis)
        return 1 if group is None else group.size()

    def rank(self, axis: str) -> int:
        """This rank's place on one axis."""
        group = self.by_axis.get(axis)
        return 0 if group is None else group.rank()

    def counts(self, tensor: Tensor) -> bool:
        """Whether this rank is the one of its replica that counts its part of ``tensor``, in a norm or a hash: the
        first on every axis that does not cut it."""
        cut = sharded_axes(tensor)
        return all(axis in cut or self.rank(axis) == 0 for axis in (SHARD, TENSOR))

    def sum_(self, tensor: Tensor, axis: str) -> Tensor:
        """Sum ``tensor`` in place over the ranks of one axis."""
        work = self.start_sum(tensor, axis)
        if work is not None:
            self.waits.wait(work)
        return tensor

    def start_sum(self, tensor: Tensor, axis: str) -> dist.Work | None:
        """Begin to; None: nothing to do. The only collective across replicas.

        ``tensor`` must not be touched until the work was awaited.
        """
        group = self.by_axis.get(axis)
        return None if group is None else all_reduce(tensor, group)

    def sum_everywhere_(self, tensor: Tensor) -> Tensor:
        """Sum ``tensor``, which is equal on all tp ranks, in place over all others, and confirm the sum.

        Raises:
            RuntimeError: another replica was lost meanwhile.
        """
        if self.rank(TENSOR):
            tensor.zero_()
        for axis in (REPLICA, REPLICATE):
            self.sum_(tensor, axis)
        self._confirm(tensor)
        return tensor

    def sum_scalars(
        self, of_data: Sequence[Tensor], of_parts: Sequence[Tensor], *, parts_over_replicas: bool = False
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Sum 0-d tensors of one dtype, in one collective within the replica and one over replicas.

        ``of_data``: equal on all tp ranks; summed over replicas. ``of_parts``: of the elements that this rank counts;
        summed within the replica. Returns the sums of each, and of ``of_parts`` over replicas as well (not summed
        further without ``parts_over_replicas``).

        The last sums of a step: when this returns, every earlier sum over replicas is valid too.

        Raises:
            RuntimeError: another replica was lost, in these sums or in the buckets before them.
        """
        sums, along = torch.stack([*of_parts, *of_data]), self.along()
        if along is not None:
            sums = torch.cat([sums, along.to(sums)])
        count, data = len(of_parts), sums[len(of_parts) :]
        if self.rank(TENSOR):
            data.zero_()
        self.sum_(sums, REPLICA)
        own = sums[:count].clone()
        if self._failure is not None:
            error, self._failure = self._failure, None
            raise error
        self.sum_(sums if parts_over_replicas else data, REPLICATE)
        self._confirm(sums)
        if along is not None:
            along.copy_(data[len(of_data) :])
        return data[: len(of_data)], own, sums[:count]

    def _confirm(self, tensor: Tensor) -> None:
        group = self.by_axis.get(REPLICATE)
        if group is not None and self.aborter is not None:
            confirm_completed(group, self.aborter, tensor.device)

    def lost_replica(self, error: RuntimeError) -> None:
        """Another replica was lost while gradients were summed over replicas: they are invalid.

        Raises ``error`` where this replica is one rank. Else ``sum_scalars`` does: this rank first takes part in its
        replica's own sums, in which ranks that do not know of the loss would wait for it.
        """
        if REPLICA not in self.by_axis:
            raise error
        self._failure = error


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
    """How a step's loss, gradients and norm are summed."""

    def begin(self, *, micro_batches: int) -> None:
        """A step of ``micro_batches`` (over all ranks) begins; gradients are empty."""
        ...

    def before_forward(self, *, last: bool, ends: bool = True) -> None:
        """A round begins; ``last``: gradients are complete after its backward, those of other chunks of a pipeline's
        stage aside. ``ends``: all are."""
        ...

    def add_loss(self, loss: Tensor) -> None:
        """One micro-batch's share of the step's loss."""
        ...

    def finish(self) -> tuple[Tensor, Tensor, Tensor]:
        """Complete the gradients; return 0-d loss, global gradient norm, and a fault flag (0.0: valid)."""
        ...


class FloatReducer:
    """Sums in floating point: the order, and so the last bits, depend on the number of ranks.

    ``accumulate_locally``: reduce once a step, from gradients of the whole model held by each rank, instead
    of once a round. Saves communication, costs 4 bytes per trained parameter. ``over_replicas``: gradients are summed
    over replicas too; else each has its own and the norm of it, and only the loss and whether all are finite is common.
    """

    def __init__(
        self,
        module: nn.Module,
        groups: ReduceGroups,
        *,
        accumulate_locally: bool,
        over_replicas: bool = True,
        tied: TiedGradient | None = None,
    ) -> None:
        self.groups = groups
        self.over_replicas = over_replicas
        self.module = module
        self.accumulate_locally = accumulate_locally and isinstance(module, FSDPModule)
        self.parameters = [parameter for parameter in module.parameters() if parameter.requires_grad]
        self._tied = tied
        elsewhere = tied.parameter if tied is not None and not tied.counts else None
        self._counted = [each for each in self.parameters if each is not elsewhere and groups.counts(each)]
        self._synced = True
        self._last = False
        units = units_of(module)
        self.early = early_sums(groups, [partial(self._gradients, unit) for unit in units], parts=[*map(len, units)])
        for number, unit in enumerate(units):
            for part, parameter in enumerate(unit):  # FSDP calls it with the reduced gradient
                parameter.register_post_accumulate_grad_hook(  # type: ignore[no-untyped-call]
                    partial(self._gradient_came, number, part)
                )

    def begin(self, *, micro_batches: int) -> None:
        for parameter in self.parameters:
            parameter.grad = None
        self._losses: list[Tensor] = []
        self._last = False
        self.early.begin()

    def before_forward(self, *, last: bool, ends: bool = True) -> None:
        if self.accumulate_locally:  # FSDP reduces with the last chunk what it has kept of the others
            last = last and ends
        sync = last or not self.accumulate_locally
        if sync != self._synced and isinstance(self.module, FSDPModule):
            self.module.set_requires_gradient_sync(sync)
            self._synced = sync
        self._last = last

    def _gradient_came(self, unit: int, part: int, parameter: Tensor) -> None:
        if self._last and self._sums_replicas:
            self.early.came(unit, part)

    @property
    def _sums_replicas(self) -> bool:
        return self.over_replicas and REPLICATE in self.groups.by_axis

    @staticmethod
    def _gradients(unit: Sequence[nn.Parameter]) -> list[Tensor]:
        """What is summed over replicas: FSDP's flat buffer of the unit, or one made of whole gradients."""
        found = [parameter.grad for parameter in unit if parameter.grad is not None]
        if not any(isinstance(gradient, DTensor) for gradient in found):
            return [flattened(unit)] if found else []
        return storages([local(gradient) for gradient in found])

    def add_loss(self, loss: Tensor) -> None:
        self._losses.append(loss.detach().double())

    @torch.no_grad()
    def finish(self) -> tuple[Tensor, Tensor, Tensor]:
        if self._sums_replicas:
            self.early.finish()  # may put other tensors in the gradients' place
        gradients = [local(parameter.grad) for parameter in self._counted if parameter.grad is not None]
        if self._tied is not None:
            self._tied.sum_()
        losses = torch.stack(self._losses).sum() if self._losses else self._no_loss()
        squares = squared_norm([gradient for gradient in gradients if gradient.numel()], like=losses)
        apart = not self.over_replicas  # then one replica's fault is everyone's, as its loss is
        (loss,), (square,), (everywhere,) = self.groups.sum_scalars([losses], [squares], parts_over_replicas=apart)
        fault = (~torch.isfinite(everywhere)).to(loss.dtype) if apart else torch.zeros_like(loss)
        return loss, square.sqrt(), fault

    def _no_loss(self) -> Tensor:
        """Of a stage that computes none."""
        return torch.zeros((), dtype=torch.float64, device=self.parameters[0].device)


@dataclass(frozen=True)
class TiedGradient:
    """The gradient of a matrix that the first stage of a pipeline uses as the embedding and the last as the head."""

    parameter: nn.Parameter
    add_others: Callable[[Sequence[Tensor]], None]
    """Adds the other stage's tensors to these, with the same bits on both."""
    counts: bool
    """Its norm is counted here, and not on the other stage."""

    def sum_(self) -> None:
        """Add the gradients of the two stages, on both. Shards lie alike on both."""
        if self.parameter.grad is not None:
            self.add_others([local(self.parameter.grad)])


def early_sums(
    groups: ReduceGroups, units: Sequence[Callable[[], Sequence[Tensor]]], *, parts: Sequence[int]
) -> EarlySums:
    """The sums of these units over replicas."""
    start = partial(groups.start_sum, axis=REPLICATE)
    return EarlySums(units, parts=parts, start=start, wait=groups.waits.wait, lost=groups.lost_replica)


def squared_norm(gradients: Sequence[Tensor], *, like: Tensor) -> Tensor:
    """Sum of squares of this rank's parts, float64 from float32 partial norms."""
    if not gradients:
        return torch.zeros_like(like)
    return torch.stack(torch._foreach_norm(list(gradients))).double().square().sum()
