"""One number for the whole state: the same however it is cut, another for any other state."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from muster.train.distributed.reduce import TENSOR, ReduceGroups
from muster.train.state.state_hash import (
    PendingHash,
    Place,
    StateHashes,
    describe_difference,
    mixed_sum,
    partial_sum,
    seed_of,
    spread,
)

SHAPES = {"model.embed": (37, 24), "model.norm": (24,), "optimizer.exp_avg.embed": (37, 24), "model.cube": (6, 5, 8)}


def state(dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(3)
    return {name: torch.randn(shape, generator=generator).to(dtype) for name, shape in SHAPES.items()}


def whole(tensors: dict[str, Tensor]) -> int:
    places = {name: Place(seed_of(name), tuple(t.shape), (0,) * t.dim()) for name, t in tensors.items()}
    return int(partial_sum(tensors, places))


def cut(tensors: dict[str, Tensor], dim: int, ends: list[int]) -> int:
    """The sum of what ranks find that hold the parts of dimension ``dim`` between ``ends``."""
    total = torch.zeros((), dtype=torch.int64)
    for begin, end in zip([0, *ends], [*ends, 10**6], strict=True):
        parts, places = {}, {}
        for name, tensor in tensors.items():
            axis = min(dim, tensor.dim() - 1)
            low, high = min(begin, tensor.shape[axis]), min(end, tensor.shape[axis])
            parts[name] = tensor.narrow(axis, low, high - low)
            offsets = tuple(low if each == axis else 0 for each in range(tensor.dim()))
            places[name] = Place(seed_of(name), tuple(tensor.shape), offsets)
        total += partial_sum(parts, places)
    return int(total)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("dim", [0, 1, 2])
@pytest.mark.parametrize("ends", [[19], [5, 6, 20], [0, 3]])
def test_any_cut_gives_the_same_number(dtype: torch.dtype, dim: int, ends: list[int]) -> None:
    assert cut(state(dtype), dim, ends) == whole(state(dtype))


def test_how_many_elements_are_taken_at_a_time_does_not_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    found = whole(state()), cut(state(), 1, [7])
    monkeypatch.setattr("muster.train.state.state_hash.ELEMENTS_AT_ONCE", 10)
    spread.cache_clear()
    blocks: list[int] = []

    def counted(bits: Tensor, key: Tensor) -> Tensor:
        blocks.append(bits.numel())
        return mixed_sum(bits, key)

    monkeypatch.setattr("muster.train.state.state_hash.mixed_sum", counted)
    assert (whole(state()), cut(state(), 1, [7])) == found
    assert max(blocks) == 10
    spread.cache_clear()


def test_on_a_gpu_a_block_is_worth_its_launches() -> None:
    with FakeTensorMode(allow_non_fake_inputs=True):
        ramp = spread.__wrapped__(torch.device("cuda"))
    assert len(ramp) == 1 << 24 and len(spread(torch.device("cpu"))) == 1 << 15


def test_one_bit_anywhere_gives_another_number() -> None:
    before = whole(state())
    for name, index in [("model.embed", 0), ("model.embed", 887), ("model.norm", 3), ("model.cube", 100)]:
        for bit in (0, 15, 31):
            tensors = state()
            tensors[name].view(torch.int32).view(-1)[index] ^= -(1 << 31) if bit == 31 else 1 << bit
            assert whole(tensors) != before, (name, index, bit)


def test_zero_and_minus_zero_are_two_states() -> None:
    assert whole({"a": torch.tensor([0.0])}) != whole({"a": torch.tensor([-0.0])})


def test_swapped_elements_and_swapped_tensors_give_another_number() -> None:
    before, tensors = whole(state()), state()
    flat = tensors["model.embed"].view(-1)
    flat[[1, 500]] = flat[[500, 1]]
    assert whole(tensors) != before
    tensors = state()
    other = "optimizer.exp_avg.embed"
    tensors["model.embed"], tensors[other] = tensors[other], tensors["model.embed"]
    assert whole(tensors) != before


def test_the_numbers_of_many_states_fill_all_64_bits() -> None:
    seen = [whole({"a": torch.tensor([float(value)])}) % (1 << 64) for value in range(2000)]
    assert len(set(seen)) == 2000
    for bit in range(64):
        share = sum(number >> bit & 1 for number in seen) / 2000
        assert 0.4 < share < 0.6, f"bit {bit} is set in {share:.0%}"


# ---------------------------------------------------------------- taking it in a run


def hashes(group: Any = None, **place: int) -> StateHashes:
    tensors = state()
    owner: Any = SimpleNamespace(sharded=lambda: tensors, local_tensors=lambda: tensors)
    return StateHashes(owner, every_steps=2, group=group, **{"replica": 0, "groups": ReduceGroups(), **place})


def test_it_is_taken_when_due_and_holds_the_step() -> None:
    one = hashes()
    assert one.begin(1) is None
    found = [one.begin(step) for step in (2, 4)]
    texts = [text for each in found if each is not None for text in each.texts() or ()]
    assert len({*texts}) == 2 and all(len(text) == 16 for text in texts)


def test_copies_count_once() -> None:
    """What an earlier rank of the same axis holds as well is left to the first; another replica has its own number."""
    second_rank: Any = SimpleNamespace(rank=lambda: 1)
    found = hashes(groups=ReduceGroups({TENSOR: second_rank})).begin(2)
    assert found is not None and found.totals.tolist() == [0]
    first, second = (hashes(replica=replica, replicas=2).begin(2) for replica in (0, 1))
    assert first is not None and second is not None
    assert first.totals.tolist() == second.totals.flip(0).tolist() == [whole(state()), 0]


class Summed:
    """A group of two ranks: what the other one has is added at once."""

    def __init__(self, other: list[int]) -> None:
        self.other = other

    def allreduce(self, tensors: Any, options: Any) -> Any:
        tensors[0] += torch.tensor(self.other)
        return self

    def wait(self) -> None:
        pass


class AgentClient:
    def __init__(self) -> None:
        self.notes: list[dict[str, Any]] = []

    def emit(self, kind: str, *, step: int, **detail: Any) -> None:
        assert kind == "run.message"
        self.notes.append({"step": step, **detail})


def test_replicas_that_hold_one_state_have_one_hash_and_nobody_hears_of_it() -> None:
    one, agent = hashes(Summed([0, whole(state())]), replicas=2), AgentClient()
    found = one.begin(2)
    assert found is not None
    assert one.event_detail(found, agent) == {"state_hash": hashes().begin(2).texts()[0]}  # type: ignore[arg-type, union-attr, index]
    assert agent.notes == []


def test_a_replica_of_another_state_is_told_at_each_step_and_noted_once() -> None:
    flipped = state()
    flipped["model.embed"].view(torch.int32)[3, 3] ^= 1
    one, agent = hashes(Summed([0, whole(flipped)]), replicas=2), AgentClient()
    for step in (2, 4):
        found = one.begin(step)
        assert found is not None
        told = one.event_detail(found, agent)  # type: ignore[arg-type]
        assert told["state_hash"] == told["replica_hashes"][0] != told["replica_hashes"][1]
    (note,) = agent.notes
    assert note["step"] == 2 and "after step 2 the replicas do not hold one state" in note["text"]


def test_a_majority_tells_which_replica_it_is_and_two_do_not() -> None:
    assert "corruption of replica 1, where 2 of 3 agree" in describe_difference(7, ["a", "b", "a"])
    assert "corruption of replica 0 and 3, where 3 of 5 agree" in describe_difference(7, ["b", "a", "a", "c", "a"])
    assert "that cannot be identified (a: replica 0; b: replica 1)" in describe_difference(7, ["a", "b"])


class Broken:
    """A group whose peer is gone: it tells at once, or to whoever waits."""

    def __init__(self, *, at_once: bool) -> None:
        self.at_once = at_once
        self.calls = 0

    def allreduce(self, tensors: Any, options: Any) -> Any:
        self.calls += 1
        if self.at_once:
            raise RuntimeError("Connection closed by peer")
        return self

    def is_completed(self) -> bool:
        return False

    def wait(self) -> None:
        raise RuntimeError("Connection closed by peer")


@pytest.mark.parametrize("at_once", [True, False])
def test_a_group_that_breaks_costs_the_hash_and_nothing_else(at_once: bool) -> None:
    group = Broken(at_once=at_once)
    found = hashes(group).begin(2)
    assert found is not None and found.texts() is None and found.texts() is None
    assert hashes(group).event_detail(found, None) == {"state_hash": None}
    assert group.calls == 1, "never asked for again"


def test_a_rank_that_stands_still_does_not_wait_for_it() -> None:
    class Never(Broken):
        def wait(self) -> None:
            raise AssertionError("waited")

    found = PendingHash(2, torch.zeros(1, dtype=torch.int64), Never(at_once=False))  # type: ignore[arg-type]
    assert found.texts(wait=False) is None
