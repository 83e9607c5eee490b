"""Gradients are summed over replicas while the backward pass still runs, a unit at a time.

A unit (an FSDP module, mostly one decoder layer; of a model that is not cut some 25 MiB of parameters) has its final
gradient when its part of the last backward pass is done: its sum begins then, and is awaited before the update. On a
GPU the sum runs on NCCL's stream in parallel with the remaining layers, on the CPU in gloo's threads.

Never run on a GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

#: Of the gradients that go in one message where FSDP does not cut them: as in torch's DistributedDataParallel.
BUCKET_BYTES = 25 << 20


class EarlySums:
    """The sums over replicas of one step after the other.

    Units are begun in their given order, not in that in which they get ready: all replicas make the same collectives
    in the same sequence, even if their units get ready in another one, or one of them is in its first step.

    The first step learns how often a unit's gradient comes in a backward pass (more than once where a layer is used
    again) and begins no sum before its end.
    """

    def __init__(
        self,
        units: Sequence[Callable[[], Sequence[Tensor]]],
        *,
        parts: Sequence[int],
        start: Callable[[Tensor], dist.Work | None],
        wait: Callable[[dist.Work], None],
        lost: Callable[[RuntimeError], None],
    ) -> None:
        """``units``: what is to be summed in place, asked once the unit is ready. ``parts``: of how many gradients each
        hears by itself. ``start``: begins a sum (None: there is nothing to add). ``lost``: called with the error if
        one fails."""
        self._units, self._parts, self._start, self._wait, self._lost = units, parts, start, wait, lost
        self._expected = [0] * len(units)
        """How often each unit's gradient comes in a step's last backward pass; 0: not known."""
        self.begin()

    def begin(self) -> None:
        """A step begins."""
        self._times = [[0] * parts for parts in self._parts]
        self._begun = 0
        self._works: list[dist.Work] = []
        self._failure: RuntimeError | None = None
        self._late: int | None = None

    def came(self, unit: int, part: int = 0) -> None:
        """The last backward pass has set or raised this part of the unit's gradient.

        Called within it: raises nothing, since ranks of this replica that do not know of a lost one would wait for this
        rank in their own sums.
        """
        self._times[unit][part] += 1
        if unit < self._begun:
            self._late = unit
        while self._begun < len(self._units) and self._is_final(self._begun):
            self._start_next()

    def finish(self) -> None:
        """Begin what is left and wait for all (on a GPU: have what computes next wait).

        Raises what ``lost`` does.
        """
        while self._begun < len(self._units):
            self._start_next()
        for work in self._works if self._failure is None else ():
            try:
                self._wait(work)
            except RuntimeError as error:
                self._failure = error
                break
        self._works = []
        assert self._late is None, (
            f"unit {self._late} was used more often than in any step before, and its sum had begun"
        )
        self._expected = [max(before, *times) for before, times in zip(self._expected, self._times, strict=True)]
        if self._failure is not None:
            self._lost(self._failure)

    def _is_final(self, unit: int) -> bool:
        return 0 < self._expected[unit] <= min(self._times[unit])

    def _start_next(self) -> None:
        unit, self._begun = self._units[self._begun], self._begun + 1
        if self._failure is not None:
            return
        try:
            for tensor in unit():
                work = self._start(tensor)
                if work is not None:
                    self._works.append(work)
        except RuntimeError as error:
            self._failure = error


def units_of(module: nn.Module) -> list[list[nn.Parameter]]:
    """The trained parameters by the FSDP module that cuts them (the others in buckets), in about the order in which the
    backward pass completes them: the last layer first, the root or the embedding last."""
    parts = [part for part in module.modules() if isinstance(part, FSDPModule)]
    owner: dict[nn.Parameter, int] = {}
    for number, part in enumerate(parts):
        owner.update(dict.fromkeys(part.parameters(), number))  # the innermost comes last
    units: dict[int, list[nn.Parameter]] = {number: [] for number in reversed(range(len(parts)))}
    whole: list[nn.Parameter] = []
    for parameter in module.parameters():
        if parameter.requires_grad and parameter in owner:
            units[owner[parameter]].append(parameter)
        elif parameter.requires_grad:
            whole.append(parameter)
    return [*buckets(whole[::-1]), *(unit for unit in units.values() if unit)]


def buckets(parameters: Sequence[nn.Parameter]) -> list[list[nn.Parameter]]:
    """The parameters in their order, together as far as they take ``BUCKET_BYTES`` at most and are of one type."""
    found: list[list[nn.Parameter]] = []
    size = 0
    for parameter in parameters:
        size += parameter.nbytes
        if not found or size > BUCKET_BYTES or parameter.dtype != found[-1][0].dtype:
            found.append([])
            size = parameter.nbytes
        found[-1].append(parameter)
    return found


def flattened(parameters: Sequence[nn.Parameter]) -> Tensor:
    """The gradients of these parameters, moved into one flat tensor that they are views of from then on."""
    with torch.no_grad():
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        flat = torch.cat([gradient.reshape(-1) for gradient in gradients])
        views = iter(torch.split(flat, [gradient.numel() for gradient in gradients]))
        for parameter in parameters:
            if parameter.grad is not None:
                parameter.grad = next(views).view_as(parameter)
    return flat


def storages(tensors: Sequence[Tensor]) -> list[Tensor]:
    """The storages behind the tensors, each once and whole, as flat tensors of their type.

    FSDP's gradients of a unit are views of one, padding between them: it is summed in one message without a copy.
    """
    found = {tensor.untyped_storage().data_ptr(): tensor for tensor in tensors if tensor.numel()}
    return [
        torch.empty(0, dtype=tensor.dtype, device=tensor.device).set_(tensor.untyped_storage())
        for tensor in found.values()
    ]
