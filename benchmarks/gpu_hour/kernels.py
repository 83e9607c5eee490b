"""Probes of kernels: attention over packed documents, and the loss."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from gpu_hour.finding import Findings

HEADS, KV_HEADS, HEAD_DIM = 32, 8, 128


def attention(kernel: str) -> Callable[..., Tensor]:
    """Muster's kernel as a model calls it: ([1, H, S, D] each, cumulative lengths, longest) -> [1, S, H, D]."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    from muster.train.model.attention import register

    register()
    inner: Any = ALL_ATTENTION_FUNCTIONS[kernel]

    def call(query: Tensor, key: Tensor, value: Tensor, bounds: Tensor, longest: int) -> Tensor:
        given = {"cu_seq_lens_q": bounds, "cu_seq_lens_k": bounds, "max_length_q": longest, "max_length_k": longest}
        result: Tensor = inner(torch.nn.Identity(), query, key, value, None, scaling=None, **given)[0]
        return result

    return call


def random_inputs(tokens: int, *, smoke: bool) -> tuple[Tensor, ...]:
    device, dtype = (torch.device("cpu"), torch.float32) if smoke else (torch.device("cuda"), torch.bfloat16)
    torch.manual_seed(0)
    heads = (4, 2, 2) if smoke else (HEADS, KV_HEADS, KV_HEADS)
    dim = 16 if smoke else HEAD_DIM
    return tuple(torch.randn(1, each, tokens, dim, device=device, dtype=dtype).requires_grad_() for each in heads)


def bounds_of(lengths: list[int], padded_to: int, device: torch.device) -> Tensor:
    """Cumulative lengths with empty documents at the end."""
    ends = torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0).to(torch.int32)
    tail = ends[-1:].repeat(max(0, padded_to - len(lengths)))
    return torch.cat([ends, tail]).to(device)


def reference(query: Tensor, key: Tensor, value: Tensor, lengths: list[int]) -> Tensor:
    """Each document on its own, in float32."""
    groups = query.shape[1] // key.shape[1]
    key, value = (each.repeat_interleave(groups, dim=1) for each in (key, value))
    parts = zip(*(each.float().split(lengths, dim=2) for each in (query, key, value)), strict=True)
    done = [scaled_dot_product_attention(q, k, v, is_causal=True) for q, k, v in parts]
    return torch.cat(done, dim=2).transpose(1, 2)


def varlen(found: Findings, *, smoke: bool) -> None:
    """Forward and backward against each document on its own; twenty repeats bit for bit."""
    kernel = attention("muster_document" if smoke else "muster_varlen")
    lengths = [5, 1, 300, 64, 130] if not smoke else [5, 1, 20]
    inputs = random_inputs(sum(lengths), smoke=smoke)
    device = inputs[0].device
    wanted = reference(*inputs, lengths)
    seed = torch.randn_like(wanted)
    wanted_grads = torch.autograd.grad(wanted, inputs, seed)
    least = torch.finfo(inputs[0].dtype).eps
    found.figures["documents"] = lengths
    for name, padded_to in (("exact", len(lengths)), ("padded", 4 * len(lengths))):
        bounds = bounds_of(lengths, padded_to, device)
        got = kernel(*inputs, bounds, max(lengths))
        grads = torch.autograd.grad(got, inputs, seed.to(got.dtype))
        off = [relative(got, wanted), *(relative(a, b) for a, b in zip(grads, wanted_grads, strict=True))]
        found.figures[f"error_{name}"] = [float(f"{each:.3g}") for each in off]
        found.claim(
            f"attention over documents with grouped heads is right, forward and backward ({name} bounds)",
            max(off) < 8 * least, found.figures[f"error_{name}"],
        )  # fmt: skip
    bounds = bounds_of(lengths, len(lengths), device)
    torch.use_deterministic_algorithms(True)
    again = [repeat(kernel, inputs, bounds, max(lengths), seed) for _ in range(3 if smoke else 20)]
    torch.use_deterministic_algorithms(False)
    same = all(torch.equal(a, b) for each in again[1:] for a, b in zip(each, again[0], strict=True))
    found.claim(f"{len(again)} repeats of it are bit for bit under deterministic algorithms", same)


def repeat(kernel: Any, inputs: tuple[Tensor, ...], bounds: Tensor, longest: int, seed: Tensor) -> list[Tensor]:
    got = kernel(*inputs, bounds, longest)
    return [got.detach(), *torch.autograd.grad(got, inputs, seed.to(got.dtype))]


def relative(got: Tensor, wanted: Tensor) -> float:
    """Root mean square of the difference, as a share of the wanted one's."""
    got, wanted = got.detach().float(), wanted.detach().float()
    return float((got - wanted).norm() / wanted.norm())


