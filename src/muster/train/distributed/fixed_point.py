"""``training.exact``: sums in 64-bit fixed point, whose bits no order and no grouping changes.

A float32 gradient times 2**40 becomes an integer; integers are added over micro-batches, sharded ranks and
replicas; the total is converted back to a float once. What each micro-batch computes does not depend on the world
size, and AdamW works element by element, so the weights after a step are the same bits at any world size.

The gradient norm needs more than 64 bits: every square (exact in float64) is split into three limbs of
32 bits, in units of 2**12, 2**-20 and 2**-52. Limbs are summed as integers and carried over at the end.

Range: totals must stay below 2**22 in magnitude, so each micro-batch's must stay below 2**22 over their number.
Beyond it the step is refused; integers never wrap around.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_api import ReduceScatter

from muster.core.errors import UsageError
from muster.train.distributed.early_sums import units_of
from muster.train.distributed.process_groups import Waits
from muster.train.distributed.reduce import (
    REPLICATE,
    SHARD,
    ReduceGroups,
    early_sums,
    local,
    sharded_axes,
)

GRADIENT_BITS = 40
LOSS_BITS = 40
RANGE_BITS = 22
LIMB_BITS = 32
#: Exponents of the limbs' units; squares stay below 2**44 = 2**(12 + 32).
UNITS = (12, -20, -52)
#: Squares summed at a time: bounds the temporary memory, and 2**22 limbs stay below 2**54.
SQUARES_AT_ONCE = 1 << 22


class FixedPointReduceScatter(ReduceScatter):
    """FSDP's reduce-scatter of one module, adding up integers instead of floats.

    FSDP's own float accumulation gets zeros and is overwritten at the end of the step. At world
    size 1 FSDP makes no collective: the same conversion then runs as its all-reduce hook.
    """

    def __init__(self, waits: Waits | None = None) -> None:
        self._waits = waits or Waits()
        self.clear()

    added: Callable[[], None] | None = None
    """Called after a micro-batch was added."""

    def clear(self) -> None:
        self.total: Tensor | None = None
        """int64, flat: this rank's shards of the module's gradients, concatenated."""
        self.storage = 0
        """Address of the float output whose views FSDP set as ``.grad``: identifies each parameter's place."""
        self.largest: Tensor | None = None

    def allocate(self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: dist.ReduceOp,
        async_op: bool = False,
    ) -> dist.Work | None:
        fixed = self._to_fixed(input_tensor)
        part = torch.empty(output_tensor.numel(), dtype=torch.int64, device=fixed.device)
        began = time.monotonic_ns()
        dist.reduce_scatter_tensor(part, fixed, group=group, op=dist.ReduceOp.SUM)
        self._waits.ns += time.monotonic_ns() - began
        self._add(part, output_tensor)
        return None

    def alone(self, output: Tensor) -> None:
        """The hook for world size 1: ``output`` holds the micro-batch's gradients.

        FSDP calls it on its all-reduce stream, drops the output and goes on with its own: without a record the
        allocator could give the memory to the next layer's gradients before the kernels here have read and cleared it.
        """
        if output.is_cuda:
            output.record_stream(torch.cuda.current_stream(output.device))
        self._add(self._to_fixed(output), output)

    def _to_fixed(self, values: Tensor) -> Tensor:
        self.largest = largest_of(values, self.largest)
        return to_fixed(values)

    def _add(self, part: Tensor, output: Tensor) -> None:
        if self.total is None:
            self.total = part
            self.storage = output.untyped_storage().data_ptr()
        else:
            self.total += part
        output.zero_()
        if self.added is not None:
            self.added()


class WholeGradients:
    """The sum over micro-batches of the gradients of parameters that no FSDP module cuts, as integers.

    A gradient is taken from its parameter as it comes, so that no micro-batch finds one to add to.
    """

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        self.parameters = list(parameters)
        self.clear()

    def clear(self) -> None:
        self.total: Tensor | None = None
        """int64, flat: the parameters one after another."""
        self.parts: dict[nn.Parameter, Tensor] = {}
        """Views of ``total``, of parameters that had a gradient."""
        self.largest: Tensor | None = None

    @torch.no_grad()
    def take(self, parameter: nn.Parameter) -> None:
        """Add the gradient that the parameter has got, and drop it."""
        assert parameter.grad is not None
        if self.total is None:
            sizes = [each.numel() for each in self.parameters]
            self.total = torch.zeros(sum(sizes), dtype=torch.int64, device=parameter.device)
            parts = torch.split(self.total, sizes)
            self._places = {p: part.view_as(p) for p, part in zip(self.parameters, parts, strict=True)}
        self.largest = largest_of(parameter.grad, self.largest)
        self.parts[parameter] = self._places[parameter].add_(to_fixed(parameter.grad))
        parameter.grad = None


