"""Another replica is lost while gradients are summed: a rank takes part in its replica's own sums before it says so."""

import pytest
import torch

from muster.train.distributed.reduce import REPLICATE, SHARD, ReduceGroups


class Counted(ReduceGroups):
    """Axes whose collectives are counted; the one over replicas breaks."""

    def __init__(self, *axes):
        super().__init__({axis: axis for axis in axes})
        self.sums = []

    def sum_(self, tensor, axis):
        self.sums.append(axis)
        if axis == REPLICATE:
            raise RuntimeError("Connection reset by peer")
        return tensor


VALUES = [(torch.tensor(1.0), frozenset((SHARD, REPLICATE))), (torch.tensor(2.0), frozenset((SHARD,)))]


def test_the_replicas_own_sums_come_first():
    groups = Counted(SHARD, REPLICATE)
    groups.sum_buckets_([torch.ones(2)], REPLICATE)
    with pytest.raises(RuntimeError, match="reset by peer"):
        groups.sum_scalars(VALUES)
    assert groups.sums == [REPLICATE, SHARD], "and no further sum over replicas"
    groups.by_axis.pop(REPLICATE)  # the next world has one replica
    assert groups.sum_scalars(VALUES) == [1.0, 2.0]


def test_a_replica_of_one_rank_says_so_at_once():
    with pytest.raises(RuntimeError, match="reset by peer"):
        Counted(REPLICATE).sum_buckets_([torch.ones(2)], REPLICATE)


def test_trouble_within_the_replica_is_never_put_off():
    groups = Counted(SHARD, REPLICATE)
    groups.sum_ = lambda tensor, axis: (_ for _ in ()).throw(RuntimeError("shard"))
    with pytest.raises(RuntimeError, match="shard"):
        groups.sum_buckets_([torch.ones(2)], SHARD)
