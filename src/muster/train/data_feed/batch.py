"""One micro-batch on its device. B sequences of S tokens; documents never cross a sequence's end."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

import torch
from torch import Tensor

from muster.data.sequences import SequenceStore

IGNORED = -100


@dataclass(frozen=True)
class Batch:
    """Packed sequences and the bounds of their documents."""

    input_ids: Tensor
    """int64[B, S]"""
    labels: Tensor
    """int64[B, S], already shifted: the target of each position; -100: not supervised."""
    position_ids: Tensor
    """int64[B, S], from 0 in each document."""
    cu_seqlens: Tensor
    """int32[documents + 1], cumulative document lengths over the flattened B * S tokens; with static shapes its size is
    marked as one that changes, for torch.compile."""
    max_seqlen: int
    """Longest document; S with static shapes."""
    targets: Tensor
    """int64[supervised]: positions in the flattened tokens that have a target; logits are computed only there."""
    tokens: tuple[int, ...] = ()
    """Of each sequence, the rest of which is padding; empty: there is none."""

    def real(self) -> Tensor | None:
        """bool[B * S]: what is not padding; None: everything."""
        if not self.tokens:
            return None
        counts = torch.tensor(self.tokens, device=self.input_ids.device).unsqueeze(1)
        return (torch.arange(self.input_ids.shape[1], device=counts.device) < counts).flatten()

    @property
    def supervised(self) -> int:
        """Number of positions with a target."""
        return self.targets.numel()


def batch_from(
    store: SequenceStore, sequences: Sequence[int], device: torch.device, *, static_shapes: bool = False
) -> Batch:
    """The micro-batch of these sequences of ``store``. ``static_shapes``: for compiled models."""
    rows = [store[index] for index in sequences]
    if store.cut_to is not None:
        longest = max(row.tokens for row in rows)
        rows = [row.cut(min(store.sequence_length, -(-longest // store.cut_to) * store.cut_to)) for row in rows]
    lengths = [int(length) for row in rows for length in row.document_lengths]
    input_ids, labels, position_ids = (
        torch.stack([torch.as_tensor(getattr(row, name), dtype=torch.int64) for row in rows])
        for name in ("input_ids", "labels", "position_ids")
    )
    batch = make_batch(input_ids, labels, position_ids, lengths, device, static_shapes=static_shapes)
    return replace(batch, tokens=tuple(row.tokens for row in rows))


def padding_batch(micro_batch_size: int, sequence_length: int, device: torch.device, *, static_shapes: bool) -> Batch:
    """A micro-batch of weight zero, for a rank without work in a round: all ranks make the same collectives."""
    tokens = torch.zeros(micro_batch_size, sequence_length, dtype=torch.int64)
    positions = torch.arange(sequence_length).repeat(micro_batch_size, 1)
    lengths = [sequence_length] * micro_batch_size
    ignored = torch.full_like(tokens, IGNORED)
    batch = make_batch(tokens, ignored, positions, lengths, device, static_shapes=static_shapes)
    return replace(batch, tokens=(0,) * micro_batch_size)


def make_batch(
    input_ids: Tensor,
    labels: Tensor,
    position_ids: Tensor,
    document_lengths: Sequence[int],
    device: torch.device,
    *,
    static_shapes: bool = False,
) -> Batch:
    """A batch from its parts; ``document_lengths`` of all sequences, concatenated."""
    count, length = input_ids.shape
    bounds = [0, *accumulate(document_lengths)]
    assert bounds[-1] == count * length, f"documents hold {bounds[-1]} tokens, the batch {count * length}"
    longest = max(document_lengths)
    if static_shapes:
        longest = length
    on_cpu = device.type == "cpu"

    def moved(tensor: Tensor) -> Tensor:
        return tensor if on_cpu else tensor.pin_memory().to(device, non_blocking=True)

    cu_seqlens = moved(torch.tensor(bounds, dtype=torch.int32))
    if static_shapes:
        from torch._dynamo import maybe_mark_dynamic  # slow to import, and only compiled runs need it

        # One graph for any number of documents. Empty ones as padding would cost a kernel its launches, and flash
        # attention's backward pass 128 rows of workspace for each.
        maybe_mark_dynamic(cu_seqlens, 0)
    return Batch(
        input_ids=moved(input_ids),
        labels=moved(labels),
        position_ids=moved(position_ids),
        cu_seqlens=cu_seqlens,
        max_seqlen=longest,
        targets=moved((labels != IGNORED).flatten().nonzero().squeeze(1)),
    )