class FixedPointReducer:
    """The exact counterpart of ``reduce.FloatReducer``.

    Raises:
        UsageError: the model or layout has sums that fixed point does not cover.
    """

    def __init__(self, module: nn.Module, groups: ReduceGroups) -> None:
        self.groups = groups
        self.parameters = [parameter for parameter in module.parameters() if parameter.requires_grad]
        check_covered(module, self.parameters)
        self.comms: list[FixedPointReduceScatter] = []
        for part in module.modules():
            if isinstance(part, FSDPModule):
                comm = FixedPointReduceScatter(groups.waits)
                part.set_custom_reduce_scatter(comm)
                if groups.size(SHARD) == 1:
                    part.set_all_reduce_hook(comm.alone)
                self.comms.append(comm)
        whole = not isinstance(module, FSDPModule)
        self.whole = [WholeGradients(unit) for unit in units_of(module)] if whole else []
        # In the order in which the backward pass completes them: the root is done last.
        self.sums: list[FixedPointReduceScatter | WholeGradients] = [*self.whole, *self.comms[::-1]]
        parts = [*(len(unit.parameters) for unit in self.whole), *(1 for _ in self.comms)]
        self.early = early_sums(groups, [partial(self._totals, one) for one in self.sums], parts=parts)
        for number, one in enumerate(self.sums):
            if isinstance(one, FixedPointReduceScatter):
                one.added = partial(self._unit_added, number)
                continue
            for place, parameter in enumerate(one.parameters):
                parameter.register_post_accumulate_grad_hook(  # type: ignore[no-untyped-call]
                    partial(self._gradient_came, one, number, place)
                )
        self._last = False

    def begin(self, *, micro_batches: int) -> None:
        for parameter in self.parameters:
            parameter.grad = None
        for one in self.sums:
            one.clear()
        self.early.begin()
        self._last = False
        self.limit = 2.0**RANGE_BITS / max(1, micro_batches)
        self._loss: Tensor | None = None
        self._loss_fault: Tensor | None = None

    def before_forward(self, *, last: bool, ends: bool = True) -> None:
        """Every round is reduced: accumulating before the conversion would be a float sum."""
        self._last = last

    def _unit_added(self, number: int, part: int = 0) -> None:
        if self._last and REPLICATE in self.groups.by_axis:
            self.early.came(number, part)

    def _gradient_came(self, unit: WholeGradients, number: int, place: int, parameter: nn.Parameter) -> None:
        unit.take(parameter)
        self._unit_added(number, place)

    @staticmethod
    def _totals(one: FixedPointReduceScatter | WholeGradients) -> list[Tensor]:
        return [] if one.total is None else [one.total]

    def add_loss(self, loss: Tensor) -> None:
        exact = loss.detach().double()
        fixed = (exact * 2.0**LOSS_BITS).round().to(torch.int64)
        fault = (~(exact.abs() < self.limit)).to(torch.int64)
        self._loss = fixed if self._loss is None else self._loss + fixed
        self._loss_fault = fault if self._loss_fault is None else self._loss_fault + fault

    @torch.no_grad()
    def finish(self) -> tuple[Tensor, Tensor, Tensor]:
        if REPLICATE in self.groups.by_axis:
            self.early.finish()
        self._set_gradients()
        square = SquareSum()
        for parameter in self.parameters:
            if parameter.grad is not None and self.groups.counts(parameter):
                square.add(local(parameter.grad))
        nothing = torch.zeros((), dtype=torch.int64, device=self.parameters[0].device)  # of a stage without a loss
        own_loss = nothing if self._loss is None else self._loss
        faults = [~(one.largest < self.limit) for one in self.sums if one.largest is not None]
        fault = nothing if self._loss_fault is None else self._loss_fault
        fault = fault + (torch.stack(faults).sum() if faults else 0)
        limbs = [limb.to(fault.device) for limb in square.limbs]
        (loss, bad), totals, _ = self.groups.sum_scalars([own_loss, fault], limbs)
        return loss.double() * 2.0**-LOSS_BITS, to_float(totals.unbind()).sqrt(), bad.double()

    def _set_gradients(self) -> None:
        """Float gradients from the totals."""
        for unit in self.whole:
            for parameter, fixed in unit.parts.items():
                parameter.grad = fixed.double().mul_(2.0**-GRADIENT_BITS).to(parameter.dtype)
        by_storage = {comm.storage: comm.total for comm in self.comms if comm.total is not None}
        for parameter in self.parameters if self.comms else ():
            if parameter.grad is None:
                continue
            gradient = local(parameter.grad)
            total = by_storage[gradient.untyped_storage().data_ptr()]
            fixed = torch.as_strided(total, gradient.size(), gradient.stride(), gradient.storage_offset())
            gradient.copy_(fixed.double().mul_(2.0**-GRADIENT_BITS))


