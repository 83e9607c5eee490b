"""Another replica is lost while gradients are summed: a rank takes part in its replica's own sums before it says so."""

import pytest
import torch
from torch import nn

from muster.train.distributed.reduce import REPLICA, REPLICATE, FloatReducer, ReduceGroups


class Broken:
    """What a sum over replicas returns whose peer is gone: ``wait`` raises."""

    def wait(self):
        raise RuntimeError("Connection reset by peer")


class Counted(ReduceGroups):
    """Axes whose collectives are counted; the one over replicas breaks, as it begins or as it is awaited."""

    def __init__(self, *axes, at="wait"):
        super().__init__({axis: axis for axis in axes})
        self.sums, self.at = [], at

    def start_sum(self, tensor, axis):
        if axis not in self.by_axis:
            return None
        self.sums.append(axis)
        if axis == REPLICATE and self.at == "wait":
            return Broken()
        if axis == REPLICATE and self.at == "start":
            raise RuntimeError("Connection reset by peer")
        return None


def step(groups, module):
    """A whole step, which learns when gradients are final, and one whose sums break, up to its backward pass."""
    reducer = FloatReducer(module, groups, accumulate_locally=False)
    at, groups.at = groups.at, "never"
    begin(reducer, module).finish()
    groups.at = at
    groups.sums.clear()
    return begin(reducer, module)


def begin(reducer, module):
    reducer.begin(micro_batches=1)
    reducer.before_forward(last=True)
    loss = module(torch.ones(1, 2)).sum()
    loss.backward()  # in which the sum breaks, and raises nothing
    reducer.add_loss(loss)
    return reducer


@pytest.mark.parametrize("at", ["start", "wait"])
def test_the_replicas_own_sums_come_first(at):
    groups = Counted(REPLICA, REPLICATE, at=at)
    module = nn.Linear(2, 2)
    with pytest.raises(RuntimeError, match="reset by peer"):
        step(groups, module).finish()
    assert groups.sums == [REPLICATE, REPLICA], "one bucket; after a failure nothing more over replicas"
    groups.by_axis.pop(REPLICATE)  # the next world has one replica
    loss, _, fault = step(groups, module).finish()
    assert float(loss) == float(module(torch.ones(1, 2)).sum().detach()) and float(fault) == 0.0


@pytest.mark.parametrize("at", ["start", "wait"])
def test_a_replica_of_one_rank_says_so_once_the_backward_pass_has_ended(at):
    groups = Counted(REPLICATE, at=at)
    with pytest.raises(RuntimeError, match="reset by peer"):
        step(groups, nn.Linear(2, 2)).finish()
    assert set(groups.sums) == {REPLICATE}


def test_trouble_within_the_replica_is_never_put_off():
    groups = Counted(REPLICA, REPLICATE)
    reducer = step(groups, nn.Linear(2, 2))
    groups.start_sum = lambda tensor, axis: (_ for _ in ()).throw(RuntimeError("shard")) if axis == REPLICA else None
    with pytest.raises(RuntimeError, match="shard"):
        reducer.finish()
