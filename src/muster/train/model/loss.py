"""Cross-entropy over chunks of tokens, so that the logits of a whole batch are never in memory.

Legend: T tokens, E hidden size, V vocabulary. The gradients of a chunk are computed with its loss, in the
forward pass, while its logits are in memory: they are not recomputed in the backward pass. The idea
is from the Liger kernel (Hsu et al. 2024); this is plain PyTorch.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch import Tensor, nn

from muster.train.data_feed.batch import IGNORED, Batch
from muster.train.model.sharding import reshard

if TYPE_CHECKING:
    from transformers import PreTrainedConfig


@dataclass(frozen=True)
class LogitRule:
    """What a model does to its head's output: ``cap * tanh(factor * logits / cap)``."""

    factor: float = 1.0
    cap: float | None = None


#: Devices with a kernel that adds a product of half-precision matrices to a float32 sum.
ADDS_IN_KERNEL = ("cuda",)
#: What autograd hands a function.
Context: TypeAlias = Any
#: ``cross_entropy_and_gradient`` or something that does the same.
Kernel: TypeAlias = Callable[..., tuple[Tensor, Tensor | None]]


#: Names of the cap in configs (Gemma 2, xLSTM, RecurrentGemma). The self-test cannot see one at a run's first, small
#: logits.
CAPS = ("final_logit_softcapping", "output_logit_soft_cap", "logits_soft_cap")


def logit_rule(config: PreTrainedConfig) -> LogitRule:
    """The rule in a transformers config: Gemma's cap, Granite's divisor, Cohere's factor."""
    factor = 1.0
    if getattr(config, "logits_scaling", None):
        factor /= float(config.logits_scaling)
    if getattr(config, "logit_scale", None):
        factor *= float(config.logit_scale)
    caps = (getattr(config, name, None) for name in CAPS)
    return LogitRule(factor=factor, cap=next((float(cap) for cap in caps if cap), None))


def loss_sum(
    module: nn.Module, batch: Batch, *, chunk_tokens: int, scale: float, hidden: Tensor | None = None, chunk: int = 0
) -> Tensor:
    """``scale`` times the sum of cross-entropies at supervised tokens of ``batch``; fp32, 0-d.

    ``module`` is ``BuiltModel.module``. The caller passes 1 / (supervised tokens of the step's global batch), so
    that gradients are summed over micro-batches and ranks. On a stage of a pipeline as ``ModelWithLoss.forward``.
    """
    loss: Tensor = module(batch, scale=scale, chunk_tokens=chunk_tokens, hidden=hidden, chunk=chunk)
    if not torch.is_grad_enabled():
        reshard(module)
    return loss


def chunked_cross_entropy(
    hidden_TE: Tensor,
    weight_VE: Tensor,
    bias_V: Tensor | None,
    labels_T: Tensor,
    *,
    scale: float,
    chunk_tokens: int,
    rule: LogitRule,
    kernel: Kernel | None = None,
) -> Tensor:
    """``scale`` * sum of cross-entropies of ``rule(hidden @ weight.T + bias)`` where a label is not -100.

    ``kernel``: what computes a chunk, in the place of ``cross_entropy_and_gradient``.
    """
    inputs = (hidden_TE, weight_VE, bias_V, labels_T, scale, chunk_tokens, rule, kernel or cross_entropy_and_gradient)
    loss: Tensor = _ChunkedCrossEntropy.apply(*inputs)  # type: ignore[no-untyped-call]
    return loss


class _ChunkedCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        context: Context,
        hidden_TE: Tensor,
        weight_VE: Tensor,
        bias_V: Tensor | None,
        labels_T: Tensor,
        scale: float,
        chunk_tokens: int,
        rule: LogitRule,
        kernel: Kernel,
    ) -> Tensor:
        wants_hidden, wants_weight, wants_bias = context.needs_input_grad[:3]
        grad_hidden = torch.empty_like(hidden_TE) if wants_hidden else None
        # float32: a sum over many chunks in bfloat16 would lose the small ones.
        grad_weight = torch.zeros_like(weight_VE, dtype=torch.float32) if wants_weight else None
        grad_bias = torch.zeros_like(bias_V, dtype=torch.float32) if wants_bias and bias_V is not None else None
        total = torch.zeros((), dtype=torch.float32, device=hidden_TE.device)
        for part in _chunks(hidden_TE, chunk_tokens):
            hidden = hidden_TE[part]
            linear = torch.nn.functional.linear(hidden, weight_VE, bias_V)
            loss, grad = kernel(linear, labels_T[part], scale, rule, gradient=wants_hidden or wants_weight)
            total += loss
            if grad is None:
                continue
            if grad_hidden is not None:
                torch.mm(grad, weight_VE, out=grad_hidden[part])
            if grad_weight is not None:
                _add_product(grad_weight, grad.t(), hidden)
            if grad_bias is not None:
                grad_bias += grad.sum(0, dtype=torch.float32)
        context.save_for_backward(
            grad_hidden,
            None if grad_weight is None else grad_weight.to(weight_VE.dtype),
            None if grad_bias is None or bias_V is None else grad_bias.to(bias_V.dtype),
        )
        return total

    @staticmethod
    def backward(context: Context, grad_loss: Tensor) -> tuple[Tensor | None, ...]:
        # backward() usually starts with 1, but that is not guaranteed; a product costs one pass over each.
        grads = [None if grad is None else grad * grad_loss.to(grad.dtype) for grad in context.saved_tensors]
        return *grads, None, None, None, None, None


