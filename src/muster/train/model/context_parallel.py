"""Context parallel: ranks share each sequence, and attention gathers the keys and values of all of it.

Legend: B sequences of S tokens, C ranks of a context, H heads, D head dimension; L = S / C tokens are here.

A sequence is cut into 2 C chunks, and rank c has the chunks c and 2 C - 1 - c: under a causal mask early tokens attend
to few and late ones to many, so every rank has about the same work (as Llama 3's pretraining did it). Queries stay
where they are; keys and values are gathered, and their gradients summed back to their ranks. A query attends to its own
document only, from the document's start to itself: each piece of a document in a chunk is one kernel call, whose keys
are exactly those, so packed documents stay apart without a mask over the whole sequence.

Parameters are cut over these ranks as over others (``Meshes.shard`` contains them), so that gradients are summed over
them by FSDP.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from muster.core.errors import UsageError
from muster.train.data_feed.batch import IGNORED, Batch
from muster.train.model.attention_needs import Needs

#: Its name in transformers' table.
IMPLEMENTATION = "muster_context"


@dataclass(frozen=True)
class Context:
    """The ranks that share each sequence, and which of them this one is. Not a pytree: passed on unchanged."""

    group: dist.ProcessGroup
    rank: int
    size: int

    def part_of(self, batch: Batch) -> Batch:
        """This rank's tokens of every sequence; the bounds of documents stay those of the whole ones."""
        places = torch.cat([torch.arange(first, last) for first, last in self.chunks(batch.input_ids.shape[1])])
        places = places.to(batch.input_ids.device)
        labels = batch.labels.index_select(1, places)
        return replace(
            batch,
            input_ids=batch.input_ids.index_select(1, places),
            labels=labels,
            position_ids=batch.position_ids.index_select(1, places),
            targets=(labels != IGNORED).flatten().nonzero().squeeze(1),
        )

    def chunks(self, length: int) -> list[tuple[int, int]]:
        """First and last place (the latter not included) of this rank's two chunks of a sequence."""
        size = length // (2 * self.size)
        return [(number * size, (number + 1) * size) for number in (self.rank, 2 * self.size - 1 - self.rank)]


def check(needs: Needs, sequence_length: int, size: int) -> None:
    """Raise UsageError where this attention cannot do what the model needs."""
    reasons = {
        "a sliding window": needs.window is not None,
        "capped attention scores": needs.softcap,
        "attention sinks": needs.sinks,
        "attention dropout": needs.dropout,
        "kernels of its own": not (needs.own_kernels and needs.takes_arguments),
        "a mask of its own": needs.own_mask,
        "values of another size": needs.value_dim is not None,
    }
    reason = next((what for what, applies in reasons.items() if applies), None)
    if reason is not None:
        raise UsageError(f"parallelism.cp {size} is not possible: the model has {reason}", hint="parallelism.cp: 1")
    assert sequence_length % (2 * size) == 0, "checked with the run file"


def register() -> None:
    """Register the attention with transformers; idempotent."""
    from transformers import AttentionInterface

    AttentionInterface.register(IMPLEMENTATION, _attend)


def _attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    cu_seq_lens_q: Tensor,
    context: Context,
    **_: object,
) -> tuple[Tensor, None]:
    """[B, H, L, D] -> [B, L, H, D]; keys and values are this rank's, ``cu_seq_lens_q`` of the whole sequences."""
    keys, values = gathered(torch.stack((key, value)), context).unbind()
    groups = query.shape[1] // key.shape[1]
    if groups > 1:
        keys, values = keys.repeat_interleave(groups, dim=1), values.repeat_interleave(groups, dim=1)
    count, length = query.shape[0], keys.shape[2]
    parts: list[Tensor] = []
    for row, rows_pieces in enumerate(pieces(tuple(cu_seq_lens_q.tolist()), count, length, context.rank, context.size)):
        done = []
        for at, size, first, last in rows_pieces:
            attended = nn.functional.scaled_dot_product_attention(
                query[row : row + 1, :, at : at + size],
                keys[row : row + 1, :, first:last],
                values[row : row + 1, :, first:last],
                attn_mask=lower_right(size, last - first, query.device),
                scale=scaling,
            )
            done.append(attended)
        parts.append(torch.cat(done, dim=2))
    return torch.cat(parts).transpose(1, 2).contiguous(), None


@lru_cache(maxsize=64)
def pieces(
    bounds: tuple[int, ...], count: int, length: int, rank: int, size: int
) -> tuple[tuple[tuple[int, int, int, int], ...], ...]:
    """For each sequence (place among this rank's tokens, tokens, first key, end of the keys) of each part of a document
    in this rank's chunks, in the order of its tokens."""
    chunk = length // (2 * size)
    result: list[list[tuple[int, int, int, int]]] = [[] for _ in range(count)]
    for at, number in ((0, rank), (chunk, 2 * size - 1 - rank)):
        for start, end in pairwise(bounds):
            if start == end:
                continue
            row = start // length
            document = (start - row * length, end - row * length)
            first, last = max(document[0], number * chunk), min(document[1], (number + 1) * chunk)
            if first < last:
                result[row].append((at + first - number * chunk, last - first, document[0], last))
    return tuple(tuple(sorted(each)) for each in result)


@lru_cache(maxsize=64)
def lower_right(queries: int, keys: int, device: torch.device) -> Tensor:
    """The mask of the last ``queries`` of ``keys`` places: each sees those up to itself."""
    return torch.ones(queries, keys, dtype=torch.bool, device=device).tril(keys - queries)


def gathered(tensor: Tensor, context: Context) -> Tensor:
    """[..., L, D] of every rank -> [..., S, D] in the order of the sequence; gradients are summed back."""
    every: Tensor = _Gather.apply(tensor, context)  # type: ignore[no-untyped-call]
    half = tensor.shape[-2] // 2
    early = [every[rank].narrow(-2, 0, half) for rank in range(context.size)]
    late = [every[rank].narrow(-2, half, half) for rank in reversed(range(context.size))]
    return torch.cat([*early, *late], dim=-2)


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, context: Context) -> Tensor:
        ctx.context = context
        output = tensor.new_empty(context.size, *tensor.shape)
        dist.all_gather_into_tensor(output.flatten(0, 1), tensor.contiguous(), group=context.group)
        return output

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        (gradient,) = gradients
        output = gradient.new_empty(gradient.shape[1:])
        dist.reduce_scatter_tensor(output, gradient.contiguous().flatten(0, 1), group=ctx.context.group)
        return output, None
