"""A backward pass in two parts is the whole one, bit for bit; nothing of a matrix comes before its turn."""

import copy

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from muster.train.model.split_backward import finish, split


def layers():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(24, 40), nn.SiLU(), nn.LayerNorm(40), nn.Linear(40, 24, bias=False))


def run(module, inputs, recompute):
    result = checkpoint(module, inputs, use_reentrant=False) if recompute else module(inputs)
    result.square().sum().backward()


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("shape", [(7, 24), (2, 7, 24), (1, 96, 24)], ids=str)
def test_two_parts_are_the_whole(shape, recompute):
    plain, apart = layers(), copy.deepcopy(layers())
    later, heard = split([apart]), []
    for name, parameter in apart.named_parameters():
        parameter.register_post_accumulate_grad_hook(lambda _, name=name: heard.append(name))
    for seed in range(2):  # gradients of a second micro-batch are added
        torch.manual_seed(10 + seed)
        one = torch.randn(shape, requires_grad=True)
        other = one.detach().clone().requires_grad_()
        heard.clear()
        run(plain, one, recompute)
        run(apart, other, recompute)
        assert torch.equal(one.grad, other.grad), "the gradient that goes on is there"
        assert sorted(heard) == ["0.bias", "2.bias", "2.weight"]
        before = {name: None if p.grad is None else p.grad.clone() for name, p in apart.named_parameters()}
        left = later.take()
        assert len(left) == 2 and later.take() == []
        finish(left)
        assert sorted(heard[3:]) == ["0.weight", "3.weight"]
        assert all(before[name] is None or seed for name in ("0.weight", "3.weight"))
        for name, parameter in plain.named_parameters():
            assert torch.equal(parameter.grad, apart.get_parameter(name).grad), name


def test_frozen_matrices_and_passes_without_gradients_leave_nothing():
    module = layers()
    module[0].weight.requires_grad_(False)
    later = split([module])
    run(module, torch.randn(3, 24), False)
    assert len(later.take()) == 1
    with torch.no_grad():
        module(torch.randn(3, 24))
    assert later.take() == []