def token_log_probs(
    hidden_TE: Tensor,
    weight_VE: Tensor,
    bias_V: Tensor | None,
    labels_T: Tensor,
    *,
    chunk_tokens: int,
    rule: LogitRule,
) -> Tensor:
    """float32[T]: the log-probability of each label under ``rule(hidden @ weight.T + bias)``.

    No logits are kept: the backward pass computes those of a chunk once more, as many products as keeping gradients of
    the hidden states would take where the head trains.
    """
    log_probs: Tensor = _TokenLogProbs.apply(hidden_TE, weight_VE, bias_V, labels_T, chunk_tokens, rule)  # type: ignore[no-untyped-call]
    return log_probs


class _TokenLogProbs(torch.autograd.Function):
    @staticmethod
    def forward(
        context: Context,
        hidden_TE: Tensor,
        weight_VE: Tensor,
        bias_V: Tensor | None,
        labels_T: Tensor,
        chunk_tokens: int,
        rule: LogitRule,
    ) -> Tensor:
        context.save_for_backward(hidden_TE, weight_VE, bias_V, labels_T)
        context.chunk_tokens, context.rule = chunk_tokens, rule
        result = torch.empty(hidden_TE.shape[0], dtype=torch.float32, device=hidden_TE.device)
        for part in _chunks(hidden_TE, chunk_tokens):
            logits = torch.nn.functional.linear(hidden_TE[part], weight_VE, bias_V).float() * rule.factor
            if rule.cap is not None:
                logits = torch.tanh(logits / rule.cap) * rule.cap
            chosen = logits.gather(1, labels_T[part].unsqueeze(1)).squeeze(1)
            result[part] = chosen - torch.logsumexp(logits, dim=1)
        return result

    @staticmethod
    def backward(context: Context, grad_T: Tensor) -> tuple[Tensor | None, ...]:
        hidden_TE, weight_VE, bias_V, labels_T = context.saved_tensors
        wants_hidden, wants_weight, wants_bias = context.needs_input_grad[:3]
        grad_hidden = torch.empty_like(hidden_TE) if wants_hidden else None
        grad_weight = torch.zeros_like(weight_VE, dtype=torch.float32) if wants_weight else None
        grad_bias = torch.zeros_like(bias_V, dtype=torch.float32) if wants_bias and bias_V is not None else None
        for part in _chunks(hidden_TE, context.chunk_tokens):
            linear = torch.nn.functional.linear(hidden_TE[part], weight_VE, bias_V)
            _, grad = cross_entropy_and_gradient(linear, labels_T[part], -grad_T[part], context.rule, gradient=True)
            assert grad is not None
            if grad_hidden is not None:
                torch.mm(grad, weight_VE, out=grad_hidden[part])
            if grad_weight is not None:
                _add_product(grad_weight, grad.t(), hidden_TE[part])
            if grad_bias is not None:
                grad_bias += grad.sum(0, dtype=torch.float32)
        weight = None if grad_weight is None else grad_weight.to(weight_VE.dtype)
        return grad_hidden, weight, None if grad_bias is None else grad_bias.to(bias_V.dtype), None, None, None


def _chunks(hidden_TE: Tensor, chunk_tokens: int) -> Iterator[slice]:
    step = chunk_tokens or max(1, hidden_TE.shape[0])
    return (slice(start, start + step) for start in range(0, hidden_TE.shape[0], step))


def _add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    if left.dtype == total.dtype:
        total.addmm_(left, right)
    elif left.device.type in ADDS_IN_KERNEL and adds_right(left.device, left.dtype):
        _add_in_kernel(total, left, right)
    else:
        total += torch.mm(left, right)


