"""Sums that need no second rank to be wrong."""

import itertools
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from fakes.small_model import process_group
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from muster.train.distributed.reduce import REPLICA, REPLICATE, SHARD, TENSOR, FloatReducer, ReduceGroups


class Doubling(ReduceGroups):
    """Every axis has two ranks that hold the same, but that of a replica's two tp ranks this is ``tp_rank``."""

    def __init__(self, tp_rank: int = 0) -> None:
        two = SimpleNamespace(size=lambda: 2, rank=lambda: 0)
        tp = SimpleNamespace(size=lambda: 2, rank=lambda: tp_rank)
        super().__init__({TENSOR: tp, REPLICA: two, REPLICATE: two})  # type: ignore[dict-item]
        self.calls: list[str] = []

    def sum_(self, tensor: torch.Tensor, axis: str) -> torch.Tensor:
        self.calls.append(axis)
        return tensor.mul_(2)


@pytest.mark.parametrize("apart", [False, True])
def test_scalars_cross_a_replica_and_then_replicas_in_one_call_each(apart: bool) -> None:
    axes = Doubling()
    data, own, everywhere = axes.sum_scalars([torch.tensor(1.0)], [torch.tensor(3.0)], parts_over_replicas=apart)
    assert (float(data), float(own), float(everywhere)) == (4.0, 6.0, 12.0 if apart else 6.0)
    assert axes.calls == [REPLICA, REPLICATE]


def test_of_what_tp_ranks_hold_alike_the_first_ones_counts() -> None:
    axes = Doubling(tp_rank=1)
    data, own, _ = axes.sum_scalars([torch.tensor(1.0)], [torch.tensor(3.0)])
    assert (float(data), float(own)) == (0.0, 6.0)
    assert float(axes.sum_everywhere_(torch.ones(()))) == 0.0


@pytest.mark.parametrize("rank", range(4))
def test_each_element_is_counted_by_one_rank_of_a_replica(rank: int) -> None:
    places = {SHARD: rank // 2, TENSOR: rank % 2}
    groups: Any = ReduceGroups({axis: SimpleNamespace(rank=partial(int, place)) for axis, place in places.items()})
    with process_group(4, rank):
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=(SHARD, TENSOR))
        for cut in itertools.product((Replicate(), Shard(0)), (Replicate(), Shard(1))):
            first = all(isinstance(how, Shard) or place == 0 for how, place in zip(cut, places.values(), strict=True))
            assert groups.counts(DTensor.from_local(torch.ones(2, 2), mesh, cut, run_check=False)) == first
    assert groups.counts(torch.ones(2)) == (rank == 0)


def test_no_groups_no_change() -> None:
    axes = ReduceGroups()
    assert [float(value) for value in axes.sum_scalars([torch.tensor(3.0)], [torch.tensor(2.0)])] == [3.0, 2.0, 2.0]
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
