"""One 64-bit number for the whole training state, equal in every layout that holds the same bits.

Each element adds ``mix(bits, global flat index, seed of the tensor's name)``; the hash is their sum modulo 2**64, plus
the step's contribution. A sum has no order, so ranks add up their parts, however the state is sharded. Of copies
within a replica (tensor parallelism does not shard norms) only the first counts. A changed bit, or two elements or two
tensors exchanged, give another number; it guards against accidents, not against an adversary.

Each replica has a hash of its own, and all must be equal: replicas compute the same sums and updates, and nothing
corrects a flipped bit. If they differ, one of them is silently corrupt, and from that step on so are the weights.

The ranks' sums are reduced over the control group, which crosses replicas and is aborted when one is lost
(``GroupAborter``): a rank that waits there is freed as anywhere else, and that step never gets a hash.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from muster.checkpoint import compact
from muster.protocol.ranks import AgentClient
from muster.train.distributed.process_groups import all_reduce
from muster.train.distributed.reduce import ReduceGroups
from muster.train.state.snapshot import chunks_of
from muster.train.state.training_state import TrainingState, parameter_of

#: Odd multipliers without a pattern in their bits: of the golden ratio, and splitmix64's two (Steele, Lea and
#: Flood, 2014), as signed numbers.
PLACE_BY = 0x9E3779B97F4A7C15 - (1 << 64)
BITS_BY = 0xBF58476D1CE4E5B9 - (1 << 64)
MIXED_BY = 0x94D049BB133111EB - (1 << 64)
#: Elements at a time: on the CPU what goes from one operation to the next stays in a core's cache; on a GPU each
#: operation is a launch, whose cost must not be seen (and a block's temporary memory is 0.4 GB).
ELEMENTS_AT_ONCE = 1 << 15
ELEMENTS_AT_ONCE_ON_GPU = 1 << 24
_WIDTHS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True)
class Place:
    """The place of this rank's part in a global tensor."""

    seed: int
    global_shape: Sequence[int]
    offsets: Sequence[int]

    def from_row(self, first: int) -> Place:
        """The place of the part's rows from ``first`` on."""
        return self if first == 0 else replace(self, offsets=(self.offsets[0] + first, *self.offsets[1:]))


@dataclass
class PendingHash:
    """The hash of each replica, while it is being reduced."""

    step: int
    totals: Tensor
    """One number per replica."""
    work: dist.Work | None
    """None: one rank only, or the group failed at once (``totals`` are then invalid)."""
    broken: bool = False

    def texts(self, *, wait: bool = True) -> list[str] | None:
        """16 hexadecimal digits per replica. None if the group failed, or (without ``wait``) has not completed."""
        try:
            if self.broken or (self.work is not None and not wait and not self.work.is_completed()):
                return None
            if self.work is not None:
                self.work.wait()
        except RuntimeError:
            return None
        return [f"{(total + self.step * PLACE_BY) % (1 << 64):016x}" for total in self.totals.tolist()]


@dataclass
class StateHashes:
    """Hashes the training state every ``every_steps`` steps."""

    state: TrainingState
    every_steps: int
    replica: int
    groups: ReduceGroups
    """Which say what this rank counts."""
    group: dist.ProcessGroup | None
    """gloo over all ranks; None: one rank only."""
    replicas: int = 1
    counted_elsewhere: frozenset[str] = frozenset()
    """Parameters that an earlier stage of the pipeline holds too, and counts."""
    _difference_reported: bool = False

    def __post_init__(self) -> None:
        if self.every_steps:
            own = {
                name: tensor
                for name, tensor in self.state.sharded().items()
                if parameter_of(name) not in self.counted_elsewhere
            }
            self._places = places_of(own, self.groups)

    def begin(self, step: int) -> PendingHash | None:
        """Sum this rank's part of the state after ``step`` and start the reduction; None: no hash is due.

        Collective. On CUDA the host waits for the device here. A lost peer raises nothing.
        """
        if not self.every_steps or step % self.every_steps:
            return None
        totals = torch.zeros(self.replicas, dtype=torch.int64)
        totals[self.replica] = partial_sum(self.state.local_tensors(), self._places)
        pending = PendingHash(step, totals, None)
        if self.group is not None:
            try:
                pending.work = all_reduce(totals, self.group)
            except RuntimeError:
                pending.broken = True
        return pending

    def event_detail(self, pending: PendingHash, agent: AgentClient | None, *, wait: bool = True) -> dict[str, Any]:
        """Its part of the ``step`` event's detail. ``agent``: gets one message if replicas differ."""
        texts = pending.texts(wait=wait)
        if texts is None:
            return {"state_hash": None}
        if len(set(texts)) == 1:
            return {"state_hash": texts[0]}
        if agent is not None and not self._difference_reported:
            self._difference_reported = True
            text = describe_difference(pending.step, texts)
            agent.emit("run.message", step=pending.step, text=text, replica_hashes=texts)
        return {"state_hash": texts[0], "replica_hashes": texts}


