"""The loaded part: matrix products of all GPUs together (speed and bits), copies, memory, all_reduce; small on a CPU.

Nothing of ours may run on the GPUs meanwhile: it takes them whole for some seconds.
"""

from __future__ import annotations

import contextlib
import hashlib
import socket
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta

import torch
from torch._C._distributed_c10d import AllreduceOptions, HashStore, ProcessGroupGloo

from muster.health.machine.report import ProbeLine, Speed

_WARM_S, _MEASURE_S = 1.0, 3.0
#: How long GPUs wait for each other, and how long their part may take in all: less than the measurement's limit, so
#: that a GPU that hangs does not cost what the others have measured.
_START_S, _TOGETHER_S = 15.0, 25.0
_CPU_S = 0.5
_SIZE, _CPU_SIZE = 8192, 768
_COPY_BYTES = 1 << 30
_LOOPBACK_BYTES = 256 << 20
_REPEATS = 5
#: GPUs that a thread of an earlier measurement still waits for: the others are measured without them.
_HUNG: set[int] = set()


def matmul() -> ProbeLine:
    """The same product on every GPU, all at the same time."""
    gpus = _gpus()
    if not gpus:
        return ProbeLine(rung="matmul", speeds=tuple(_matmul(torch.device("cpu"), None, turn) for turn in range(2)))
    together = threading.Barrier(len(gpus))

    def work(gpu: int) -> Speed:
        try:
            return _matmul(torch.device("cuda", gpu), gpu, 0, together)
        except RuntimeError:
            together.abort()
            raise

    return ProbeLine(rung="matmul", speeds=_on_all(gpus, "matmul", work))


def _matmul(device: torch.device, gpu: int | None, turn: int, together: threading.Barrier | None = None) -> Speed:
    """In bf16 on a GPU, in fp32 on a processor, which has seldom units for bf16. Inputs are made on the processor, by
    seed: what differs then is the product."""
    size = _SIZE if gpu is not None else _CPU_SIZE
    kind = torch.bfloat16 if gpu is not None else torch.float32
    generator = torch.Generator().manual_seed(20261123)
    left = torch.randn(size, size, generator=generator).to(kind).to(device)
    right = torch.randn(size, size, generator=generator).to(kind).to(device)
    product = left @ right
    digest = hashlib.sha256(product.cpu().view(torch.uint8).numpy().tobytes()).hexdigest()[:16]
    if together is not None:
        with contextlib.suppress(threading.BrokenBarrierError):  # another GPU has failed: that is its fault alone
            together.wait(timeout=_START_S)
        _repeat(lambda: torch.mm(left, right, out=product), device, _WARM_S)
    seconds = _MEASURE_S if gpu is not None else _CPU_S
    count, took = _repeat(lambda: torch.mm(left, right, out=product), device, seconds)
    name = f"GPU {gpu}" if gpu is not None else f"processor, run {turn + 1}"
    unit, scale = ("TFLOP/s", 1e12) if gpu is not None else ("GFLOP/s", 1e9)
    value = 2 * size**3 * count / took / scale
    return Speed(what="matmul", device=name, gpu=gpu, value=value, unit=unit, bits=digest)


def _repeat(call: Callable[[], object], device: torch.device, seconds: float) -> tuple[int, float]:
    """(calls, seconds), for about ``seconds``; a few calls are in flight at a time, as in training."""
    _wait(device)
    begun, count = time.perf_counter(), 0
    while count == 0 or time.perf_counter() - begun < seconds:
        for _ in range(4):
            call()
        count += 4
        _wait(device)
    return count, time.perf_counter() - begun


def copies() -> ProbeLine:
    """Host to GPU and back (pinned, all GPUs one after the other), and the GPU's own memory, read and written."""
    return ProbeLine(rung="copies", speeds=tuple(speed for gpu in _gpus() for speed in _copies(gpu)))


