"""8-bit moments in snapshots, saves, hashes and restores: the bits of a whole conversion, a slice at a time.

Each test runs on torchao's own tensors where it is installed, and always on a stand-in with the same fields: eight
bits in blocks, to the same rules.
"""

from __future__ import annotations

import itertools
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.utils._python_dispatch import TorchDispatchMode

from muster.checkpoint import compact, shards
from muster.checkpoint.staging import Staging
from muster.checkpoint_format import reader as shard_reader
from muster.config.spec import Optimizer
from muster.core.layout import Layout
from muster.protocol.ranks import RankContext
from muster.train.distributed.reduce import ReduceGroups
from muster.train.optim.optimizer import make_optimizer
from muster.train.state.snapshot import Snapshots
from muster.train.state.state_hash import partial_sum, places_of
from muster.train.state.training_state import TrainingState

BLOCK = 256


class EightBits(Tensor):
    """torchao's ``OptimState8bit`` in small: linear codes, a scale a block, float32 to the eye."""

    @staticmethod
    def __new__(cls, codes, scale, qmap, signed, dtype=None):
        return Tensor._make_wrapper_subclass(cls, codes.shape, device=codes.device, dtype=torch.float32)

    def __init__(self, codes, scale, qmap, signed, dtype=None):
        self.codes, self.scale, self.qmap, self.signed = codes, scale, qmap, signed

    def dequantize(self):
        blocks = self.qmap[self.codes.view(self.scale.numel(), -1).int()] * self.scale[:, None]
        return blocks.view(self.codes.shape)

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        if func is torch.ops.aten.copy_.default and isinstance(args[0], EightBits):
            to, values = args[:2]
            if isinstance(values, EightBits):
                to.codes.copy_(values.codes)
                to.scale.copy_(values.scale)
                return to
            blocks = values.reshape(to.scale.numel(), -1)
            to.scale.copy_(blocks.abs().amax(-1))
            near = (blocks / to.scale[:, None] * 127).round().add(128).clamp(0, 255)
            to.codes.view(blocks.shape).copy_(near)
            return to
        if func in (torch.ops.aten.detach.default, torch.ops.aten.alias.default):
            return EightBits(args[0].codes, args[0].scale, args[0].qmap, args[0].signed)
        if func is torch.ops.aten.view.default:
            return EightBits(args[0].codes.view(args[1]), args[0].scale, args[0].qmap, args[0].signed)
        if func is torch.ops.aten.is_pinned.default:
            return False
        return NotImplemented


def stand_in(shape: tuple[int, ...]) -> Tensor:
    codes, blocks = torch.zeros(shape, dtype=torch.uint8), torch.Size(shape).numel() // BLOCK
    return EightBits(codes, torch.zeros(blocks), (torch.arange(256) - 128) / 127, True)


class Plain8bit:
    """The optimizer around the stand-in: moments alone."""

    def __init__(self, named):
        self.moments = {
            moment: {name: stand_in(p.shape) if p.numel() % BLOCK == 0 else torch.zeros_like(p.detach())
                     for name, p in named.items()}
            for moment in ("exp_avg", "exp_avg_sq")
        }  # fmt: skip

    def load_moments(self, moments):
        for moment, parts in moments.items():
            for name, part in parts.items():
                compact.write(self.moments[moment][name], part)


SHAPES = {"tall": (96, 24), "odd": (7, 768), "long": (4096,), "cube": (8, 4, 24), "norm": (24,)}
TORCHAO_SHAPES = {**SHAPES, "tall": (192, 24), "cube": (24, 8, 32), "odd": (11, 768)}
"""torchao keeps less than 4,096 values plain."""


@pytest.fixture(params=["torchao", "stand-in"])
def state(request) -> TrainingState:
    shapes = TORCHAO_SHAPES if request.param == "torchao" else SHAPES
    generator = torch.Generator().manual_seed(0)
    named = {name: nn.Parameter(torch.randn(shape, generator=generator)) for name, shape in shapes.items()}
    if request.param == "torchao":
        pytest.importorskip("torchao", reason="torchao is optional")
        optimizer = make_optimizer(named, Optimizer(name="adamw_8bit"), elementwise=False)
    else:
        optimizer = Plain8bit(named)
    values = {
        moment: {name: torch.randn(part.shape, generator=generator).abs_() * 1e-3 for name, part in parts.items()}
        for moment, parts in optimizer.moments.items()
    }
    optimizer.load_moments(values)
    found = TrainingState(named, optimizer)
    assert sum(compact.is_compact(part) for part in found.local_tensors().values()) == 8
    return found


def whole(tensor: Tensor) -> Tensor:
    return tensor.dequantize() if compact.is_compact(tensor) else tensor.detach()


def wholes(state: TrainingState) -> dict[str, Tensor]:
    return {name: whole(part) for name, part in state.local_tensors().items()}


@pytest.fixture(params=[1000, 4096, 1 << 24])
def slice_bytes(request, monkeypatch) -> int:
    """Slices that end within a block and within a tensor, and one that holds everything."""
    monkeypatch.setattr(compact, "SLICE_BYTES", request.param)
    return request.param


def test_slices_are_the_whole_and_none_is_larger(state, slice_bytes):
    for part in state.local_tensors().values():
        pieces = list(compact.slices(part))
        assert torch.equal(torch.cat([values for _, values in pieces]), whole(part))
        assert [first for first, _ in pieces] == [0, *itertools.accumulate(len(v) for _, v in pieces)][:-1]
        row = 4 * part.numel() // part.shape[0]
        if compact.is_compact(part):
            assert max(values.nbytes for _, values in pieces) <= max(slice_bytes, row)


