"""Process groups that cross replicas: made beside torch's default group, so that they can be broken and made anew.

With ``dp_replicate`` > 1 the default group of a rank spans its own replica, and FSDP's groups lie within it. What
joins the replicas (the sum over them, orders, saves) are groups of their own. When another replica loses a rank,
those alone are broken; the model, its shards and its groups stay as they are.

Torch's functions of the same names refuse a group that is not in its registry once something goes wrong, so
collectives on these groups are the groups' own methods (``all_reduce`` and ``all_gather`` here).
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


def all_reduce(
    tensor: Tensor, group: dist.ProcessGroup, *, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM
) -> dist.Work:
    """Begin to reduce ``tensor`` in place over ``group``; wait for the work before it is read."""
    options = dist.AllreduceOptions()
    options.reduceOp = op  # type: ignore[assignment]  # torch's stub knows only the class
    return group.allreduce([tensor], options)


def all_gather(found: Sequence[Tensor], mine: Tensor, group: dist.ProcessGroup) -> None:
    """Fill ``found`` with every rank's ``mine``, in rank order."""
    group.allgather([list(found)], [mine]).wait()


def gloo_group(store: dist.Store, *, rank: int, size: int, timeout: timedelta) -> dist.ProcessGroup:
    """A gloo group over whoever meets under ``store``, outside torch's registry. Blocks until all have come."""
    kind = dist.ProcessGroup.BackendType.GLOO
    return _wrapped(store, rank, size, kind, dist.ProcessGroupGloo(store, rank, size, timeout), "cpu")


def nccl_group(store: dist.Store, *, rank: int, size: int, timeout: timedelta) -> dist.ProcessGroup:
    """The same with NCCL, whose communicator is made at the first collective."""
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timeout
    kind = dist.ProcessGroup.BackendType.NCCL
    return _wrapped(store, rank, size, kind, dist.ProcessGroupNCCL(store, rank, size, options), "cuda")


def _wrapped(
    store: dist.Store, rank: int, size: int, kind: dist.ProcessGroup.BackendType, backend: Any, device: str
) -> dist.ProcessGroup:
    backend._set_sequence_number_for_group()
    group = dist.ProcessGroup(store, rank, size)
    group._set_default_backend(kind)
    group._register_backend(torch.device(device), kind, backend)
    return group


def confirm_completed(group: dist.ProcessGroup, aborter: GroupAborter, device: torch.device) -> None:
    """Return once what was begun and waited for on ``group`` has really been done, by every rank of it.

    gloo's ``wait`` blocks, and raises where the group was cut. NCCL's only puts streams in order, and an aborted
    communicator lets its kernels end as if all were well: what they leave in the tensors is no sum. So the host waits
    for the device, and then asks whether anybody broke the group meanwhile.

    Raises:
        RuntimeError: somebody did; nothing that the group was to sum since its last success may be used.
    """
    if group._get_backend_name() == "gloo":
        return
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()
    if aborter.broken or _failed(group, device):
        raise RuntimeError("NCCL aborted: another replica was lost while gradients were summed, and the sums with it")


def _failed(group: dist.ProcessGroup, device: torch.device) -> bool:
    """Whether the group's own watchdog noted an error; it does so before it aborts (ProcessGroupNCCL's run loop)."""
    try:
        error: Any = group._get_backend(device).get_error()
    except RuntimeError:  # a backend that keeps no such note
        return False
    return str(error.name) != "SUCCESS"


class GroupAborter:
    """Breaks gloo groups under whoever waits in them.

    A gloo collective whose peer is stopped (SIGSTOP, a cut link) never raises, and ``abort`` and ``shutdown`` of the
    group leave it waiting. Shutting its sockets down makes it raise at once; the process goes on.
    """

    def __init__(self) -> None:
        self.broken = False
        """Set before anything is cut: whoever finds a sum done and this unset has a sum that nobody cut short."""
        self._sockets: dict[int, str] = {}
        self._nccl: list[dist.ProcessGroup] = []

    def watch(self, make: Callable[[], dist.ProcessGroup | None]) -> dist.ProcessGroup | None:
        """Make a group and remember the connections that this opened.

        A connection that another thread opens at the same moment would be taken for the group's, and cut with it:
        the stores that ranks write to repeat a request whose connection breaks.
        """
        before = _open_sockets()
        group = make()
        self._sockets.update({fd: name for fd, name in _open_sockets().items() if before.get(fd) != name})
        if group is not None and group._get_backend_name() == "nccl":
            self._nccl.append(group)
        return group

    def __call__(self) -> None:
        """Break them, from any thread; harmless when repeated."""
        self.broken = True
        for fd, name in self._sockets.items():
            with suppress(OSError):
                if os.readlink(f"/proc/self/fd/{fd}") == name:  # the number may have been given away
                    _shut(fd)
        self._sockets.clear()
        for group in self._nccl:
            with suppress(RuntimeError):
                group.abort()
        self._nccl.clear()


def _open_sockets() -> dict[int, str]:
    found = {}
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError):
            target = os.readlink(f"/proc/self/fd/{name}")
            if target.startswith("socket:"):
                found[int(name)] = target
    return found


def _shut(fd: int) -> None:
    with socket.socket(fileno=os.dup(fd)) as connection:
        connection.getpeername()  # a listening socket has none, and is left alone
        connection.shutdown(socket.SHUT_RDWR)
