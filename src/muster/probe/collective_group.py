"""A group of ranks and its collectives. A rank in a function of this file waits for the other ranks: by this a stack
shows whether its rank waits or is waited for (``health.hang.stacks``)."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import (
    AllgatherOptions,
    AllreduceOptions,
    AllToAllOptions,
    PrefixStore,
    ReduceScatterOptions,
)


class Group:
    """Made and used directly: torch's registry keeps state for groups that fail. Every function returns when this
    rank's part is done, and raises RuntimeError where a peer is gone or the time is over.

    gloo listens on ``address``; NCCL takes its interfaces from its own variables, as in a run.
    """

    def __init__(
        self, store: PrefixStore, rank: int, world: int, *, device: torch.device, address: str, timeout: timedelta
    ) -> None:
        self.rank, self.world, self.device = rank, world, device
        if device.type == "cuda":
            nccl = dist.ProcessGroupNCCL.Options()
            nccl._timeout = timeout
            self._group: dist.ProcessGroupNCCL | dist.ProcessGroupGloo
            self._group = dist.ProcessGroupNCCL(store, rank, world, nccl)
        else:
            gloo = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]  # not in torch's stub
            gloo._timeout = timeout
            gloo._devices = [dist.ProcessGroupGloo.create_device(hostname=address)]
            self._group = dist.ProcessGroupGloo(store, rank, world, gloo)
        self._token = torch.zeros(1, device=device)

    def meet(self) -> None:
        """All ranks have come."""
        self.all_reduce(self._token)

    def all_reduce(self, whole: torch.Tensor) -> None:
        self._wait(lambda: self._group.allreduce([whole], AllreduceOptions()))  # type: ignore[union-attr]

    def all_gather(self, whole: torch.Tensor, part: torch.Tensor) -> None:
        self._wait(lambda: self._group._allgather_base(whole, part, AllgatherOptions()))  # type: ignore[union-attr]

    def reduce_scatter(self, part: torch.Tensor, whole: torch.Tensor) -> None:
        options = ReduceScatterOptions()
        self._wait(lambda: self._group._reduce_scatter_base(part, whole, options))  # type: ignore[union-attr]

    def all_to_all(self, result: torch.Tensor, whole: torch.Tensor) -> None:
        self._wait(lambda: self._group.alltoall_base(result, whole, [], [], AllToAllOptions()))  # type: ignore[union-attr]

    def _wait(self, begin: Callable[[], dist.Work]) -> None:
        begin().wait()
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)  # NCCL's wait() orders streams only
