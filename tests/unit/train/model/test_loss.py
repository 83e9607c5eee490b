"""Chunked cross-entropy against the plain one."""

import pytest
import torch

from muster.train.model import loss as loss_module
from muster.train.model.loss import LogitRule, chunked_cross_entropy, logit_rule

TOKENS, HIDDEN, VOCAB = 23, 8, 31


def plain(hidden, weight, bias, labels, scale, rule):
    logits = torch.nn.functional.linear(hidden, weight, bias) * rule.factor
    if rule.cap is not None:
        logits = rule.cap * torch.tanh(logits / rule.cap)
    return scale * torch.nn.functional.cross_entropy(logits, labels, reduction="sum", ignore_index=-100)


def inputs(dtype=torch.float64, bias=True):
    torch.manual_seed(0)
    hidden = torch.randn(TOKENS, HIDDEN, dtype=dtype, requires_grad=True)
    weight = torch.randn(VOCAB, HIDDEN, dtype=dtype, requires_grad=True)
    offset = torch.randn(VOCAB, dtype=dtype, requires_grad=True) if bias else None
    labels = torch.randint(0, VOCAB, (TOKENS,))
    labels[::3] = -100
    return hidden, weight, offset, labels


@pytest.mark.parametrize("chunk_tokens", [0, 1, 7, 23, 100])
@pytest.mark.parametrize("rule", [LogitRule(), LogitRule(factor=0.25), LogitRule(cap=2.0), LogitRule(0.5, 3.0)])
@pytest.mark.parametrize("bias", [True, False])
def test_loss_and_gradients_are_those_of_plain_cross_entropy(chunk_tokens, rule, bias):
    hidden, weight, offset, labels = inputs(torch.float32, bias)
    chosen = [tensor for tensor in (hidden, weight, offset) if tensor is not None]
    found = chunked_cross_entropy(hidden, weight, offset, labels, scale=0.3, chunk_tokens=chunk_tokens, rule=rule)
    expected = plain(hidden, weight, offset, labels, 0.3, rule)
    assert found.dtype == torch.float32
    assert torch.allclose(found, expected, rtol=1e-5)
    for mine, theirs in zip(
        torch.autograd.grad(found * 2.0, chosen), torch.autograd.grad(expected * 2.0, chosen), strict=True
    ):
        assert torch.allclose(mine, theirs, rtol=1e-4, atol=1e-5)


def test_a_frozen_head_gets_no_gradient_and_costs_none():
    hidden, weight, _, labels = inputs(torch.float32)
    weight = weight.detach()
    loss = chunked_cross_entropy(hidden, weight, None, labels, scale=1.0, chunk_tokens=5, rule=LogitRule())
    loss.backward()
    assert weight.grad is None and hidden.grad.abs().sum() > 0


def test_bfloat16_weights_sum_their_chunks_in_float32():
    hidden, weight, _, labels = inputs(torch.float32, bias=False)
    halves = [tensor.detach().bfloat16().requires_grad_() for tensor in (hidden, weight)]
    many = chunked_cross_entropy(*halves, None, labels, scale=1.0, chunk_tokens=1, rule=LogitRule())
    one = chunked_cross_entropy(*halves, None, labels, scale=1.0, chunk_tokens=0, rule=LogitRule())
    expected = plain(*(half.detach().float() for half in halves), None, labels, 1.0, LogitRule())
    assert float(one.detach()) == pytest.approx(float(expected), rel=1e-2)
    gradients = [torch.autograd.grad(loss, halves[1])[0].float() for loss in (many, one)]
    assert torch.allclose(*gradients, atol=2e-2)


def in_float32(total, left, right):
    total += left.float() @ right.float()


def replaces(total, left, right):
    total.copy_(left.float() @ right.float())


def rounds_the_sum(total, left, right):
    total.copy_((total + left.float() @ right.float()).to(left.dtype))


def adds_twice(total, left, right):
    total += 2 * (left.float() @ right.float())


def refuses(total, left, right):
    raise RuntimeError("self dtype must match mat1 dtype\nException raised from addmm")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("kernel", "words"),
    [
        (in_float32, None),
        (lambda total, left, right: total.add_(torch.mm(left, right)), None),  # the product is rounded, as elsewhere
        (replaces, "off where"),
        (rounds_the_sum, "off where"),
        (adds_twice, "off where"),
        (refuses, "refuses: self dtype must match mat1 dtype\n"),
    ],
)
def test_a_kernel_that_adds_wrongly_is_noticed_once_and_left_out(monkeypatch, capsys, kernel, words, dtype):
    """On a GPU the head's weight gradient is added inside the product; here that kernel is played on the CPU."""
    hidden, weight, _, labels = (each if each is None else each.detach() for each in inputs(torch.float32, bias=False))
    calls = []

    def played(total, left, right):
        calls.append(len(left))
        kernel(total, left, right)

    def gradient():
        halves = [tensor.to(dtype).requires_grad_() for tensor in (hidden, weight)]
        found = chunked_cross_entropy(*halves, None, labels, scale=1.0, chunk_tokens=5, rule=LogitRule())
        return torch.autograd.grad(found, halves[1])[0]

    expected = gradient()
    monkeypatch.setattr(loss_module, "ADDS_IN_KERNEL", ("cpu",))
    monkeypatch.setattr(loss_module, "_add_in_kernel", played)
    loss_module.adds_right.cache_clear()
    state = torch.get_rng_state()
    try:
        found = [gradient(), gradient()]
    finally:
        loss_module.adds_right.cache_clear()
    said = capsys.readouterr().err
    assert torch.equal(torch.get_rng_state(), state)
    if words is None:
        off = [float((each - expected).float().norm() / expected.float().norm()) for each in found]
        assert not said and calls.count(VOCAB) == 2 * 5 and max(off) < 1e-2, off
    else:
        assert VOCAB not in calls and all(torch.equal(each, expected) for each in found), "the plain sum"
        assert words in said and said.count("\n") == 1, "one line, once"


def test_a_broken_device_is_no_matter_of_its_kernel(monkeypatch):
    def ends(total, left, right):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(loss_module, "_add_in_kernel", ends)
    loss_module.adds_right.cache_clear()
    with pytest.raises(torch.OutOfMemoryError):
        loss_module.adds_right(torch.device("cpu"), torch.bfloat16)


def test_no_target_gives_zero_and_zero_gradients():
    hidden, weight, _, _ = inputs(torch.float32)
    nothing = torch.empty(0, dtype=torch.int64)
    loss = chunked_cross_entropy(hidden[:0], weight, None, nothing, scale=1.0, chunk_tokens=4, rule=LogitRule())
    loss.backward()
    assert float(loss.detach()) == 0.0
    assert torch.count_nonzero(weight.grad) == 0 and torch.count_nonzero(hidden.grad) == 0


def test_rules_of_known_architectures():
    from transformers import CohereConfig, Gemma2Config, GraniteConfig, LlamaConfig

    assert logit_rule(LlamaConfig()) == LogitRule()
    assert logit_rule(Gemma2Config(final_logit_softcapping=30.0)) == LogitRule(cap=30.0)
    assert logit_rule(GraniteConfig(logits_scaling=8.0)) == LogitRule(factor=0.125)
    assert logit_rule(CohereConfig(logit_scale=0.0625)) == LogitRule(factor=0.0625)
