"""Causal attention inside packed documents on CPU, as one operator.

Legend: T tokens of all sequences one after the other, H heads, D head dimension, N documents.

The kernel is PyTorch's own flash attention for CPU, which does not know document bounds. Short documents are
copied into batches of similar length, padded at the end, one kernel call each: under a causal mask no token attends to
later ones, so padding needs no mask. Long documents are not copied. The bounds are a tensor, so a compiled model has
one graph for all of them.
"""

from __future__ import annotations

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

    length: int
    rows: Tensor | None
    """int64[count * length]: the token at each padded position (in padding the document's last one); None: one document
    at ``start``, used in place."""
    real: Tensor | None
    """int64[real tokens]: padded positions that hold a token, in the order of ``tokens``."""
    tokens: Tensor | None
    start: int = 0


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
            groups.append(Bucket(length, None, None, None, start))
        elif length:
            padded = padded_length(length)
            short.setdefault(padded, []).append((start, length))
    for padded, documents in short.items():
        starts = torch.tensor([start for start, _ in documents])
        lengths = torch.tensor([length for _, length in documents])
        places = torch.arange(padded).expand(len(documents), padded)
        rows = starts[:, None] + torch.minimum(places, lengths[:, None] - 1)
        real = (places < lengths[:, None]).reshape(-1).nonzero().squeeze(1)
        groups.append(Bucket(padded, rows.reshape(-1), real, rows.reshape(-1)[real]))
    return tuple(groups)


def _gather(tensor: Tensor, bucket: Bucket) -> Tensor:
    """[T, H, ...] -> [documents, H, length, ...]"""
    if bucket.rows is None:
        part = tensor[bucket.start : bucket.start + bucket.length].unsqueeze(0)
    else:
        part = torch.unflatten(tensor.index_select(0, bucket.rows), 0, (-1, bucket.length))
    return part.transpose(1, 2)


def _scatter(into: Tensor, part: Tensor, bucket: Bucket) -> None:
    """The inverse of ``_gather``; values in padding are dropped."""
    flat = part.transpose(1, 2).flatten(0, 1)
    if bucket.rows is None:
        into[bucket.start : bucket.start + bucket.length] = flat
    else:
        assert bucket.tokens is not None and bucket.real is not None
        into.index_copy_(0, bucket.tokens, flat.index_select(0, bucket.real))


@torch.library.custom_op("muster::document_attention", mutates_args=(), device_types="cpu")
def _forward(
    query_THD: Tensor, key_THD: Tensor, value_THD: Tensor, cu_seqlens: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    output_THD = torch.zeros_like(query_THD, memory_format=torch.contiguous_format)
    lse_TH = torch.zeros(query_THD.shape[:2], dtype=torch.float32)
    for bucket in buckets(tuple(cu_seqlens.tolist())):
        query, key, value = (_gather(tensor, bucket) for tensor in (query_THD, key_THD, value_THD))
        output, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            query, key, value, 0.0, True, scale=scale
        )
        _scatter(output_THD, output, bucket)
        _scatter(lse_TH, lse, bucket)
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
    grads = [
        torch.zeros_like(tensor, memory_format=torch.contiguous_format) for tensor in (query_THD, key_THD, value_THD)
    ]
    for bucket in buckets(tuple(cu_seqlens.tolist())):
        grad = _gather(grad_THD, bucket)
        if bucket.rows is not None:
            grad = _only_real(grad, bucket)
        query, key, value, output, lse = (
            _gather(tensor, bucket) for tensor in (query_THD, key_THD, value_THD, output_THD, lse_TH)
        )
        parts = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            grad, query, key, value, output, lse, 0.0, True, scale=scale
        )
        for into, part in zip(grads, parts, strict=True):
            _scatter(into, part, bucket)
    return grads[0], grads[1], grads[2]


def _only_real(grad: Tensor, bucket: Bucket) -> Tensor:
    """Zero the gradient in padding, which repeats the last token: its copies must not add to keys and values."""
    assert bucket.real is not None and bucket.rows is not None
    mask = torch.zeros(bucket.rows.numel(), dtype=torch.bool)
    mask[bucket.real] = True
    return grad.masked_fill(~mask.view(grad.shape[0], 1, bucket.length, 1), 0.0)


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
