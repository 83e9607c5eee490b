"""Memory is registered with CUDA beside the training, and whatever CUDA says costs speed alone.

No GPU is here: ``torch.cuda`` is a stand-in that keeps a thread's last error, as the CUDA runtime does.
"""

import gc
import mmap
import threading
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from muster.checkpoint import pinned  # noqa: E402
from muster.checkpoint.staging import Staging  # noqa: E402
from muster.checkpoint_format.snapshot_ring import Ring, file_name  # noqa: E402
from muster.core.types import Layout  # noqa: E402
from muster.protocol.ranks import RankContext  # noqa: E402
from muster.train.state.snapshot import Snapshots  # noqa: E402

GPU = torch.device("cuda", 3)
TRUE = torch.cuda


class Cuda:
    """What ``pinned`` uses of torch.cuda; ``answer`` is cudaHostRegister's, an exception is raised."""

    def __init__(self, answer: Any = 0) -> None:
        self.answer = answer
        self.registered: dict[int, int] = {}
        self.device = threading.local()
        self.last_error = threading.local()

    def __getattr__(self, name: str) -> Any:
        return getattr(TRUE, name)

    def set_device(self, device: Any) -> None:
        self.device.now = device

    def cudart(self) -> Any:
        return SimpleNamespace(cudaHostRegister=self._register, cudaHostUnregister=self.registered.pop)

    def current_stream(self, *_: Any) -> Any:
        return SimpleNamespace(synchronize=lambda: None)

    def _register(self, address: int, length: int, flags: int) -> Any:
        assert self.device.now == GPU, "a context on another GPU would be opened"
        if isinstance(self.answer, Exception):
            raise self.answer
        if self.answer:
            self.last_error.code = self.answer
        else:
            self.registered[address] = length
        return self.answer

    def launch(self, *_: Any, device: Any) -> None:
        """The check behind a kernel launch: raises what was left behind, and takes it away."""
        assert device == GPU
        code, self.last_error.code = getattr(self.last_error, "code", 0), 0
        if code:
            raise RuntimeError(f"CUDA error {code}")


class OnGpu(torch.Tensor):
    """A tensor that says it lies on a GPU."""

    is_cuda = True
    device = GPU


class Owner:
    pass


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Cuda:
    found = Cuda()
    monkeypatch.setattr(pinned.torch, "cuda", found)
    return found


def wait_for_pins() -> None:
    for thread in threading.enumerate():
        if thread.name == "muster-pin":
            thread.join(10)


def test_memory_is_registered_and_given_back_with_its_owner(cuda: Cuda) -> None:
    owner, buffer = Owner(), torch.zeros(64, dtype=torch.uint8)
    pinned.pin_soon(owner, [buffer], GPU, purpose="memory").join(10)
    assert cuda.registered == {buffer.data_ptr(): 64}
    del owner
    gc.collect()
    assert cuda.registered == {}


def test_a_large_buffer_is_registered_in_parts_with_pauses(cuda: Cuda, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pinned, "AT_ONCE", 4 * mmap.PAGESIZE)
    pauses: list[float] = []
    monkeypatch.setattr(pinned.time, "sleep", pauses.append)
    owner, buffer = Owner(), torch.frombuffer(mmap.mmap(-1, 11 * mmap.PAGESIZE), dtype=torch.uint8)
    pinned.pin_soon(owner, [buffer], GPU, purpose="memory").join(10)
    ends = [address + length for address, length in cuda.registered.items()]
    assert min(cuda.registered) == buffer.data_ptr() and max(ends) == buffer.data_ptr() + buffer.nbytes
    assert all(end % pinned.AT_ONCE == 0 for end in ends[:-1]) and ends[:-1] == list(cuda.registered)[1:]
    assert len(pauses) == len(ends) >= 3
    del owner
    gc.collect()
    assert cuda.registered == {}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("transposed", [False, True])