def _copies(gpu: int) -> tuple[Speed, ...]:
    device, name = torch.device("cuda", gpu), f"GPU {gpu}"

    def speed(what: str, into: torch.Tensor, source: torch.Tensor, factor: int = 1) -> Speed:
        def call() -> object:
            return into.copy_(source, non_blocking=True)

        call()
        count, took = _repeat(call, device, 0.25)
        value = factor * count * source.nbytes / took / 1e9
        return Speed(what=what, device=name, gpu=gpu, value=value, unit="GB/s")

    try:
        host = torch.empty(_COPY_BYTES // 4, dtype=torch.uint8, pin_memory=True)
        there = torch.empty_like(host, device=device)
        large, other = (torch.empty(_COPY_BYTES, dtype=torch.uint8, device=device) for _ in range(2))
        return (
            speed("to_device", there, host),
            speed("from_device", host, there),
            speed("memory_copy", large, other, factor=2),
        )
    except RuntimeError as error:
        return (Speed(what="memory_copy", device=name, gpu=gpu, failed=_first_line(error)),)


def all_reduce() -> ProbeLine:
    """Inside the machine: NCCL between its GPUs from one process, gloo between two threads without GPUs."""
    gpus = _gpus()
    if len(gpus) == 1:
        return ProbeLine(rung="all_reduce", note="one GPU: nothing to reduce with")
    size, took = (_nccl(gpus), len(gpus)) if gpus else (_gloo(), 2)
    value = size * 2 * (took - 1) / took
    return ProbeLine(
        rung="all_reduce",
        speeds=(Speed(what="all_reduce", device=f"{took} GPUs" if gpus else "gloo", value=value, unit="GB/s"),),
    )


def _nccl(gpus: Sequence[int]) -> float:
    """GB/s of the buffer, 1 GiB."""
    import torch.cuda.nccl as nccl

    tensors = [torch.ones(_COPY_BYTES // 4, device=f"cuda:{gpu}") for gpu in gpus]
    nccl.all_reduce(tensors)  # type: ignore[no-untyped-call]
    for gpu in gpus:
        torch.cuda.synchronize(gpu)
    if any(float(one[0]) != len(gpus) or float(one[-1]) != len(gpus) for one in tensors):
        raise ValueError("all_reduce gave a wrong sum")
    begun = time.perf_counter()
    for _ in range(_REPEATS):
        nccl.all_reduce(tensors)  # type: ignore[no-untyped-call]
    for gpu in gpus:
        torch.cuda.synchronize(gpu)
    return _COPY_BYTES * _REPEATS / (time.perf_counter() - begun) / 1e9


def _gloo() -> float:
    """GB/s of the buffer, 16 MiB, between two members in this process."""
    store, size = HashStore(), 16 << 20
    took: list[float] = []
    wrong: list[str] = []

    def member(rank: int) -> None:
        try:
            group = ProcessGroupGloo(store, rank, 2, timedelta(seconds=5))
            for _ in range(3):
                tensor = torch.ones(size // 4)
                begun = time.perf_counter()
                group.allreduce([tensor], AllreduceOptions()).wait()  # type: ignore[attr-defined]
                took.append(time.perf_counter() - begun)
                if float(tensor[-1]) != 2.0:
                    wrong.append("all_reduce gave a wrong sum")
        except RuntimeError as error:
            wrong.append(_first_line(error))

    _join([threading.Thread(target=member, args=(rank,), daemon=True) for rank in range(2)])
    if wrong:
        raise ValueError(wrong[0])
    return size / min(took) / 1e9


def loopback() -> ProbeLine:
    """TCP from this process to itself."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        sender = socket.create_connection(server.getsockname(), timeout=5)
        receiver, _ = server.accept()
    block = bytes(1 << 20)

    def send() -> None:
        for _ in range(_LOOPBACK_BYTES >> 20):
            sender.sendall(block)

    with sender, receiver:
        receiver.settimeout(5)
        begun = time.perf_counter()
        thread = threading.Thread(target=send, daemon=True)
        thread.start()
        left = _LOOPBACK_BYTES
        while left:
            got = len(receiver.recv(1 << 20))
            if not got:
                raise OSError("the connection ended")
            left -= got
        value = _LOOPBACK_BYTES / (time.perf_counter() - begun) / 1e9
    speed = Speed(what="loopback", device="TCP to itself", value=value, unit="GB/s")
    return ProbeLine(rung="loopback", speeds=(speed,))


def _gpus() -> Sequence[int]:
    return [gpu for gpu in range(torch.cuda.device_count()) if gpu not in _HUNG]


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _on_all(gpus: Sequence[int], what: str, work: Callable[[int], Speed]) -> tuple[Speed, ...]:
    """``work`` for each GPU in a thread of its own; what one raises is that GPU's."""
    found: dict[int, Speed] = {}
    hung = f"it did not end within {_TOGETHER_S:g} s"

    def one(gpu: int) -> None:
        try:
            found[gpu] = work(gpu)
        except RuntimeError as error:
            found[gpu] = Speed(what=what, device=f"GPU {gpu}", gpu=gpu, failed=_first_line(error))

    threads = [threading.Thread(target=one, args=(gpu,), daemon=True) for gpu in gpus]
    _join(threads, limit_s=_TOGETHER_S)
    _HUNG.update(gpu for gpu, thread in zip(gpus, threads, strict=True) if thread.is_alive())
    return tuple(found.get(gpu) or Speed(what=what, device=f"GPU {gpu}", gpu=gpu, failed=hung) for gpu in gpus)


def _join(threads: Sequence[threading.Thread], limit_s: float | None = None) -> None:
    deadline = None if limit_s is None else time.monotonic() + limit_s
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(None if deadline is None else max(0.0, deadline - time.monotonic()))


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0][:300]
