"""Stops the training before an update that is not finite is applied.

The verdict stays on the device: the optimizer's kernel is told to skip, and the host reads the flag when it
looks at the step's numbers anyway. So no step waits for the host, and no bad update is ever applied.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from muster.core.errors import RunFailed
from muster.train.distributed.process_groups import all_gather


class NotFinite(RunFailed):
    """The loss or the gradient norm was not finite, or beyond what exact sums hold; nothing was applied."""

    not_finite = True

    def __init__(self, message: str, *, step: int, rank: int | None, sequences: Sequence[int]) -> None:
        super().__init__(
            message, hint="lower training.optimizer.learning_rate, or look at the named sequences (`muster data`)"
        )
        self.step = step
        self.rank = rank
        self.sequences = tuple(sequences)


@dataclass(frozen=True)
class BadMicroBatch:
    """A micro-batch whose own loss was not finite."""

    rank: int
    micro_batch: int
    loss: float
    sequences: tuple[int, ...]


def must_skip(loss: Tensor, norm: Tensor, fault: Tensor) -> Tensor:
    """0-d float, 1.0 where the update must not be applied. Stays on the device."""
    fine = torch.isfinite(loss) & torch.isfinite(norm) & (fault == 0)
    return (~fine).to(torch.float32)


def find_bad_micro_batch(
    losses: Sequence[Tensor],
    sequences: Sequence[tuple[int, ...]],
    *,
    rank: int,
    micro_batch_size: int,
    group: dist.ProcessGroup | None,
) -> BadMicroBatch | None:
    """The first micro-batch of any rank whose loss is not finite. Collective, on the failing path only."""
    width = micro_batch_size + 3
    mine = torch.full((width,), -1.0, dtype=torch.float64)
    for index, (loss, rows) in enumerate(zip(losses, sequences, strict=True)):
        if not math.isfinite(float(loss)):
            mine[:3] = torch.tensor([float(rank), float(index), float(loss)], dtype=torch.float64)
            mine[3 : 3 + len(rows)] = torch.tensor(rows, dtype=torch.float64)
            break
    found = [mine]
    if group is not None:
        found = [torch.empty_like(mine) for _ in range(group.size())]
        all_gather(found, mine, group)
    for row in found:
        if row[0] >= 0:
            return BadMicroBatch(
                rank=int(row[0]),
                micro_batch=int(row[1]),
                loss=float(row[2]),
                sequences=tuple(int(value) for value in row[3:] if value >= 0),
            )
    return None


def failure(
    *, step: int, loss: float, norm: float, fault: float, blame: BadMicroBatch | None, everything: Sequence[int]
) -> NotFinite:
    """The error that names step, rank and batch."""
    if blame is not None:
        return NotFinite(
            f"step {step}: loss is {blame.loss} on rank {blame.rank}, micro-batch {blame.micro_batch} "
            f"(sequences {', '.join(map(str, blame.sequences))}); the update was not applied",
            step=step,
            rank=blame.rank,
            sequences=blame.sequences,
        )
    what = f"gradient norm is {norm}" if not fault else "a gradient is beyond the range of exact sums"
    return NotFinite(
        f"step {step}: {what} with loss {loss}, while every micro-batch's own loss is finite "
        f"(sequences {min(everything, default=-1)} to {max(everything, default=-1)}); the update was not applied",
        step=step,
        rank=None,
        sequences=everything,
    )