def padding(found: Findings, *, smoke: bool) -> None:
    """What empty documents cost: 8,192 tokens in 1, 8 and 40 documents, bounds padded to 64 and 513."""
    tokens = 64 if smoke else 8192
    kernel = attention("muster_document" if smoke else "muster_varlen")
    inputs = random_inputs(tokens, smoke=smoke)
    rows: dict[str, dict[str, float]] = {}
    for documents in (1, 4) if smoke else (1, 8, 40):
        lengths = [tokens // documents] * documents
        lengths[-1] += tokens - sum(lengths)
        for padded_to in (documents, 8) if smoke else (documents, 64, 513):
            bounds = bounds_of(lengths, padded_to, inputs[0].device)
            longest = max(lengths) if padded_to == documents else tokens  # compiled runs pass the whole length
            rows[f"{documents} in {padded_to}"] = timed(
                lambda b=bounds, m=longest: torch.autograd.grad(kernel(*inputs, b, m).float().sum(), inputs),
                inputs[0].device,
            )
    found.figures["fwd_bwd"] = rows
    if not smoke:
        slow = {n: rows[f"{n} in 513"]["ms"] / rows[f"{n} in {n}"]["ms"] for n in (1, 8, 40)}
        said = {n: round(value, 2) for n, value in slow.items()}
        found.claim("513 bounds cost at least a tenth more than exact ones", max(slow.values()) > 1.1, said)


def loss(found: Findings, *, smoke: bool) -> None:
    """The chunked loss: eager and compiled, chunks of 1,024 and 4,096 tokens."""
    from muster.train.model import loss as module

    device = torch.device("cpu" if smoke else "cuda")
    dtype = torch.float32 if smoke else torch.bfloat16
    tokens, width, vocab = (64, 16, 128) if smoke else (8192, 4096, 128256)
    hidden = torch.randn(tokens, width, device=device, dtype=dtype).requires_grad_()
    head = (torch.randn(vocab, width, device=device, dtype=dtype) * 0.02).requires_grad_()
    labels = torch.randint(0, vocab, (tokens,), device=device)
    rule = module.LogitRule()

    def step(chunk: int, weight: Tensor) -> list[Tensor]:
        total = module.chunked_cross_entropy(
            hidden, weight, None, labels, scale=1 / tokens, chunk_tokens=chunk, rule=rule
        )
        wanted = [hidden, weight] if weight.requires_grad else [hidden]
        return [total.detach(), *torch.autograd.grad(total, wanted)]

    chunks = (16, 64) if smoke else (1024, 4096)
    rows = {f"chunk {each}": timed(lambda each=each: step(each, head), device) for each in chunks}
    rows["frozen head"] = timed(lambda: step(chunks[0], head.detach()), device)
    linear = torch.randn(chunks[0], vocab, device=device, dtype=dtype)
    call = module.cross_entropy_and_gradient

    def piece(function: Any) -> Any:
        return function(linear.clone(), labels[: chunks[0]], 1.0, rule, gradient=True)

    rows["piece, eager"] = timed(lambda: piece(call), device)
    if not smoke:
        compiled = torch.compile(call)
        rows["piece, compiled"] = timed(lambda: piece(compiled), device)
        gain = rows["piece, eager"]["ms"] / rows["piece, compiled"]["ms"]
        found.claim("the compiled cross-entropy is at least twice as fast", gain >= 2, round(gain, 2))
        larger = rows[f"chunk {chunks[0]}"]["ms"] / rows[f"chunk {chunks[1]}"]["ms"]
        found.claim("chunks of 4,096 are at least a tenth faster than 1,024", larger >= 1.1, round(larger, 2))
    found.figures["loss"] = rows
    small, large = (step(each, head) for each in chunks)
    least = 8 * torch.finfo(dtype).eps
    off = max(relative(a, b) for a, b in zip(small, large, strict=True))
    found.claim("chunks of any size give one loss and one gradient", off < least, f"{off:.2g}")


def timed(work: Callable[[], object], device: torch.device, rounds: int = 10) -> dict[str, float]:
    """Median milliseconds and peak bytes of ``work``, after two rounds to warm up."""
    cuda = device.type == "cuda"
    for _ in range(2):
        work()
    if cuda:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
    base = torch.cuda.memory_allocated() if cuda else 0
    times = []
    for _ in range(rounds):
        began = time.perf_counter()
        work()
        if cuda:
            torch.cuda.synchronize()
        times.append(time.perf_counter() - began)
    found = {"ms": round(statistics.median(times) * 1e3, 4)}
    if cuda:
        found["peak_mib"] = round((torch.cuda.max_memory_allocated() - base) / 2**20, 1)
    return found
