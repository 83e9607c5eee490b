"""Process groups that cross replicas: separate from torch's default group, so that they can be aborted and rebuilt.

With ``dp_replicate`` > 1 the default group of a rank spans its own replica, and FSDP's groups lie within it. What
joins the replicas (the sum over them, commands, saves) are groups of their own. When another replica loses a rank,
only those are aborted; the model, its shards and its groups stay as they are.

Torch's functions of the same names refuse a group that is not in its registry once something goes wrong, so
collectives on these groups are the groups' own methods (``all_reduce`` here, ``checkpoint.exchange.gather``).
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import Store
from torch.distributed.distributed_c10d import GroupName


def all_reduce(
    tensor: Tensor, group: dist.ProcessGroup, *, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM
) -> dist.Work:
    """Begin to reduce ``tensor`` in place over ``group``; wait for the work before it is read."""
    options = dist.AllreduceOptions()
    options.reduceOp = op  # type: ignore[assignment]  # torch's stub knows only the class
    return group.allreduce([tensor], options)


def all_gather(tensor: Tensor, group: dist.ProcessGroup) -> tuple[list[Tensor], dist.Work]:
    """Begin to collect every rank's ``tensor``, in the order of their ranks; wait for the work before they are read."""
    found = [torch.empty_like(tensor) for _ in range(group.size())]
    return found, group.allgather([found], [tensor])


@dataclass
class Waits:
    """This rank's time inside collectives: others' lateness and the transfer. On a GPU the host does not wait there."""

    ns: int = 0

    def wait(self, work: dist.Work) -> None:
        """Wait for ``work``. Raises as that."""
        began = time.monotonic_ns()
        work.wait()
        self.ns += time.monotonic_ns() - began


#: Ranks of the run in each group that was named, by its name: what torch's registry does not know.
ranks_of_groups: dict[str, tuple[int, ...]] = {}


def named(group: dist.ProcessGroup, *, attempt: int, what: str, ranks: Iterable[int]) -> dist.ProcessGroup:
    """Name a group for the flight recorder, which would take all groups without a name for one.

    A rank that stays in its process for another attempt has the operations of both in its recorder: the name says of
    which they are, and ``ranks_of_groups`` holds those of the newest attempt.
    """
    prefix = f"a{attempt}/"
    for other in [name for name in ranks_of_groups if not name.startswith(prefix)]:
        del ranks_of_groups[other]
    ranks_of_groups[prefix + what] = tuple(ranks)
    group._set_group_name(GroupName(prefix + what))
    group._set_group_desc(what)
    return group


def gloo_group(store: Store, *, rank: int, size: int, timeout: timedelta) -> dist.ProcessGroup:
    """A gloo group of the ranks that meet in ``store``, outside torch's registry. Blocks until all have joined."""
    kind = dist.ProcessGroup.BackendType.GLOO
    return _wrapped(store, rank, size, kind, dist.ProcessGroupGloo(store, rank, size, timeout), "cpu")


def nccl_group(store: Store, *, rank: int, size: int, timeout: timedelta) -> dist.ProcessGroup:
    """The same with NCCL, whose communicator is created at the first collective."""
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timeout
    kind = dist.ProcessGroup.BackendType.NCCL
    return _wrapped(store, rank, size, kind, dist.ProcessGroupNCCL(store, rank, size, options), "cuda")


def _wrapped(
    store: Store, rank: int, size: int, kind: dist.ProcessGroup.BackendType, backend: Any, device: str
) -> dist.ProcessGroup:
    backend._set_sequence_number_for_group()
    group = dist.ProcessGroup(store, rank, size)
    group._set_default_backend(kind)
    group._register_backend(torch.device(device), kind, backend)
    return group


def confirm_completed(group: dist.ProcessGroup, aborter: GroupAborter, device: torch.device) -> None:
    """Return once the collectives that were awaited on ``group`` have completed on every rank.

    gloo's ``wait`` blocks, and raises if the group was aborted. NCCL's only orders streams, and the kernels of an
    aborted communicator end without an error: what they leave in the tensors is not a sum. So the host waits
    for the device, and then checks whether the group was aborted meanwhile.

    Raises:
        RuntimeError: it was; no sum over the group since its last success may be used.
    """
    if group._get_backend_name() == "gloo":
        return
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()
    if aborter.aborted or _failed(group, device):
        raise RuntimeError("NCCL aborted: another replica was lost while gradients were summed, and the sums with it")


def _failed(group: dist.ProcessGroup, device: torch.device) -> bool:
    """Whether the group's own watchdog recorded an error; it does so before it aborts (ProcessGroupNCCL's run loop)."""
    try:
        error: Any = group._get_backend(device).get_error()
    except RuntimeError:  # a backend without such a record
        return False
    return str(error.name) != "SUCCESS"


class GroupAborter:
    """Aborts groups, which frees the threads that wait in their collectives.

    A gloo collective whose peer is stopped (SIGSTOP, a cut connection) never raises, and ``abort`` and ``shutdown`` of
    the group leave it waiting. Shutting down its sockets makes it raise at once; the process continues.
    """

    def __init__(self) -> None:
        self.aborted = False
        """Set before anything is shut down: a sum that is complete while this is unset is a valid sum."""
        self._sockets: dict[int, str] = {}
        self._nccl: list[dist.ProcessGroup] = []

    def watch(self, make: Callable[[], dist.ProcessGroup | None]) -> dist.ProcessGroup | None:
        """Create a group and record the connections that this opened.

        A connection that another thread opens at the same moment would be recorded and shut down too; that is harmless,
        because the stores that ranks write to repeat a request whose connection breaks.
        """
        before = _open_sockets()
        group = make()
        self._sockets.update({fd: name for fd, name in _open_sockets().items() if before.get(fd) != name})
        if group is not None and group._get_backend_name() == "nccl":
            self._nccl.append(group)
        return group

    def __call__(self) -> None:
        """Abort them, from any thread; may be repeated."""
        self.aborted = True
        for fd, name in self._sockets.items():
            with suppress(OSError):
                if os.readlink(f"/proc/self/fd/{fd}") == name:  # the descriptor may have been reused
                    _shut(fd)
        self._sockets.clear()
        for group in self._nccl:
            with suppress(RuntimeError):
                group.abort()
        self._nccl.clear()


def _open_sockets() -> dict[int, str]:
    sockets = {}
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError):
            target = os.readlink(f"/proc/self/fd/{name}")
            if target.startswith("socket:"):
                sockets[int(name)] = target
    return sockets


def _shut(fd: int) -> None:
    with socket.socket(fileno=os.dup(fd)) as connection:
        connection.getpeername()  # a listening socket has no peer, and is not shut down
        connection.shutdown(socket.SHUT_RDWR)
