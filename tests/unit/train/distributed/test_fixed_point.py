"""Fixed-point sums: order-free, accurate, and refused beyond their range."""

import math
import random
from fractions import Fraction

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from muster.core.errors import UsageError
from muster.train.distributed.fixed_point import (
    FixedPointReduceScatter,
    SquareSum,
    WholeGradients,
    carried,
    check_covered,
    to_float,
)

floats = st.floats(min_value=-1000.0, max_value=1000.0, width=32)


@settings(deadline=None)
@given(st.lists(floats, min_size=1, max_size=40), st.integers(0, 1000))
def test_square_sums_do_not_depend_on_order_or_grouping(values: list[float], seed: int) -> None:
    whole = SquareSum()
    whole.add(torch.tensor(values))
    mixed = list(values)
    random.Random(seed).shuffle(mixed)
    cut = seed % len(mixed)
    ranks = [SquareSum(), SquareSum()]
    ranks[0].add(torch.tensor(mixed[:cut]))
    ranks[1].add(torch.tensor(mixed[cut:]))
    summed = [one + other for one, other in zip(ranks[0].limbs, ranks[1].limbs, strict=True)]
    assert float(to_float(summed)) == float(to_float(whole.limbs))


@settings(deadline=None)
@given(st.lists(floats, min_size=1, max_size=40))
def test_square_sums_are_accurate(values: list[float]) -> None:
    found = SquareSum()
    found.add(torch.tensor(values))
    exact = float(sum(Fraction(value) ** 2 for value in torch.tensor(values).tolist()))
    assert float(to_float(found.limbs)) == pytest.approx(exact, rel=1e-12, abs=len(values) * 2.0**-52)


def test_square_sums_hold_many_values_at_both_ends_of_the_range() -> None:
    """A million squares of 2**42 are 2**62 by themselves, times 2**52 units: far beyond one integer of 64 bits."""
    count = 1 << 20
    found = SquareSum()
    found.add(torch.full((count,), 2.0**21))
    found.add(torch.full((count,), 2.0**-26))
    assert [int(limb) for limb in carried(found.limbs)] == [count << 30, 0, count]


def test_reduce_scatter_adds_micro_batches_as_integers() -> None:
    """1 + 2**-30 + 2**-30 is 1 in float32, whatever the order; in fixed point nothing is lost before the end."""
    comm = FixedPointReduceScatter()
    for value in (1.0, 2.0**-30, 2.0**-30):
        output = torch.tensor([value, -value])
        comm.alone(output)
        assert not output.any(), "FSDP's own sum is fed zeros"
    assert comm.total is not None
    assert comm.total.tolist() == [2**40 + 2**11, -(2**40) - 2**11]


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, 1e30])
def test_what_cannot_be_held_is_noticed(bad: float) -> None:
    comm = FixedPointReduceScatter()
    comm.alone(torch.tensor([1.0, 2.0]))
    comm.alone(torch.tensor([bad, 0.0]))
    comm.alone(torch.tensor([1.0, 2.0]))
    assert comm.largest is not None
    assert not bool(comm.largest < 2.0**22)


def test_master_weights_of_another_type_are_refused() -> None:
    module = nn.Linear(2, 2, dtype=torch.bfloat16)
    with pytest.raises(UsageError, match="float32 master weights"):
        check_covered(module, list(module.parameters()))


def test_whole_gradients_are_added_as_integers_and_taken_from_their_parameters() -> None:
    """As through FSDP's reduce-scatter: 1 + 2**-30 + 2**-30 is more than 1."""
    one, other = nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(1))
    unit = WholeGradients([one, other])
    for value in (1.0, 2.0**-30, 2.0**-30):
        one.grad = torch.tensor([value, -value])
        unit.take(one)
        assert one.grad is None, "the next micro-batch would be added to it as a float"
    assert unit.total is not None and unit.total.tolist() == [2**40 + 2**11, -(2**40) - 2**11, 0]
    assert list(unit.parts) == [one], "a parameter without a gradient gets no update"
    assert float(unit.largest) == 1.0


def test_memory_that_fsdp_drops_on_another_stream_is_kept_until_it_was_read(monkeypatch):
    """FSDP calls the hook on its all-reduce stream and frees the output at once (``foreach_reduce``)."""
    recorded = []

    class OnGpu(torch.Tensor):
        is_cuda = True

        def record_stream(self, stream):
            recorded.append((stream, float(self[0])))

    monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: "all-reduce stream")
    output = torch.tensor([0.5, -2.0]).as_subclass(OnGpu)
    comm = FixedPointReduceScatter()
    comm.alone(output)
    assert recorded == [("all-reduce stream", 0.5)], "before anything else touches it"
    assert output.tolist() == [0.0, 0.0]
