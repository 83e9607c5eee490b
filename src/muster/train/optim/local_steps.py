"""Local steps with an outer optimizer: replicas train by themselves and meet every ``training.local_steps`` steps.

Every replica applies its own gradients. At a meeting the mean over replicas of how far each has moved away from the
common (outer) parameters is a gradient to an outer optimizer, SGD with Nesterov momentum, whose result all of them
continue from: DiLoCo (Douillard et al. 2023). In ``fragments`` meetings of parts of the parameters are spread over the
interval, as in Streaming DiLoCo (Douillard et al. 2025), whose overlap with training is not here: a meeting is waited
for.

A meeting belongs to the beginning of the step after its own, before anything of that step is computed: a snapshot or
checkpoint of step k holds what the replicas had before they met, and who continues from it meets first. So a meeting
that another replica's loss interrupts is undone everywhere (``undo``) until the next step's own sums have ended
(``keep``), and is held again. Nothing here is asynchronous: all replicas are at the same step, and the result of the
same layout is the same bits.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from muster.config.sections.outer import Outer
from muster.train.distributed.process_groups import all_gather
from muster.train.distributed.reduce import REPLICATE, ReduceGroups, local

#: Values that share a scale in int8.
BLOCK = 256


class LocalSteps:
    """The outer parameters of one rank's shards, their momentum, and when which of them meet."""

    def __init__(self, named: Mapping[str, nn.Parameter], every: int, settings: Outer, groups: ReduceGroups) -> None:
        self.every, self.settings, self.groups = every, settings, groups
        self.named = dict(named)
        self.outer = {name: part.clone() for name, part in self.inner.items()}
        self.momentum = {name: torch.zeros_like(part) for name, part in self.inner.items()}
        self.fragments = fragments_of({name: p.numel() for name, p in named.items()}, settings.fragments)
        self.met = torch.zeros(len(self.fragments), dtype=torch.int64)
        """Step of each fragment's last meeting."""
        self._undo: list[tuple[Tensor, Tensor]] = []

    @property
    def inner(self) -> dict[str, Tensor]:
        """This replica's own parameters: those of the model."""
        return {name: local(parameter.detach()) for name, parameter in self.named.items()}

    @torch.no_grad()
    def start_from_outer(self) -> None:
        """Begin as one that has no steps of its own: with the outer parameters."""
        for name, part in self.inner.items():
            part.copy_(self.outer[name])

    def due(self, step: int, *, last: bool = False) -> list[int]:
        """The fragments that are to meet after ``step``; ``last``: all that have moved since they met."""
        return [
            number
            for number in range(len(self.fragments))
            if int(self.met[number]) < (step if last else last_meeting(step, self.every, number, len(self.fragments)))
        ]

    def meet(self, step: int, *, last: bool = False) -> None:
        """Hold the meetings that are due after ``step``. Collective over the replicas.

        One that another replica's loss interrupts is undone. The loss is raised as ``ReduceGroups.lost_replica`` says:
        here where this replica is one rank, else at the end of the next step's sums.
        """
        try:
            for number in self.due(step, last=last):
                self._meet(number, step)
        except RuntimeError as error:
            self.undo()
            self.groups.lost_replica(error)

    @torch.no_grad()
    def _meet(self, number: int, step: int) -> None:
        names, inner = self.fragments[number], self.inner
        moved = [self.outer[name] - inner[name] for name in names]
        flat = self._mean(torch.cat([one.reshape(-1).float() for one in moved]))
        parts = torch.split(flat, [one.numel() for one in moved])
        for tensors in (inner, self.outer, self.momentum):
            self._undo += [(tensors[name], tensors[name].clone()) for name in names]
        self._undo.append((self.met, self.met.clone()))
        rate, share = self.settings.learning_rate, self.settings.momentum
        for name, part, like in zip(names, parts, moved, strict=True):
            mean = part.view_as(like).to(like.dtype)
            momentum = self.momentum[name].mul_(share).add_(mean)
            self.outer[name].sub_(mean.add(momentum, alpha=share), alpha=rate)
            inner[name].copy_(self.outer[name])
        self.met[number] = step

    def keep(self) -> None:
        """All replicas have held what is due."""
        self._undo.clear()

    @torch.no_grad()
    def undo(self) -> None:
        """What was held since the last ``keep`` is to be held again."""
        while self._undo:
            tensor, before = self._undo.pop()
            tensor.copy_(before)

    def _mean(self, flat: Tensor) -> Tensor:
        """Of this over the replicas: the same bits on each."""
        group = self.groups.by_axis.get(REPLICATE)
        if group is None:
            return flat
        if self.settings.dtype == "float32":
            return self.groups.sum_(flat, REPLICATE).div_(group.size())
        packed = encode(flat, self.settings.dtype)
        parts = [self._gathered(tensor, group) for tensor in packed]
        total = torch.zeros_like(flat)
        for replica in range(group.size()):  # in one order everywhere
            total += decode([of_all[replica] for of_all in parts], flat.numel())
        return total.div_(group.size())

    def _gathered(self, tensor: Tensor, group: dist.ProcessGroup) -> Sequence[Tensor]:
        found, work = all_gather(tensor, group)
        self.groups.waits.wait(work)
        return found


def last_meeting(step: int, every: int, fragment: int, fragments: int) -> int:
    """The newest step up to ``step`` after which the fragment meets; 0: none. Of several fragments the first meets at
    multiples of ``every``, the others at even distances between."""
    offset = fragment * every // fragments
    return max(0, (step - offset) // every * every + offset)


def fragments_of(sizes: Mapping[str, int], count: int) -> list[list[str]]:
    """The names in their order, in at most ``count`` parts of about as many elements."""
    whole, done = sum(sizes.values()), 0
    parts: list[list[str]] = [[] for _ in range(count)]
    for name, size in sizes.items():
        parts[min(count - 1, (done + size // 2) * count // whole)].append(name)
        done += size
    return [part for part in parts if part]


def encode(flat: Tensor, dtype: str) -> list[Tensor]:
    """A float32 vector as what is sent: bfloat16, or int8 and a float32 scale for each ``BLOCK`` values."""
    if dtype == "bfloat16":
        return [flat.bfloat16()]
    blocks = torch.nn.functional.pad(flat, (0, -flat.numel() % BLOCK)).view(-1, BLOCK)
    scales = blocks.abs().amax(dim=1, keepdim=True).div_(127.0)
    codes = blocks.div(scales.clamp_min(torch.finfo(torch.float32).tiny)).round_().to(torch.int8)
    return [codes, scales]


def decode(packed: Sequence[Tensor], count: int) -> Tensor:
    """The inverse of ``encode``, of ``count`` values."""
    if len(packed) == 1:
        return packed[0].float()
    codes, scales = packed
    return codes.float().mul_(scales).view(-1)[:count]
