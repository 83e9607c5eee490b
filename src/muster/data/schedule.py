"""What a step will do, rank by rank: a value made before it, fixed by (seed, step) alone.

The data of a run is one unlimited list: epoch after epoch, each a seeded permutation of the packed sequences.
Step k takes the k-th slice of ``global_batch_size`` of it (steps count from 1) and cuts it into micro-batches.
Ranks only decide who computes which micro-batch, so the loader's whole state is the step number.
"""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from muster.core.batch_schedule import BatchSchedule
from muster.data.arrays import Int64s

#: Up to this many sequences an epoch's permutation is materialised (8 MiB); above it indices are computed one by
#: one through a Feistel network, so that a trillion sequences need no memory.
MATERIALISED = 1 << 20
_FEISTEL_ROUNDS = 8


@dataclass(frozen=True, kw_only=True)
class MicroBatchRef:
    """One micro-batch of a step: its position in the step, and the sequences in it."""

    index: int
    sequences: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class StepPlan:
    """The micro-batches of one global batch and how ``data_ranks`` ranks share them."""

    step: int
    micro_batches: tuple[tuple[int, ...], ...]
    data_ranks: int

    @property
    def rounds(self) -> int:
        """Micro-batches each rank runs, zero-weight padding included."""
        return math.ceil(len(self.micro_batches) / self.data_ranks)

    @property
    def padding_rounds(self) -> int:
        """Zero-weight micro-batches of the step, all ranks."""
        return self.rounds * self.data_ranks - len(self.micro_batches)

    def for_rank(self, data_rank: int) -> tuple[MicroBatchRef | None, ...]:
        """This rank's micro-batch of each round; None: zero-weight padding, only ever in the last round."""
        if not 0 <= data_rank < self.data_ranks:
            raise ValueError(f"data rank {data_rank} of {self.data_ranks}")
        indices = range(data_rank, self.rounds * self.data_ranks, self.data_ranks)
        return tuple(
            MicroBatchRef(index=index, sequences=self.micro_batches[index]) if index < len(self.micro_batches) else None
            for index in indices
        )


def plan_step(
    *,
    seed: int,
    step: int,
    num_sequences: int,
    global_batch_size: int,
    micro_batch_size: int,
    data_ranks: int,
    start: int | None = None,
) -> StepPlan:
    """The plan of ``step`` (1, 2, ...). ``micro_batches`` does not depend on ``data_ranks``.

    ``start``: where the step begins in the unlimited list; by default after ``step - 1`` batches of this size.

    A global batch may cross into the next epoch; each epoch visits every sequence exactly once. The last
    micro-batch is smaller where ``micro_batch_size`` does not divide ``global_batch_size``.

    Raises:
        ValueError: a count below 1.
    """
    if min(step, num_sequences, global_batch_size, micro_batch_size, data_ranks) < 1:
        raise ValueError(
            f"step {step}, num_sequences {num_sequences}, global_batch_size {global_batch_size}, "
            f"micro_batch_size {micro_batch_size} and data_ranks {data_ranks} must all be at least 1"
        )
    start = (step - 1) * global_batch_size if start is None else start
    indices = sequences_at(seed=seed, start=start, count=global_batch_size, num_sequences=num_sequences)
    cuts = range(0, global_batch_size, micro_batch_size)
    return StepPlan(
        step=step,
        micro_batches=tuple(tuple(indices[cut : cut + micro_batch_size]) for cut in cuts),
        data_ranks=data_ranks,
    )


def num_steps(
    *,
    steps: int | None,
    epochs: float | None,
    num_sequences: int,
    global_batch_size: int,
    batch_schedule: BatchSchedule | None = None,
) -> int:
    """The run's last step: ``steps`` where given, else as many as ``epochs`` need (one epoch by default).

    ``batch_schedule``: where the batch changed on the way; None: it never did.
    """
    if steps is not None:
        return steps
    sequences = math.ceil((1.0 if epochs is None else epochs) * num_sequences)
    return (batch_schedule or BatchSchedule.of(global_batch_size)).last_step(sequences)


def sequences_at(*, seed: int, start: int, count: int, num_sequences: int) -> list[int]:
    """Sequence indices at positions ``start`` to ``start + count`` of the unlimited list."""
    result: list[int] = []
    position = start
    while position < start + count:
        epoch, offset = divmod(position, num_sequences)
        length = min(num_sequences - offset, start + count - position)
        result += _slice(seed, epoch, num_sequences, offset, length)
        position += length
    return result


def hashed_order(count: int, purpose: str) -> Int64s:
    """A fixed random order of 0..count-1 for ``purpose``, by own arithmetic."""
    return _order(count, int.from_bytes(hashlib.sha256(f"muster-{purpose}".encode()).digest()[:8], "little"))


def _slice(seed: int, epoch: int, num_sequences: int, offset: int, length: int) -> list[int]:
    if num_sequences <= MATERIALISED:
        return [int(index) for index in _permutation(seed, epoch, num_sequences)[offset : offset + length]]
    return [int(index) for index in _feistel(seed, epoch, num_sequences, offset, length)]


def _key(seed: int, epoch: int, purpose: int) -> int:
    digest = hashlib.sha256(f"muster-order:{seed}:{epoch}:{purpose}".encode()).digest()
    return int.from_bytes(digest[:8], "little")


def _mix(values: NDArray[np.uint64], key: int) -> NDArray[np.uint64]:
    """SplitMix64's finaliser (Steele, Lea, Flood 2014)."""
    mixed = values + np.uint64(key)
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return mixed ^ (mixed >> np.uint64(31))


@lru_cache(maxsize=4)
def _permutation(seed: int, epoch: int, num_sequences: int) -> Int64s:
    return _order(num_sequences, _key(seed, epoch, 0))


def _order(count: int, key: int) -> Int64s:
    """Indices sorted by a keyed 64-bit hash: own arithmetic, since numpy's random streams may change by version."""
    with np.errstate(over="ignore"):
        hashed = _mix(np.arange(count, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15), key)
    return np.argsort(hashed, kind="stable").astype(np.int64)


def _feistel(seed: int, epoch: int, num_sequences: int, offset: int, length: int) -> Int64s:
    """Positions through an alternating Feistel network on the next power of two, walked until inside the range."""
    bits = max(2, (num_sequences - 1).bit_length())
    low_bits = np.uint64(bits // 2)
    low_mask = np.uint64((1 << (bits // 2)) - 1)
    high_mask = np.uint64((1 << (bits - bits // 2)) - 1)
    keys = [_key(seed, epoch, 1 + number) for number in range(_FEISTEL_ROUNDS)]
    values = np.arange(offset, offset + length, dtype=np.uint64)
    outside = np.ones(length, dtype=bool)
    with np.errstate(over="ignore"):
        while outside.any():
            low, high = values[outside] & low_mask, values[outside] >> low_bits
            for number, key in enumerate(keys):
                if number % 2:
                    high = high ^ (_mix(low, key) & high_mask)
                else:
                    low = low ^ (_mix(high, key) & low_mask)
            values[outside] = (high << low_bits) | low
            outside = values >= np.uint64(num_sequences)
    return values.astype(np.int64)