def to_fixed(values: Tensor) -> Tensor:
    """Float gradients as integers, in units of 2**-40."""
    return values.mul(2.0**GRADIENT_BITS).to(torch.int64)


def largest_of(values: Tensor, before: Tensor | None) -> Tensor:
    """The largest magnitude of these values and of those ``before``; NaN stays NaN."""
    low, high = torch.aminmax(values)
    largest = torch.maximum(-low, high)
    return largest if before is None else torch.maximum(before, largest)


class SquareSum:
    """The sum of squares of float32 numbers below 2**22, each exact to 2**-52, as one integer in three limbs."""

    def __init__(self) -> None:
        self.limbs = [torch.zeros((), dtype=torch.int64) for _ in UNITS]

    def add(self, values: Tensor) -> None:
        for part in torch.split(values.reshape(-1), SQUARES_AT_ONCE):
            if not part.numel():
                continue
            rest = part.double().square_()
            for place, unit in enumerate(UNITS):
                limb = rest.mul(2.0**-unit).floor_()
                rest = rest.sub_(limb.mul(2.0**unit))
                self.limbs[place] = limb.to(torch.int64).sum() + self.limbs[place].to(part.device)
            self.limbs = carried(self.limbs)


def carried(limbs: Sequence[Tensor]) -> list[Tensor]:
    """The same number with every limb but the highest below 2**32."""
    normalized, carry = [], torch.zeros_like(limbs[-1])
    for limb in reversed(limbs[1:]):
        whole = limb + carry
        normalized.append(whole & ((1 << LIMB_BITS) - 1))
        carry = whole >> LIMB_BITS
    return [limbs[0] + carry, *reversed(normalized)]


def to_float(limbs: Sequence[Tensor]) -> Tensor:
    """The number that the limbs represent, as float64: the same bits for the same number."""
    total = torch.zeros_like(limbs[0], dtype=torch.float64)
    for limb, unit in zip(reversed(carried(limbs)), reversed(UNITS), strict=True):
        total = total + limb.double() * 2.0**unit
    return total


def check_covered(module: nn.Module, parameters: list[nn.Parameter]) -> None:
    """Raise UsageError if a sum would still be taken in floating point."""
    if not isinstance(module, FSDPModule) and any(map(sharded_axes, parameters)):
        raise UsageError("training.exact does not cover a model that is cut, but not by FSDP", hint="set exact: false")
    if any(parameter.dtype != torch.float32 for parameter in parameters):
        raise UsageError(
            "training.exact needs float32 master weights", hint="set model.master_dtype: float32, or exact: false"
        )
    stage = getattr(module, "stage", None)
    if stage is not None and stage.tied is not None:
        raise UsageError(
            "training.exact does not cover an embedding tied to the head in a model cut into stages: one process adds "
            "their two gradients before it converts them",
            hint="set parallelism.pp: 1, tie_word_embeddings: false, or training.exact: false",
        )
    if any(sharded_axes(parameter) - {SHARD} for parameter in parameters):
        raise UsageError(
            "training.exact does not cover tensor parallel, whose sums are inside the layers",
            hint="set parallelism.tp: 1, or training.exact: false",
        )
