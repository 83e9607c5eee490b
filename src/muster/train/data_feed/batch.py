"""One micro-batch on its device. B sequences of S tokens; documents never cross a sequence's end."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

import numpy as np
import torch
from torch import Tensor

from muster.data.sequences import Sequence as Row
from muster.data.sequences import SequenceStore

IGNORED = -100


@dataclass(frozen=True)
class Units:
    """What an objective on preferences needs besides log-probabilities. D documents in order (of pairs the better one
    first, the other one behind it), U units, T targets of the batch."""

    targets: Tensor
    """int64[D]: targets of each document."""
    counts: Tensor
    """int64[D]: those in its answer."""
    grades: Tensor
    """float32[U]"""
    reference: Tensor | None = None
    """float32[D]: log-probabilities of the answers before training."""
    answers: Tensor | None = None
    """float32[T]: 1 in answers, 0 in prompts; None: all targets are in answers."""
    in_chosen: Tensor | None = None
    """float32[T]: 1 in better conversations; where prompts are learned."""
    per_token: float = 0.0
    """Units of the step for each of those targets of the step."""


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
    units: Units | None = None
    """Of preferences."""

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
    store: SequenceStore,
    sequences: Sequence[int],
    device: torch.device,
    *,
    static_shapes: bool = False,
    learns_prompts: float | None = None,
) -> Batch:
    """The micro-batch of these sequences of ``store``. ``static_shapes``: for compiled models. ``learns_prompts``: of
    preferences, prompts of better answers are targets too, and this is ``Units.per_token``."""
    rows = [store[index] for index in sequences]
    if store.cut_to is not None:
        longest = max(row.tokens for row in rows)
        rows = [row.cut(min(store.sequence_length, -(-longest // store.cut_to) * store.cut_to)) for row in rows]
    lengths = [int(length) for row in rows for length in row.document_lengths]
    input_ids, labels, position_ids = (
        torch.stack([torch.as_tensor(getattr(row, name), dtype=torch.int64) for row in rows])
        for name in ("input_ids", "labels", "position_ids")
    )
    answers = labels
    if learns_prompts is not None:
        labels = _with_prompts(rows, input_ids, labels)
    batch = make_batch(input_ids, labels, position_ids, lengths, device, static_shapes=static_shapes)
    units = None
    if rows[0].grades is not None:
        units = _units(rows, labels, answers, device)
        if learns_prompts is not None:
            units = replace(units, per_token=learns_prompts)
    return replace(batch, tokens=tuple(row.tokens for row in rows), units=units)


def chosen_targets(sequence: Row) -> int:
    """Tokens of the better conversations of pairs that are predicted, prompts included."""
    return 0 if sequence.grades is None else int((sequence.documents[0::2] - 1).sum())


def _with_prompts(rows: Sequence[Row], input_ids: Tensor, labels: Tensor) -> Tensor:
    """``labels`` with every token of the better conversations."""
    labels = labels.clone()
    for number, row in enumerate(rows):
        begin = 0
        for place, length in enumerate(row.documents.tolist()):
            if place % 2 == 0:
                labels[number, begin : begin + length - 1] = input_ids[number, begin + 1 : begin + length]
            begin += length
    return labels


def _units(rows: Sequence[Row], labels: Tensor, answers: Tensor, device: torch.device) -> Units:
    """Of sequences of preferences; ``answers``: the labels without what is learned of prompts."""
    length = labels.shape[1]
    sizes = [row.documents for row in rows]
    of_document = np.full(labels.shape, -1)
    numbers = np.split(np.arange(sum(map(len, sizes))), np.cumsum(list(map(len, sizes)))[:-1])
    for number, (size, own) in enumerate(zip(sizes, numbers, strict=True)):
        of_document[number, : int(size.sum())] = np.repeat(own, size)
    assert length >= max(int(size.sum()) for size in sizes)
    is_target, is_answer = (part.numpy() != IGNORED for part in (labels, answers))
    count = sum(map(len, sizes))
    per_document = [np.bincount(of_document[chosen], minlength=count) for chosen in (is_target, is_answer)]
    known = [row.reference for row in rows if row.reference is not None]
    grades = np.concatenate([row.grades for row in rows if row.grades is not None])
    targets, counts, graded = (torch.from_numpy(part).to(device) for part in (*per_document, grades))
    units = Units(targets, counts, graded)
    if labels is not answers:
        marks = (is_answer[is_target], of_document[is_target] % 2 == 0)
        whole, in_chosen = (torch.from_numpy(mark.astype(np.float32)).to(device) for mark in marks)
        units = replace(units, answers=whole, in_chosen=in_chosen)
    if len(known) == len(rows):
        units = replace(units, reference=torch.from_numpy(np.concatenate(known)).to(device))
    return units


def shared_batches(
    store: SequenceStore,
    sequences: Sequence[int],
    device: torch.device,
    *,
    size: int,
    rank: int,
    ranks: int,
    static_shapes: bool = False,
    learns_prompts: float | None = None,
) -> Iterator[tuple[int | None, Batch]]:
    """This rank's share of micro-batches of ``size`` of ``sequences``, each with its number, which does not depend on
    ``ranks``; None and padding where it has none: as many on every rank."""
    parts = [sequences[start : start + size] for start in range(0, len(sequences), size)]
    for number in range(rank, -(-len(parts) // ranks) * ranks, ranks):
        if number < len(parts):
            chosen = parts[number]
            yield number, batch_from(store, chosen, device, static_shapes=static_shapes, learns_prompts=learns_prompts)
        else:
            yield None, padding_batch(size, store.sequence_length, device, static_shapes=static_shapes)


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
