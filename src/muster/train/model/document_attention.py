"""Causal attention inside packed documents on CPU, as one operator.

Legend: T tokens of all sequences one after the other, H heads, D head dimension, N documents.

The kernel is PyTorch's own flash attention for CPU, which does not know document bounds. Short documents are
copied into batches of similar length, padded at the end, one kernel call each: under a causal mask no token attends to
later ones, so padding needs no mask. Long documents are not copied, nor are those that lie one behind the other and
need no padding (a document a sequence, mostly). The bounds are a tensor, so a compiled model has
one graph for all of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise

import torch
from torch import Tensor

#: Longer documents are not copied: a kernel call costs much less than their attention.
COPIED_UP_TO = 512
SHORTEST_STEP = 8


def document_attention(
    query_THD: Tensor, key_THD: Tensor, value_THD: Tensor, cu_seqlens: Tensor, scale: float
) -> Tensor:
    """Attention output [T, H, D]; keys and values have as many heads as queries, ``cu_seqlens`` int32[N + 1]."""
    output: Tensor = torch.ops.muster.document_attention(query_THD, key_THD, value_THD, cu_seqlens, scale)[0]
    return output


@dataclass(frozen=True)
class Bucket:
    """Documents that share a kernel call."""

    count: int
    length: int
    start: int = 0
    rows: Tensor | None = None
    """int64[count * length]: the token at each padded position (in padding the document's last one); None: the
    documents lie one behind the other from ``start`` on, and are used in place."""
    real: Tensor | None = None
    """int64[real tokens]: padded positions that hold a token, in the order of ``tokens``."""
    tokens: Tensor | None = None
    padding: Tensor | None = None
    """bool[count, 1, length, 1]: positions that hold none."""


def padded_length(length: int) -> int:
    """The next of four lengths per octave: few kernel calls, at most a quarter of padding."""
    step = max(SHORTEST_STEP, (1 << (length - 1).bit_length()) // 8)
    return -(-length // step) * step


@lru_cache(maxsize=16)
def buckets(bounds: tuple[int, ...]) -> tuple[Bucket, ...]:
    """How documents with these cumulative lengths are grouped. The padding depends only on a document's own length."""
    groups: list[Bucket] = []
    short: dict[int, list[tuple[int, int]]] = {}
    for start, end in pairwise(bounds):
        length = end - start
        if length > COPIED_UP_TO:
            groups.append(Bucket(1, length, start))
        elif length:
            padded = padded_length(length)
            short.setdefault(padded, []).append((start, length))
    for padded, documents in short.items():
        first = documents[0][0]
        if documents == [(first + number * padded, padded) for number in range(len(documents))]:
            groups.append(Bucket(len(documents), padded, first))
            continue
        starts = torch.tensor([start for start, _ in documents])
        lengths = torch.tensor([length for _, length in documents])
        places = torch.arange(padded).expand(len(documents), padded)
        rows = starts[:, None] + torch.minimum(places, lengths[:, None] - 1)
        held = places < lengths[:, None]
        real = held.reshape(-1).nonzero().squeeze(1)
        rows = rows.reshape(-1)
        groups.append(Bucket(len(documents), padded, first, rows, real, rows[real], ~held[:, None, :, None]))
    return tuple(groups)


def _gather(tensor: Tensor, bucket: Bucket) -> Tensor:
    """[T, H, ...] -> [documents, H, length, ...]"""
    if bucket.rows is None:
        part = tensor[bucket.start : bucket.start + bucket.count * bucket.length]
    else:
        part = tensor.index_select(0, bucket.rows)
    return torch.unflatten(part, 0, (bucket.count, bucket.length)).transpose(1, 2)


def _results(groups: Sequence[Bucket], shape: Sequence[int], dtype: torch.dtype, count: int) -> list[Tensor | None]:
    """Where the buckets' results go: [T, H, ...] of ``shape`` each, zeros at tokens of no document. None: one bucket
    holds all tokens in place, and its result is the whole."""
    tokens = sum(bucket.count * bucket.length if bucket.tokens is None else len(bucket.tokens) for bucket in groups)
    if len(groups) == 1 and groups[0].rows is None and tokens == shape[0]:
        return [None] * count
    new = torch.empty if tokens == shape[0] else torch.zeros
    return [new(*shape, dtype=dtype) for _ in range(count)]


def _scatter(into: Tensor | None, part: Tensor, bucket: Bucket) -> Tensor:
    """The inverse of ``_gather``; values in padding are dropped. Returns ``into``, or its replacement."""
    flat = part.transpose(1, 2).flatten(0, 1)
    if into is None:
        return flat.contiguous()
    if bucket.rows is None:
        into[bucket.start : bucket.start + len(flat)] = flat
    else:
        assert bucket.tokens is not None and bucket.real is not None
        into.index_copy_(0, bucket.tokens, flat.index_select(0, bucket.real))
    return into


@torch.library.custom_op("muster::document_attention", mutates_args=(), device_types="cpu")
def _forward(
    query_THD: Tensor, key_THD: Tensor, value_THD: Tensor, cu_seqlens: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    groups = buckets(tuple(cu_seqlens.tolist()))
    [output_THD] = _results(groups, query_THD.shape, query_THD.dtype, 1)
    [lse_TH] = _results(groups, query_THD.shape[:2], torch.float32, 1)
    for bucket in groups:
        query, key, value = (_gather(tensor, bucket) for tensor in (query_THD, key_THD, value_THD))
        output, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            query, key, value, 0.0, True, scale=scale
        )
        output_THD, lse_TH = _scatter(output_THD, output, bucket), _scatter(lse_TH, lse, bucket)
    assert output_THD is not None and lse_TH is not None
    return output_THD, lse_TH


@_forward.register_fake
def _(query_THD: Tensor, key_THD: Tensor, value_THD: Tensor, cu_seqlens: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    output = torch.empty_like(query_THD, memory_format=torch.contiguous_format)
    return output, query_THD.new_empty(query_THD.shape[:2], dtype=torch.float32)


@torch.library.custom_op("muster::document_attention_backward", mutates_args=(), device_types="cpu")
def _backward(
    grad_THD: Tensor,
    query_THD: Tensor,
    key_THD: Tensor,
    value_THD: Tensor,
    output_THD: Tensor,
    lse_TH: Tensor,
    cu_seqlens: Tensor,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    groups = buckets(tuple(cu_seqlens.tolist()))
    grads = _results(groups, query_THD.shape, query_THD.dtype, 3)
    for bucket in groups:
        grad = _gather(grad_THD, bucket)
        if bucket.padding is not None:  # which repeats the last token: its copies must not add to keys and values
            grad = grad.masked_fill(bucket.padding, 0.0)
        query, key, value, output, lse = (
            _gather(tensor, bucket) for tensor in (query_THD, key_THD, value_THD, output_THD, lse_TH)
        )
        parts = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            grad, query, key, value, output, lse, 0.0, True, scale=scale
        )
        grads[:] = [_scatter(into, part, bucket) for into, part in zip(grads, parts, strict=True)]
    query_grad, key_grad, value_grad = grads
    assert query_grad is not None and key_grad is not None and value_grad is not None
    return query_grad, key_grad, value_grad


@_backward.register_fake
def _(
    grad_THD: Tensor,
    query_THD: Tensor,
    key_THD: Tensor,
    value_THD: Tensor,
    output_THD: Tensor,
    lse_TH: Tensor,
    cu_seqlens: Tensor,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    query, key, value = (
        torch.empty_like(tensor, memory_format=torch.contiguous_format) for tensor in (query_THD, key_THD, value_THD)
    )
    return query, key, value


def _save(ctx, inputs, output) -> None:  # type: ignore[no-untyped-def]
    query, key, value, cu_seqlens, scale = inputs
    ctx.save_for_backward(query, key, value, output[0], output[1], cu_seqlens)
    ctx.scale = scale


def _differentiate(ctx, grad_output, _):  # type: ignore[no-untyped-def]
    query, key, value, output, lse, cu_seqlens = ctx.saved_tensors
    grads = torch.ops.muster.document_attention_backward(
        grad_output, query, key, value, output, lse, cu_seqlens, ctx.scale
    )
    return *grads, None, None


_forward.register_autograd(_differentiate, setup_context=_save)
