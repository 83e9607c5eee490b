"""AdamW on local shards against torch's own, and what ``exact`` asks of it."""

import sys

import pytest
import torch
from torch import nn

from muster.config.spec import Optimizer
from muster.core.errors import UsageError
from muster.train.optim.adamw import AdamW, adamw_elementwise
from muster.train.optim.optimizer import clip_scale, make_optimizer

SETTINGS = Optimizer(learning_rate=1e-2, weight_decay=0.1, betas=(0.9, 0.95), eps=1e-8)


def parameters() -> dict[str, nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    shapes = {"matrix": (5, 7), "norm": (7,), "empty": (0, 7)}
    return {name: nn.Parameter(torch.randn(*shape, generator=generator)) for name, shape in shapes.items()}


def set_gradients(named: dict[str, nn.Parameter], step: int) -> None:
    generator = torch.Generator().manual_seed(step)
    for parameter in named.values():
        parameter.grad = torch.randn(parameter.shape, generator=generator)


@pytest.mark.parametrize("everywhere", [False, True])
@pytest.mark.parametrize("elementwise", [False, True])
def test_equals_torch_with_decay_on_matrices_and_where_asked_on_vectors(elementwise: bool, everywhere: bool) -> None:
    mine, theirs = parameters(), parameters()
    settings = SETTINGS.model_copy(update={"decay_norms_and_biases": everywhere})
    ours = AdamW(mine, settings, elementwise=elementwise)
    torchs = torch.optim.AdamW(
        [
            {"params": [theirs["matrix"], theirs["empty"]], "weight_decay": 0.1},
            {"params": [theirs["norm"]], "weight_decay": 0.1 if everywhere else 0.0},
        ],
        lr=1e-2,
        betas=(0.9, 0.95),
        eps=1e-8,
    )
    for step in range(1, 5):
        set_gradients(mine, step)
        set_gradients(theirs, step)
        for parameter in theirs.values():
            assert parameter.grad is not None
            parameter.grad.mul_(0.5)
        ours.step(step=step, learning_rate=1e-2, scale=torch.tensor(0.5), skip=torch.tensor(0.0))
        torchs.step()
    for name in mine:
        torch.testing.assert_close(mine[name], theirs[name], rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("elementwise", [False, True])
def test_skip_changes_nothing(elementwise: bool) -> None:
    named = parameters()
    before = {name: parameter.detach().clone() for name, parameter in named.items()}
    optimizer = AdamW(named, SETTINGS, elementwise=elementwise)
    set_gradients(named, 1)
    for parameter in named.values():
        assert parameter.grad is not None
        parameter.grad.fill_(float("nan"))
    optimizer.step(step=1, learning_rate=1e-2, scale=torch.tensor(float("nan")), skip=torch.tensor(1.0))
    for name, parameter in named.items():
        assert torch.equal(parameter, before[name])
        assert not optimizer.exp_avg[name].any() and not optimizer.exp_avg_sq[name].any()


def test_elementwise_does_not_depend_on_where_a_shard_ends() -> None:
    """Any cut of a tensor gives the bits of the whole. The fused kernel fails this, which is why exact avoids it."""
    generator = torch.Generator().manual_seed(3)
    size = 259
    values = [torch.randn(size, generator=generator) for _ in range(3)] + [torch.rand(size, generator=generator)]

    def updated(part: slice, *, fused: bool) -> torch.Tensor:
        parameter, gradient, exp_avg, exp_avg_sq = (value[part].clone() for value in values)
        if fused:
            torch._fused_adamw_(
                [parameter], [gradient], [exp_avg], [exp_avg_sq], [], [torch.tensor(3.0)],
                lr=1e-3, beta1=0.9, beta2=0.95, weight_decay=0.1, eps=1e-8, amsgrad=False, maximize=False,
            )  # fmt: skip
        else:
            settings = Optimizer(betas=(0.9, 0.95), eps=1e-8)
            adamw_elementwise(parameter, gradient, exp_avg, exp_avg_sq, settings, step=3, learning_rate=1e-3, decay=0.1)
        return parameter

    whole = updated(slice(0, size), fused=False)
    for start in range(0, 40, 3):
        for length in (1, 2, 7, 8, 9, 31, 100):
            part = slice(start, start + length)
            assert torch.equal(updated(part, fused=False), whole[part])


def test_clip_scale() -> None:
    assert float(clip_scale(torch.tensor(4.0), 1.0)) == pytest.approx(0.25, rel=1e-5)
    assert float(clip_scale(torch.tensor(0.5), 1.0)) == 1.0
    assert float(clip_scale(torch.tensor(4.0), None)) == 1.0


def test_8bit_is_refused_in_exact_runs() -> None:
    with pytest.raises(UsageError, match="exact needs whole optimizer state"):
        make_optimizer(parameters(), Optimizer(name="adamw_8bit"), elementwise=True)


def test_8bit_without_torchao_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torchao.optim", None)
    with pytest.raises(UsageError, match="torchao is not installed"):
        make_optimizer(parameters(), Optimizer(name="adamw_8bit"), elementwise=False)


def test_8bit_stays_near_whole_moments_and_comes_back() -> None:
    pytest.importorskip("torchao", reason="torchao is optional")
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(64, 128, generator=generator)
    mine, theirs = ({"w": nn.Parameter(values.clone())} for _ in range(2))
    settings = Optimizer(name="adamw_8bit", learning_rate=1e-3, weight_decay=0.1)
    ours, whole = make_optimizer(mine, settings, elementwise=False), AdamW(theirs, settings)
    for step in range(1, 4):
        for named, optimizer in ((mine, ours), (theirs, whole)):
            set_gradients(named, step)
            optimizer.step(step=step, learning_rate=1e-3, scale=torch.tensor(0.5), skip=torch.tensor(0.0))
    torch.testing.assert_close(mine["w"], theirs["w"], rtol=0, atol=5e-4)  # three steps of at most 1e-3 each
    for name, parts in ours.moments.items():
        near = {"exp_avg": whole.exp_avg, "exp_avg_sq": whole.exp_avg_sq}[name]["w"]
        torch.testing.assert_close(parts["w"].dequantize(), near, rtol=0.2, atol=2e-2)  # type: ignore[operator]