def describe_difference(step: int, texts: Sequence[str]) -> str:
    """Which replicas hold another state than the majority."""
    start = f"after step {step} the replicas do not hold one state: silent corruption of "
    numbers = {text: [replica for replica, other in enumerate(texts) if other == text] for text in texts}
    most = max(numbers.values(), key=len)
    if 2 * len(most) > len(texts):
        odd = [str(replica) for replica in range(len(texts)) if replica not in most]
        return f"{start}replica {' and '.join(odd)}, where {len(most)} of {len(texts)} agree"
    groups = "; ".join(f"{text}: replica {' and '.join(map(str, members))}" for text, members in numbers.items())
    return f"{start}one that cannot be identified ({groups})"


def places_of(sharded: Mapping[str, Tensor], groups: ReduceGroups) -> dict[str, Place]:
    """The places of the parts that this rank counts."""
    chunks, _ = chunks_of(sharded)
    places = {}
    for chunk, tensor in zip(chunks, sharded.values(), strict=True):
        if groups.counts(tensor):
            places[chunk.name] = Place(seed_of(chunk.name), chunk.global_shape, chunk.offsets)
    return places


def seed_of(name: str) -> int:
    """A signed 64-bit number that belongs to ``name``."""
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "little", signed=True)


@torch.no_grad()
def partial_sum(tensors: Mapping[str, Tensor], places: Mapping[str, Place]) -> Tensor:
    """The sum over these parts, 0-d int64 on the host."""
    sums = [
        mixed_sum(bits, key)
        for name, place in places.items()
        if tensors[name].numel()
        for first, rows in compact.slices(tensors[name])
        for bits, key in pieces(rows, place.from_row(first))
    ]
    return torch.stack(sums).sum().cpu() if sums else torch.zeros((), dtype=torch.int64)


def mixed_sum(bits: Tensor, key: Tensor) -> Tensor:
    """The sum of mix(bits, key) over the elements; a round of splitmix64's finaliser mixes."""
    mixed = torch.add(key, bits, alpha=BITS_BY)
    mixed ^= (mixed >> 32) & (1 << 32) - 1  # int64 shifts are arithmetic
    mixed *= MIXED_BY
    mixed ^= (mixed >> 29) & (1 << 35) - 1
    return mixed.sum()


def pieces(tensor: Tensor, place: Place) -> Iterator[tuple[Tensor, Tensor]]:
    """(bits, key) of blocks of elements; a key is the global flat index, multiplied, plus the tensor's seed."""
    bits = tensor.contiguous().view(_WIDTHS[tensor.element_size()])
    whole_rows = tuple(place.global_shape[1:]) == tuple(tensor.shape[1:])  # then contiguous in the global tensor too
    bits = bits.reshape(1, -1) if whole_rows else bits.reshape(-1, tensor.shape[-1])
    firsts = first_indices(tensor.shape, place, tensor.device)[: bits.shape[0]] * PLACE_BY
    ramp = spread(tensor.device)
    at_once = len(ramp)
    for at in range(0, bits.shape[1], at_once):
        columns = bits[:, at : at + at_once]
        width = columns.shape[1]
        starts = firsts + signed(at * PLACE_BY + place.seed)
        rows = max(1, at_once // width)
        for block, start in zip(torch.split(columns, rows), torch.split(starts, rows), strict=True):
            yield block, ramp[:width] + start[:, None]


def first_indices(shape: Sequence[int], place: Place, device: torch.device) -> Tensor:
    """Flat index in the global tensor of the first element of each row (of the last dimension) of the part."""
    indices = torch.tensor([place.offsets[-1] if place.offsets else 0], device=device)
    stride = place.global_shape[-1] if place.global_shape else 1
    for size, whole, offset in zip(
        reversed(shape[:-1]), reversed(place.global_shape[:-1]), reversed(place.offsets[:-1]), strict=True
    ):
        lines = (torch.arange(size, device=device) + offset) * stride
        indices = (lines[:, None] + indices).reshape(-1)
        stride *= whole
    return indices


@functools.cache
def spread(device: torch.device) -> Tensor:
    """0, 1, 2, ... times ``PLACE_BY``, wrapped, for a block; computed once per device."""
    at_once = ELEMENTS_AT_ONCE_ON_GPU if device.type == "cuda" else ELEMENTS_AT_ONCE
    return torch.arange(at_once, dtype=torch.int64, device=device) * PLACE_BY


def signed(number: int) -> int:
    """``number`` modulo 2**64, as int64 has it."""
    return (number + (1 << 63)) % (1 << 64) - (1 << 63)
