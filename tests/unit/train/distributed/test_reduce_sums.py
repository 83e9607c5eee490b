"""Sums that need no second rank to be wrong."""

from types import SimpleNamespace

import torch
from torch import nn

from muster.train.distributed.reduce import REPLICATE, SHARD, TENSOR, FloatReducer, ReduceGroups


class Doubling(ReduceGroups):
    """Every axis has two ranks that hold the same."""

    def __init__(self) -> None:
        two = SimpleNamespace(size=lambda: 2)
        super().__init__({SHARD: two, TENSOR: two, REPLICATE: two})  # type: ignore[dict-item]
        self.calls: list[str] = []

    def sum_(self, tensor: torch.Tensor, axis: str) -> torch.Tensor:
        self.calls.append(axis)
        return tensor.mul_(2)


def test_scalars_cross_their_own_axes_in_one_call_each() -> None:
    axes = Doubling()
    values = [
        (torch.tensor(1.0), frozenset({SHARD, REPLICATE})),
        (torch.tensor(1.0), frozenset({SHARD})),
        (torch.tensor(1.0), frozenset({SHARD, TENSOR})),
        (torch.tensor(1.0), frozenset()),
    ]
    assert [float(value) for value in axes.sum_scalars(values)] == [4.0, 2.0, 4.0, 1.0]
    assert axes.calls == [SHARD, TENSOR, REPLICATE]


def test_no_groups_no_change() -> None:
    axes = ReduceGroups()
    assert [float(v) for v in axes.sum_scalars([(torch.tensor(3.0), frozenset({SHARD}))])] == [3.0]
    assert axes.start_sum(torch.ones(3), REPLICATE) is None


def test_float_sums_of_one_rank() -> None:
    torch.manual_seed(0)
    module = nn.Linear(3, 2)
    reducer = FloatReducer(module, ReduceGroups(), accumulate_locally=True)
    batches = [torch.randn(4, 3) for _ in range(3)]
    reducer.begin(micro_batches=3)
    for number, batch in enumerate(batches, start=1):
        reducer.before_forward(last=number == 3)
        loss = module(batch).square().sum() / 12
        loss.backward()
        reducer.add_loss(loss)
    loss, norm, fault = reducer.finish()
    expected = module(torch.cat(batches)).square().sum() / 12
    torch.testing.assert_close(loss, expected.detach().double())
    gradients = torch.cat([p.grad.flatten() for p in module.parameters() if p.grad is not None])
    torch.testing.assert_close(norm, gradients.double().norm())
    assert float(fault) == 0.0
    reducer.begin(micro_batches=3)
    assert all(parameter.grad is None for parameter in module.parameters())
