"""Bytes that a decoder layer keeps between forward and backward, per token: counted tensor by tensor.

Legend: h hidden, a = heads x head_dim, k = kv_heads x head_dim, i intermediate; c bytes of the compute type.
The layer is transformers' (RMSNorm in float32, rotary positions, gated MLP) under autograd:

* a norm saves its input in float32 (where c < 4: a cast copy, 4 h), the normalised value in c (c h) and its output,
  which is the next matrices' input (c h); in float32 there is no cast copy, but the product with 1/rms stays (c h);
* attention saves q, k, v and its result (which is o_proj's input), and a float32 log-sum-exp per head;
* a LayerNorm is one kernel: it saves its input and its output, both in c;
* the MLP saves gate, silu(gate), up and their product; without a gate what goes into the activation and what comes out;
* rotary tables, residual sums and weights add nothing that grows with the layer's tokens.

Compiled layers keep less: the partitioner computes elementwise results again from the matrices' results.
"""

from __future__ import annotations

from dataclasses import replace

from muster.core.flops import ModelShape


def kept_per_token(
    shape: ModelShape, kind: str, *, compute_bytes: int, compiled: bool, lora_rank: int, tp: int, expanded_kv: bool
) -> float:
    """Bytes a token that one layer holds until its backward pass, on one rank."""
    h, a, k, i = _widths(shape, tp)
    c = compute_bytes
    if kind == "full":
        return c * h
    if shape.experts is not None:  # each token's sorted copies, and what they come back as
        copies = replace(shape, experts=None)
        more = 2 * c * shape.experts.share * shape.experts.active * h
        return more + kept_per_token(
            copies, kind, compute_bytes=c, compiled=compiled, lora_rank=lora_rank, tp=tp, expanded_kv=expanded_kv
        )
    if expanded_kv:  # the CPU kernel gets keys and values repeated to the queries' heads
        attention = c * 4 * a
    else:
        attention = c * (2 * a + 2 * k)
    attention += 4 * shape.heads / tp
    matrices = 2 if shape.gated_mlp else 1
    if kind == "selective":  # results of matrices and attention, and the layer's input
        products = c * (a + 2 * k + 2 * h + matrices * i)
        return c * h + products + c * a + 4 * shape.heads / tp + _adapters(shape, c, lora_rank)
    if compiled:
        return c * 2 * h + attention + c * matrices * i + 8 + _adapters(shape, c, lora_rank)
    norm = (4 + 2 * c) * h if c < 4 else 3 * c * h
    if shape.layer_norm:  # one kernel: its input (the stream) and its output
        norm = 2 * c * h
    elif lora_rank:  # a frozen norm's weight needs no gradient, so the normalised value is not kept
        norm -= c * h
    norms = shape.norms_per_layer * norm
    if shape.qk_norm:  # over the heads of q and k; what comes out is not kept, the rotation keeps it no more
        norms += (4 + c if c < 4 else 2 * c) * (a + k)
    mlp = c * (4 if shape.gated_mlp else 2) * i
    return norms + attention + mlp + _adapters(shape, c, lora_rank)


def working_per_token(shape: ModelShape, *, compute_bytes: int, tp: int) -> float:
    """Extra bytes a token at the peak of one layer's backward pass: gradients in flight, and what is computed again."""
    h, _a, _k, i = _widths(shape, tp)
    return compute_bytes * ((2 if shape.gated_mlp else 1) * i + h)


def recomputed_share(kind: str) -> float:
    """Forward passes of the layers' matrices that are made again in a step."""
    return 1.0 if kind == "full" else 0.0


def _adapters(shape: ModelShape, compute_bytes: int, rank: int) -> float:
    """Inputs cast to the adapters' type are shared; each adapter keeps its rank-r middle."""
    return 0.0 if not rank else compute_bytes * rank * len(shape.linears())


def _widths(shape: ModelShape, tp: int) -> tuple[float, float, float, float]:
    """h, a, k, i on one tensor-parallel rank: the stream is whole, the inside of a layer is split."""
    return shape.hidden, shape.attention_width / tp, shape.kv_heads * shape.head_dim / tp, shape.intermediate / tp
