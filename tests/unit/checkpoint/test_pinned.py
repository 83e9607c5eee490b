"""Memory is registered with CUDA beside the training, and whatever CUDA says costs speed alone.

No GPU is here: ``torch.cuda`` is a stand-in that keeps a thread's last error, as the CUDA runtime does.
"""

import gc
import threading
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from muster.checkpoint import pinned  # noqa: E402
from muster.checkpoint.staging import Staging  # noqa: E402

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
    pinned.pin_soon(owner, [buffer], GPU, what="memory").join(10)
    assert cuda.registered == {buffer.data_ptr(): 64}
    del owner
    gc.collect()
    assert cuda.registered == {}


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
    pinned.pin_soon(Owner(), [refused, refused], GPU, what="memory").join(10)
    said = capsys.readouterr().err
    assert said.count("note:") == 1 and "memory is not pinned" in said and "712" in said
    assert seen == [0] and not cuda.registered


def test_what_cuda_raises_stays_in_the_thread(cuda: Cuda, capsys: pytest.CaptureFixture[str]) -> None:
    cuda.answer = RuntimeError("no CUDA-capable device")
    pinned.pin_soon(Owner(), [torch.zeros(1)], GPU, what="memory").join(10)
    assert "no CUDA-capable device" in capsys.readouterr().err


@pytest.mark.parametrize("shared", [True, False])
def test_staged_saves_are_pinned_too(cuda: Cuda, shared: bool) -> None:
    made = Staging({"w": torch.ones(4).as_subclass(OnGpu)}, None, shared=shared)
    wait_for_pins()
    assert cuda.registered == {made.buffer.data_ptr(): made.buffer.nbytes}
    del made
    gc.collect()
    assert not cuda.registered