def test_codes_written_in_slices_are_those_of_one_piece(state, slice_bytes, monkeypatch):
    generator = torch.Generator().manual_seed(1)
    for part in state.local_tensors().values():
        if not compact.is_compact(part):
            continue
        values = torch.randn(part.shape, generator=generator)
        part.copy_(values)
        at_once = part.codes.clone(), part.scale.clone()
        part.codes.zero_()
        compact.write(part, values)
        assert torch.equal(part.codes, at_once[0]) and torch.equal(part.scale, at_once[1])


def test_the_hash_is_that_of_whole_values(state, slice_bytes):
    places = places_of(state.sharded(), ReduceGroups())
    assert partial_sum(state.local_tensors(), places) == partial_sum(wholes(state), places)


def test_a_save_stages_whole_values(state, slice_bytes):
    sharded = state.sharded()
    staging = Staging(sharded, None)
    staging.copy(sharded)
    found = {chunk.name: view for chunk, view in zip(staging.local_chunks, staging._views, strict=True)}
    for name, expected in wholes(state).items():
        assert found[name].dtype == torch.float32 and torch.equal(found[name], expected), name


def test_a_snapshot_holds_whole_values_and_comes_back(state, slice_bytes, tmp_path):
    expected = {name: values.clone() for name, values in wholes(state).items()}
    snapshots = Snapshots(context(tmp_path), state.sharded())
    snapshots.save(3, state.local_tensors())
    snapshots.settle()
    [views] = snapshots._views.values()
    for name, values in expected.items():
        assert torch.equal(views[name], values), name
    held = {name: view.clone() for name, view in views.items()}
    for part in state.local_tensors().values():
        for tensor in compact.stored(part):
            tensor.detach().zero_()
    state.load(3, held)
    for name, values in wholes(state).items():
        torch.testing.assert_close(values, expected[name], rtol=0.1, atol=1e-5)


def test_a_restore_in_place_is_adopted(state):
    target = state.writable()
    assert not any(compact.is_compact(tensor) for tensor in target.values())
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for tensor in target.values():
            tensor.copy_(torch.rand(tensor.shape, generator=generator))
    state.loaded(9, target)
    assert state.step == 9
    for name, values in wholes(state).items():
        torch.testing.assert_close(values, target[name], rtol=0.2, atol=5e-2)


def test_sharded_parameters_come_back_from_a_save_through_the_hosts_memory():
    """The path of a restore into another layout: a shard's bytes, torch's reader, DTensors of whole values."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1,))
        named = {"w": nn.Parameter(DTensor.from_local(torch.randn(64, 32), mesh, [Shard(0)]))}
        optimizer = Plain8bit({"w": nn.Parameter(torch.zeros(64, 32))})
        for parts in optimizer.moments.values():
            compact.write(parts["w"], torch.rand(64, 32))
        state = TrainingState(named, optimizer)
        staging = Staging(state.sharded(), None)
        staging.copy(state.sharded())
        data = memoryview(staging.buffer.numpy().data)
        saved = shard_reader.Shard(tuple(staging.local_chunks), lambda start, stop: data[start:stop], "saved")
        before = {name: part.clone() for name, part in wholes(state).items()}
        for part in state.local_tensors().values():
            for tensor in compact.stored(part):
                tensor.detach().zero_()
        target = state.writable()
        assert all(isinstance(tensor, DTensor) for tensor in target.values())
        shards.restore([saved], target)
        state.loaded(5, target)
        for name, values in wholes(state).items():
            torch.testing.assert_close(values, before[name], rtol=0.02, atol=1e-3)
    finally:
        dist.destroy_process_group()


class Largest(TorchDispatchMode):
    """The largest storage that an operation makes."""

    def __init__(self):
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if isinstance(result, Tensor) and type(result) is Tensor and not result._is_view():
            given = {
                each.untyped_storage().data_ptr()
                for each in args
                if isinstance(each, Tensor) and not compact.is_compact(each)
            }
            if result.untyped_storage().data_ptr() not in given:
                self.bytes = max(self.bytes, result.untyped_storage().nbytes())
        return result


def test_nothing_larger_than_a_slice_is_made_for_a_large_moment(tmp_path, monkeypatch):
    """Moments of eight slices: a whole conversion would show as one tensor of that size."""
    assert compact.SLICE_BYTES <= 16 << 20
    monkeypatch.setattr(compact, "SLICE_BYTES", 1 << 20)
    named = {"w": nn.Parameter(torch.zeros(2048, 1024))}
    state = TrainingState(named, Plain8bit(named))
    places = places_of(state.sharded(), ReduceGroups())
    staging, snapshots = Staging(state.sharded(), None), Snapshots(context(tmp_path), state.sharded())
    snapshots.save(1, state.local_tensors())
    for action in (
        lambda: staging.copy(state.sharded()),
        lambda: snapshots.save(2, state.local_tensors()),
        lambda: partial_sum({n: t for n, t in state.local_tensors().items() if n != "model.w"},
                            {n: p for n, p in places.items() if n != "model.w"}),
    ):  # fmt: skip
        with Largest() as seen:
            action()
        assert 0 < seen.bytes <= 1 << 20


def context(tmp_path) -> RankContext:
    found: RankContext = SimpleNamespace(
        snapshot_dir=str(tmp_path), layout=Layout(), rank=0, run_id="r", replicate_snapshots=False, attempt=1,
        local_rank=0, restore=None,
    )  # fmt: skip
    return found
