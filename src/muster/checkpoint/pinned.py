"""Host memory registered with CUDA (pinned), so that copies between it and a GPU run at the link's speed.

Memory that was mapped by us (a memfd, a ring on tmpfs) is pageable: a copy into it goes through a small buffer of the
driver's and holds the host. Registering it takes the driver a while (it pins every page), so it is done in parallel
with training, once its pages exist; until then, and where CUDA refuses, copies are only slower.

On an H100 registering takes 0.05 s a GB and copies run at 55 GB/s afterwards, at 13 to 18 before. The tests replace
``torch.cuda`` by a fake.
"""

from __future__ import annotations

import contextlib
import sys
import threading
import time
import weakref
from collections.abc import Iterator, Sequence
from typing import Protocol

import torch

#: Bytes registered in one call. For a whole slot the driver would hold its locks for seconds, which launches take too.
AT_ONCE = 1 << 30
PORTABLE = 1
"""cudaHostRegisterPortable: pinned for every context of the process."""


def pin_soon(owner: object, buffers: Sequence[torch.Tensor], device: torch.device, *, purpose: str) -> threading.Thread:
    """Have the buffers' memory registered by a thread of its own; it stays so until ``owner`` goes.

    Nothing waits for it and nothing is raised: a refusal is one line on stderr, and the remaining buffers stay
    pageable. All may be used meanwhile. Two buffers must not share a page: CUDA pins pages, and each of them once.
    """
    thread = threading.Thread(
        target=_pin_all, args=(owner, list(buffers), device, purpose), name="muster-pin", daemon=True
    )
    thread.start()
    return thread


def _pin_all(owner: object, buffers: Sequence[torch.Tensor], device: torch.device, purpose: str) -> None:
    try:
        torch.cuda.set_device(device)  # a thread begins with GPU 0, and would open a context there
        for buffer in buffers:
            for address, length in parts(buffer.data_ptr(), buffer.nbytes):
                began = time.monotonic()
                code = int(_runtime().cudaHostRegister(address, length, PORTABLE))
                if code != 0:
                    raise RuntimeError(f"CUDA error {code}")
                # Before the memory is freed, or its address would still count as pinned when it is reused.
                weakref.finalize(owner, _unpin, address).atexit = False  # the process's end unpins everything
                # The driver's locks, which launches take too, are free for as long as they were held.
                time.sleep(time.monotonic() - began)
    except Exception as error:  # noqa: BLE001 (a thread's edge, and only speed is at stake)
        consume_error(device)
        reason = str(error) or type(error).__name__
        print(f"note: {purpose} is not pinned, copies to it are slower: {reason}", file=sys.stderr, flush=True)


def parts(address: int, length: int) -> Iterator[tuple[int, int]]:
    """(address, length) of what is registered together: cut where the address is a multiple of ``AT_ONCE``."""
    end = address + length
    while address < end:
        cut = min(end, (address // AT_ONCE + 1) * AT_ONCE)
        yield address, cut - address
        address = cut


@torch.no_grad()
def copy(to: torch.Tensor, source: torch.Tensor) -> None:
    """``to.copy_(source, non_blocking=True)``. From a GPU never across the border of two registered parts: CUDA refuses
    such a copy (``cudaErrorInvalidValue``)."""
    if not source.is_cuda or not to.is_contiguous():
        to.copy_(source, non_blocking=True)
        return
    flat, values, begin = to.view(-1), None, 0
    for _, length in parts(to.data_ptr(), to.nbytes):
        count = length // to.element_size()
        if count == to.numel():
            to.copy_(source, non_blocking=True)
            return
        values = source.reshape(-1) if values is None else values
        flat[begin : begin + count].copy_(values[begin : begin + count], non_blocking=True)
        begin += count


def _unpin(address: int) -> None:
    with contextlib.suppress(Exception):
        _runtime().cudaHostUnregister(address)


class _Runtime(Protocol):
    def cudaHostRegister(self, address: int, count: int, flags: int) -> int: ...

    def cudaHostUnregister(self, address: int) -> int: ...


def _runtime() -> _Runtime:
    """The CUDA runtime, as torch has it (untyped there)."""
    result: _Runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    return result


def consume_error(device: torch.device) -> None:
    """Clear the last CUDA error of this thread, so that the next call does not report it.

    A failed runtime call leaves it behind, and the check after the next kernel launch raises it as that kernel's
    (``C10_CUDA_KERNEL_LAUNCH_CHECK``), which takes it away too. So a kernel of no consequence is launched.
    """
    with contextlib.suppress(Exception):
        torch.zeros(1, device=device)
