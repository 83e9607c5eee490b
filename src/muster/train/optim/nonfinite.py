"""Stops the training before an update that is not finite is applied.

The verdict stays on the device: the optimizer's kernel gets the flag to skip, and the host reads it with the step's
numbers. So no step waits for the host, and no bad update is ever applied.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from muster.checkpoint.exchange import gather
from muster.core.errors import RunFailed


class NotFinite(RunFailed):
    """The loss or gradient norm was not finite, or beyond the range of exact sums; nothing was applied."""

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
    finite = torch.isfinite(loss) & torch.isfinite(norm) & (fault == 0)
    return (~finite).to(torch.float32)


def find_bad_micro_batch(
    losses: Sequence[Tensor], sequences: Sequence[tuple[int, ...]], *, rank: int, group: dist.ProcessGroup | None
) -> BadMicroBatch | None:
    """The first micro-batch of any rank whose loss is not finite. Collective, on the failing path only."""
    own = (
        (rank, index, float(loss), rows)
        for index, (loss, rows) in enumerate(zip(losses, sequences, strict=True))
        if not math.isfinite(float(loss))
    )
    for report in gather(next(own, None), group):
        if report is not None:
            culprit, index, value, rows = report
            return BadMicroBatch(culprit, index, value, tuple(rows))
    return None


def not_finite_error(
    *, step: int, loss: float, norm: float, fault: float, culprit: BadMicroBatch | None, sequences: Sequence[int]
) -> NotFinite:
    """The error that names step, rank and batch."""
    if culprit is not None:
        return NotFinite(
            f"step {step}: loss is {culprit.loss} on rank {culprit.rank}, micro-batch {culprit.micro_batch} "
            f"(sequences {', '.join(map(str, culprit.sequences))}); the update was not applied",
            step=step,
            rank=culprit.rank,
            sequences=culprit.sequences,
        )
    problem = f"gradient norm is {norm}" if not fault else "a gradient is beyond the range of exact sums"
    return NotFinite(
        f"step {step}: {problem} with loss {loss}, while every micro-batch's own loss is finite "
        f"(sequences {min(sequences, default=-1)} to {max(sequences, default=-1)}); the update was not applied",
        step=step,
        rank=None,
        sequences=sequences,
    )
