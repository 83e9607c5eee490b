"""Sums over replicas begin while the backward pass still runs, in the same order on every replica."""

from functools import partial

import pytest
import torch
from fakes.small_model import CPU, build, process_group, spec_of
from torch.distributed.fsdp import FSDPModule

from muster.train.data_feed.batch import make_batch
from muster.train.distributed import early_sums
from muster.train.distributed.early_sums import EarlySums, storages, units_of
from muster.train.distributed.fixed_point import FixedPointReducer
from muster.train.distributed.reduce import REPLICATE, FloatReducer, ReduceGroups, local
from muster.train.model.loss import loss_sum


class Doubled:
    """A sum with a replica that holds the same: done when it is awaited, as late as may be."""

    def __init__(self, tensor, log):
        self.tensor, self.log = tensor, log

    def wait(self):
        self.log.append("wait")
        self.tensor.mul_(2)


class Two(ReduceGroups):
    def __init__(self):
        super().__init__({REPLICATE: object()})
        self.log = []

    def start_sum(self, tensor, axis):
        if axis not in self.by_axis:
            return None
        assert axis == REPLICATE and tensor.is_contiguous()
        self.log.append(tensor.numel())
        return Doubled(tensor, self.log)


def sums_of(units, *, parts=1):
    """And the numbers of the units whose sums were begun."""
    begun = []
    sums = EarlySums(
        [partial(lambda number: [torch.full((1,), float(number))], number) for number in range(units)],
        parts=[parts] * units, start=lambda tensor: begun.append(int(tensor)),
        wait=lambda work: None, lost=lambda error: None,
    )  # fmt: skip
    return sums, begun


def step_of(sums, comes):
    sums.begin()
    for unit, part in comes:
        sums.came(unit, part)


@pytest.mark.parametrize("comes", [[0, 1, 2], [2, 1, 0], [1], []])
def test_units_begin_in_one_order_whatever_order_they_come_in(comes):
    sums, begun = sums_of(3)
    for unit in (2, 0, 1):
        sums.came(unit)
    assert begun == [], "the first step learns"
    sums.finish()
    assert begun == [0, 1, 2]
    step_of(sums, [(unit, 0) for unit in comes])
    assert begun[3:] == {(0, 1, 2): [0, 1, 2], (2, 1, 0): [0, 1, 2], (1,): [], (): []}[tuple(comes)]
    sums.finish()
    assert begun[3:] == [0, 1, 2]


def test_a_layer_that_is_used_again_is_summed_after_its_last_use():
    sums, begun = sums_of(1, parts=2)
    for _ in range(2):  # the first learns, and so does one that was cut short
        step_of(sums, [(0, 0), (0, 1), (0, 0), (0, 1)])
        sums.finish()
    begun.clear()
    step_of(sums, [(0, 0), (0, 1), (0, 0)])
    assert begun == []
    sums.came(0, 1)
    assert begun == [0]
    sums.came(0, 1)
    with pytest.raises(AssertionError, match="used more often than in any step before"):
        sums.finish()


def test_a_part_without_a_gradient_is_waited_for():
    sums, begun = sums_of(2, parts=2)
    for _ in range(2):
        step_of(sums, [(0, 0), (1, 0), (1, 1)])
        assert begun == []
        sums.finish()
        assert begun == [0, 1]
        begun.clear()


def rounds(reducer, built, lengths):
    """A step; how many sums had begun when each backward pass ended."""
    begun = []
    reducer.begin(micro_batches=len(lengths))
    for number, each in enumerate(lengths, start=1):
        ids = torch.arange(sum(each)).remainder(50)[None]
        positions = torch.cat([torch.arange(length) for length in each])[None]
        reducer.before_forward(last=number == len(lengths))
        batch = make_batch(ids, ids.roll(-1, 1), positions, each, CPU)
        loss = loss_sum(built.module, batch, chunk_tokens=16, scale=0.01)
        loss.backward()
        reducer.add_loss(loss)
        begun.append(len(reducer.groups.log) if isinstance(reducer.groups, Two) else 0)
    return begun, reducer.finish()


#: Of a model that stays whole the units are buckets, here of one decoder layer's size; one that is cast is in FSDP.
MODELS = {
    "whole": {},
    "whole-lora": {"lora": {"rank": 4}},
    "fsdp": {"dtype": "bfloat16"},
    "fsdp-lora": {"dtype": "bfloat16", "lora": {"rank": 4}},
}


@pytest.mark.parametrize("kind", ["each round", "once", "exact"])
@pytest.mark.parametrize("model", MODELS)
def test_they_begin_in_the_last_backward_pass_and_add_up(model, kind, monkeypatch):
    """Units: the root and two layers (of adapters the layers alone). Against the same step of one replica, doubled."""
    monkeypatch.setattr(early_sums, "BUCKET_BYTES", 8 << 10)
    found = {}
    for name, groups in (("alone", ReduceGroups()), ("two", Two())):
        with process_group():
            built = build(spec_of(**MODELS[model]))
            assert isinstance(built.module, FSDPModule) == model.startswith("fsdp")
            if kind == "exact":
                reducer = FixedPointReducer(built.module, groups)
            else:
                reducer = FloatReducer(built.module, groups, accumulate_locally=kind == "once")
            learning, _ = rounds(reducer, built, [[32]])
            assert learning == [0]
            if name == "two":
                groups.log.clear()
            begun, (_, norm, _) = rounds(reducer, built, [[20, 12], [32]])
            gradients = [local(parameter.grad).clone() for parameter in reducer.parameters]
            found[name] = begun, gradients, float(norm)
    begun, gradients, norm = found["two"]
    units = groups.log.index("wait")
    assert begun == [0, units], "none in the first round, all before the last one has ended"
    assert units == {"fsdp": 3, "fsdp-lora": 2}.get(model, len(units_of(built.module))) > 1
    for one, two in zip(found["alone"][1], gradients, strict=True):
        assert torch.equal(2 * one, two)
    assert norm == pytest.approx(2 * found["alone"][2], rel=1e-6)


def test_fsdps_gradients_of_a_unit_are_one_message():
    with process_group():
        built = build(spec_of(dtype="bfloat16"))
        units = units_of(built.module)
        rounds(FloatReducer(built.module, ReduceGroups(), accumulate_locally=False), built, [[32]])
        assert {parameter for unit in units for parameter in unit} == set(built.module.parameters())
        assert "layers.1." in next(name for name, each in built.module.named_parameters() if each is units[0][0])
        for unit in units:
            gradients = [local(parameter.grad) for parameter in unit]
            (flat,) = storages(gradients)
            assert flat.numel() >= sum(gradient.numel() for gradient in gradients)
            flat.zero_()
            assert not any(gradient.any() for gradient in gradients)


def test_whole_gradients_of_one_type_go_in_buckets(monkeypatch):
    monkeypatch.setattr(early_sums, "BUCKET_BYTES", 40)
    sizes = [(3, torch.float32), (7, torch.float32), (20, torch.float32), (2, torch.float64), (1, torch.float32)]
    parameters = [torch.nn.Parameter(torch.zeros(size, dtype=dtype)) for size, dtype in sizes]
    assert [len(one) for one in early_sums.buckets(parameters)] == [2, 1, 1, 1]
    for number, parameter in enumerate(parameters[:2]):
        parameter.grad = torch.full_like(parameter, number)
    flat = early_sums.flattened(parameters[:2])
    flat.mul_(3)
    assert parameters[0].grad.tolist() == [0.0] * 3 and parameters[1].grad.tolist() == [3.0] * 7