def _add_in_kernel(total: Tensor, left: Tensor, right: Tensor) -> None:
    # The product itself would be written and read once more: 2 GB each way of a vocabulary of 128,000.
    torch.ops.aten.addmm.dtype_out(total, left, right, torch.float32, out=total)


@cache
def adds_right(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether ``_add_in_kernel`` adds a product of ``dtype`` on ``device``: a small one is compared with float64's.

    Once a process, a few milliseconds; draws no random number. A kernel that does not is said in one line.
    """
    try:
        off, allowed = _error_in_kernel(device, dtype)
    except RuntimeError as error:
        if isinstance(error, torch.OutOfMemoryError | torch.AcceleratorError):
            raise  # of the device, not of the kernel
        problem = f"refuses: {str(error).strip().splitlines()[0][:160]}"
    else:
        if off <= allowed:
            return True
        problem = f"is {off:.2g} off where {allowed:.2g} is rounding"
    print(
        f"note: the gradient of the model's head is summed in a pass of its own on {device}: torch's kernel that adds "
        f"a product of {str(dtype).removeprefix('torch.')} to a float32 sum {problem}",
        file=sys.stderr,
        flush=True,
    )
    return False


def _error_in_kernel(device: torch.device, dtype: torch.dtype) -> tuple[float, float]:
    """The largest error of two products added one behind the other, and what rounding each to ``dtype`` would make.

    The sum begins a hundred times as large as what is added, so that a sum rounded to ``dtype`` shows too.
    """
    tokens, rows, columns = 64, 96, 80
    numbers = torch.arange(tokens * (rows + columns), dtype=torch.float64).square()
    waves = torch.sin(numbers).to(device, dtype)
    left = waves[: tokens * rows].view(tokens, rows).t()  # as in ``_ChunkedCrossEntropy``
    right = waves[tokens * rows :].view(tokens, columns)
    start = 512.0 * torch.cos(torch.arange(rows * columns, dtype=torch.float64)).view(rows, columns)
    total = start.to(device, torch.float32)
    product = left.cpu().double() @ right.cpu().double()
    wanted = total.cpu().double() + 2 * product
    for _ in range(2):
        _add_in_kernel(total, left, right)
    allowed = 2 * float(product.abs().max()) * torch.finfo(dtype).eps
    return float((total.cpu().double() - wanted).abs().max()), allowed


def cross_entropy_and_gradient(
    linear_TV: Tensor, labels_T: Tensor, scale: float | Tensor, rule: LogitRule, *, gradient: bool
) -> tuple[Tensor, Tensor | None]:
    """``scale`` * summed cross-entropy of ``rule(linear)``, and its derivative by ``linear`` in linear's dtype.

    Overwrites ``linear_TV``: a second copy of the logits would double the peak.
    """
    logits = linear_TV.float()
    if rule.factor != 1.0:
        logits = logits * rule.factor
    squashed = None
    if rule.cap is not None:
        squashed = torch.tanh(logits / rule.cap)
        logits = squashed * rule.cap
    counted = labels_T != IGNORED
    targets = torch.where(counted, labels_T, 0).unsqueeze(1)
    normaliser = torch.logsumexp(logits, dim=1, keepdim=True)
    losses = (normaliser - logits.gather(1, targets)).squeeze(1)
    loss = torch.where(counted, losses, 0.0).sum() * scale
    if not gradient:
        return loss, None
    grad = logits.sub_(normaliser).exp_()
    grad.scatter_add_(1, targets, torch.full_like(normaliser, -1.0))
    if squashed is not None:
        grad *= 1.0 - squashed.square()
    grad *= torch.where(counted, scale * rule.factor, 0.0).to(grad.dtype).unsqueeze(1)
    return loss, grad.to(linear_TV.dtype)


def compiled_kernel() -> Kernel:
    """``cross_entropy_and_gradient`` as one graph, for any number of tokens and any scale: a few passes over the logits
    instead of a dozen."""
    from torch._dynamo import maybe_mark_dynamic

    compiled = torch.compile(cross_entropy_and_gradient, dynamic=False)

    def kernel(
        linear_TV: Tensor, labels_T: Tensor, scale: float, rule: LogitRule, *, gradient: bool
    ) -> tuple[Tensor, Tensor | None]:
        for tensor in (linear_TV, labels_T):
            maybe_mark_dynamic(tensor, 0)
        on_device = torch.full((), scale, device=linear_TV.device)  # each number would be compiled for itself
        return compiled(linear_TV, labels_T, on_device, rule, gradient=gradient)

    return kernel
