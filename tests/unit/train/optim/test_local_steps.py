"""Meetings of replicas that train by themselves: the outer optimizer, when which parameters meet, what is sent."""

import pytest
import torch
from torch import nn

from muster.checkpoint.shards import ShardReader, read_into
from muster.checkpoint_format.reader import Shard
from muster.checkpoint_format.shards import pack
from muster.config.sections.outer import Outer
from muster.config.spec import Optimizer
from muster.train.distributed.reduce import FloatReducer, ReduceGroups
from muster.train.optim.adamw import AdamW
from muster.train.optim.local_steps import LocalSteps, decode, encode, fragments_of, last_meeting
from muster.train.state.training_state import TrainingState


def parameters(value=1.0):
    return {"a.weight": nn.Parameter(torch.full((3, 2), value)), "b.bias": nn.Parameter(torch.full((4,), value))}


class Mean(ReduceGroups):
    """A world of replicas, of which the others have moved by ``others``; or one that is lost in a meeting."""

    def __init__(self, *others, lost=False):
        super().__init__({"dp_replicate": self})
        self.others, self.lost = others, lost

    def size(self, axis=None):
        return 1 + len(self.others)

    def sum_(self, tensor, axis):
        if self.lost:
            raise RuntimeError("Connection closed by peer")
        for other in self.others:
            tensor.add_(other)
        return tensor


def test_the_outer_optimizer_is_sgd_with_nesterov_momentum_on_the_mean_of_the_moves():
    named = parameters()
    steps = LocalSteps(named, 2, Outer(learning_rate=0.7, momentum=0.9), Mean(0.3))
    reference = nn.Parameter(torch.ones(3, 2))
    outer = torch.optim.SGD([reference], lr=0.7, momentum=0.9, nesterov=True)
    for step in range(1, 7):
        with torch.no_grad():
            for parameter in named.values():
                parameter.sub_(0.1)
        steps.meet(step)
        if step % 2 == 0:
            reference.grad = torch.full((3, 2), (0.2 + 0.3) / 2)  # two steps of 0.1 here; the other moved by 0.3
            outer.step()
            assert torch.allclose(named["a.weight"], reference) and torch.equal(
                named["a.weight"], steps.outer["a.weight"]
            )
        else:
            assert not torch.equal(named["a.weight"], steps.outer["a.weight"])
        steps.keep()
    assert steps.met.tolist() == [6]


def test_a_meeting_that_a_loss_interrupts_is_undone_and_held_again():
    named = parameters()
    groups = Mean(0.5)
    steps = LocalSteps(named, 1, Outer(fragments=2), groups)
    with torch.no_grad():
        for parameter in named.values():
            parameter.sub_(0.1)
    before = {name: parameter.detach().clone() for name, parameter in named.items()}
    sums, sum_ = [], groups.sum_

    def second_is_lost(tensor, axis):
        sums.append(axis)
        groups.lost = len(sums) == 2
        return sum_(tensor, axis)

    groups.sum_ = second_is_lost
    with pytest.raises(RuntimeError, match="closed by peer"):
        steps.meet(1, last=True)
    assert len(sums) == 2, "the first fragment had met"
    for name, parameter in named.items():
        assert torch.equal(parameter, before[name])
        assert torch.equal(steps.outer[name], torch.ones_like(parameter)) and not steps.momentum[name].any()
    assert steps.met.tolist() == [0, 0] and steps.due(1, last=True) == [0, 1]


def test_fragments_meet_at_even_distances():
    assert [step for step in range(1, 21) if last_meeting(step, 10, 0, 2) == step] == [10, 20]
    assert [step for step in range(1, 21) if last_meeting(step, 10, 1, 2) == step] == [5, 15]
    assert last_meeting(4, 10, 1, 2) == last_meeting(9, 10, 0, 2) == 0
    sizes = {f"layer{number}": 10 for number in range(8)}
    assert [len(part) for part in fragments_of(sizes, 4)] == [2, 2, 2, 2]
    assert sorted(name for part in fragments_of(sizes, 3) for name in part) == sorted(sizes)
    assert fragments_of({"one": 5}, 4) == [["one"]]


@pytest.mark.parametrize(("dtype", "error"), [("bfloat16", 2**-8), ("int8", 1 / 254)])
def test_what_is_sent_is_near_what_was_meant(dtype, error):
    given = torch.randn(1000, generator=torch.Generator().manual_seed(0))
    found = decode(encode(given, dtype), 1000)
    assert float((found - given).abs().max()) <= error * float(given.abs().max())
    assert not decode(encode(torch.zeros(5), dtype), 5).any()
    sent = sum(tensor.nbytes for tensor in encode(given, dtype))
    assert sent <= {"bfloat16": 2000, "int8": 1024 + 16}[dtype]