def test_no_copy_from_a_gpu_crosses_the_border_of_two_parts(
    monkeypatch: pytest.MonkeyPatch, dtype: Any, transposed: bool
) -> None:
    """CUDA refuses one: cudaErrorInvalidValue."""
    monkeypatch.setattr(pinned, "AT_ONCE", mmap.PAGESIZE)
    memory = mmap.mmap(-1, 8 * mmap.PAGESIZE)
    source = torch.randn(50, 60).to(dtype)
    source = (source.t() if transposed else source).as_subclass(OnGpu)
    count = source.numel()
    into = torch.frombuffer(memory, dtype=dtype, count=count, offset=64).view(source.shape)
    copied: list[tuple[int, int]] = []
    true = torch.Tensor.copy_

    def copy_(to: Any, values: Any, non_blocking: bool = False) -> Any:
        copied.append((to.data_ptr(), to.data_ptr() + to.nbytes))
        return true(to, values.as_subclass(torch.Tensor))

    monkeypatch.setattr(torch.Tensor, "copy_", copy_)
    pinned.copy(into, source)
    monkeypatch.undo()
    assert torch.equal(into, source.as_subclass(torch.Tensor))
    assert len(copied) == -(-(64 + into.nbytes) // mmap.PAGESIZE)
    assert all(begin // mmap.PAGESIZE == (end - 1) // mmap.PAGESIZE for begin, end in copied)


def test_a_refusal_is_one_note_and_its_error_is_consumed(
    cuda: Cuda, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    cuda.answer = 712
    seen = []
    monkeypatch.setattr(pinned.torch, "zeros", cuda.launch)
    true = pinned.consume_error

    def consume(device: Any) -> None:
        true(device)
        seen.append(cuda.last_error.code)  # of the thread that failed

    monkeypatch.setattr(pinned, "consume_error", consume)
    refused: Any = SimpleNamespace(data_ptr=lambda: 1, nbytes=2)
    pinned.pin_soon(Owner(), [refused, refused], GPU, purpose="memory").join(10)
    said = capsys.readouterr().err
    assert said.count("note:") == 1 and "memory is not pinned" in said and "712" in said
    assert seen == [0] and not cuda.registered


def test_what_cuda_raises_stays_in_the_thread(cuda: Cuda, capsys: pytest.CaptureFixture[str]) -> None:
    cuda.answer = RuntimeError("no CUDA-capable device")
    pinned.pin_soon(Owner(), [torch.zeros(1)], GPU, purpose="memory").join(10)
    assert "no CUDA-capable device" in capsys.readouterr().err


def place(folder: Any) -> RankContext:
    return RankContext(
        run_id="r", run_dir=str(folder), attempt=1, host="host-0", rank=0, local_rank=0, world_size=1,
        local_world_size=1, layout=Layout(), master_addr="", master_port=0, snapshot_dir=str(folder),
    )  # fmt: skip


def test_a_ring_is_pinned_slot_by_slot_after_its_first_snapshot(tmp_path: Any, cuda: Cuda) -> None:
    state = {"w": torch.arange(8.0)}
    taken = Snapshots(place(tmp_path), state)
    on_gpu = {name: tensor.as_subclass(OnGpu) for name, tensor in state.items()}
    wait_for_pins()
    assert not cuda.registered, "a restart would wait for it"
    for step in (1, 2, 3):
        taken.save(step, on_gpu)
        wait_for_pins()
    ring = Ring.open(tmp_path / file_name("own", Layout().key, 0))
    assert list(cuda.registered.values()) == [ring.slot_bytes] * ring.slots, "each slot that has memory, once"
    assert all(address % mmap.PAGESIZE == 0 for address in cuda.registered) and ring.slot_bytes % mmap.PAGESIZE == 0
    taken._ring.grow(ring.slots + 1)
    taken.save(4, on_gpu)
    wait_for_pins()
    assert len(cuda.registered) == ring.slots, "and one that got memory later"
    ring.close()
    del taken
    gc.collect()
    assert not cuda.registered, "the mapping is gone, and so must the registration"


def test_snapshots_of_a_cpu_are_left_alone(tmp_path: Any, cuda: Cuda) -> None:
    Snapshots(place(tmp_path), {"w": torch.ones(2)}).save(1, {"w": torch.ones(2)})
    wait_for_pins()
    assert not cuda.registered


@pytest.mark.parametrize("shared", [True, False])
def test_staged_saves_are_pinned_too(cuda: Cuda, shared: bool) -> None:
    made = Staging({"w": torch.ones(4).as_subclass(OnGpu)}, None, shared=shared)
    wait_for_pins()
    assert cuda.registered == {made.buffer.data_ptr(): made.buffer.nbytes}
    del made
    gc.collect()
    assert not cuda.registered