def state_of(replica, value):
    named = parameters(value)
    optimizer = AdamW(named, Optimizer())
    steps = LocalSteps(named, 4, Outer(), ReduceGroups())
    for moment in optimizer.exp_avg.values():
        moment.fill_(value * 10)
    return TrainingState(named, optimizer, local_steps=steps, replica=replica)


def test_a_replicas_own_state_comes_back_bit_for_bit():
    state, other = state_of(1, 3.0), state_of(1, 5.0)
    state.local_steps.outer["b.bias"].fill_(7.0)
    other.load(9, {name: tensor.clone() for name, tensor in state.local_tensors().items()})
    assert other.step == 9 and other.joined_from is None
    for name, tensor in state.local_tensors().items():
        assert torch.equal(tensor, other.local_tensors()[name]), name


@pytest.mark.parametrize("how", ["snapshot", "snapshot of another layout", "checkpoint"])
def test_a_replica_without_a_state_of_its_own_begins_with_the_outer_one(how):
    lender, joins = state_of(0, 3.0), state_of(2, 5.0)
    for tensors in (lender.local_steps.outer, lender.local_steps.momentum):
        for tensor in tensors.values():
            tensor.fill_(7.0)
    if how == "snapshot":
        joins.load(9, lender.local_tensors())
    else:
        tensors = lender.sharded()
        boxes = [
            (name, str(each.dtype).removeprefix("torch."), tuple(each.shape), (0,) * each.dim(), tuple(each.shape))
            for name, each in tensors.items()
        ]
        chunks = pack(boxes)
        data = bytearray(max(chunk.byte_offset + chunk.bytes for chunk in chunks))
        for chunk in chunks:
            raw = tensors[chunk.name].contiguous().numpy().tobytes()
            data[chunk.byte_offset : chunk.byte_offset + chunk.bytes] = raw
        shard = Shard(chunks, lambda start, stop: memoryview(data)[start:stop], "the only one")
        writable = joins.writable()
        read_into(ShardReader([shard]), writable)
        if how == "checkpoint":
            joins.loaded(9, writable)
        else:
            joins.load(9, writable)
    assert joins.joined_from == 0 and joins.step == 9
    assert all((parameter == 7.0).all() for parameter in joins.named.values()), "not replica 0's own 3.0"
    assert all((moment == 30.0).all() for moment in joins.optimizer.exp_avg.values())
    assert "replica2.number" in joins.local_tensors() and int(joins.local_tensors()["replica2.number"]) == 2


def test_only_loss_and_faults_cross_replicas():
    """A replica's norm is its own; one that is not finite elsewhere is a fault here."""
    module = nn.Linear(2, 1, bias=False)
    nn.init.ones_(module.weight)

    class Others(ReduceGroups):
        def __init__(self):
            super().__init__({"dp_replicate": None})
            self.sizes, self.add = [], 1.0

        def start_sum(self, tensor, axis):
            if axis in self.by_axis:
                self.sizes.append(tensor.numel())
                tensor.add_(self.add)

    groups = Others()
    reducer = FloatReducer(module, groups, accumulate_locally=False, over_replicas=False)
    for add, faulty in ((1.0, 0.0), (float("nan"), 1.0)):
        groups.add = add
        reducer.begin(micro_batches=1)
        reducer.before_forward(last=True)
        loss = module(torch.tensor([[3.0, 4.0]])).sum()
        loss.backward()
        reducer.add_loss(loss)
        _, norm, fault = reducer.finish()
        assert float(norm) == 5.0 and float(fault) == faulty
    assert max(groups.sizes) <= 2, "no gradient crosses replicas"


def test_a_rank_of_a_sharded_replica_goes_on_to_the_sums_that_the_others_wait_in():
    """They may not know of the loss, and it is raised behind those sums; what it met with others since is undone."""
    named = parameters()
    groups = Mean(0.5, lost=True)
    groups.by_axis["replica"] = groups
    steps = LocalSteps(named, 1, Outer(), groups)
    with torch.no_grad():
        named["b.bias"].sub_(0.1)
    steps.meet(1)
    assert steps.met.tolist() == [0] and float(named["b.bias"][0]) == pytest.approx(0.9)
    with pytest.raises(RuntimeError, match="closed by peer"):
        groups.sum_scalars([torch.zeros(())], [])
