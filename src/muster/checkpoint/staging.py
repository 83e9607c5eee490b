"""A rank's share of the state, copied aside in one go, so that training may change the originals at once.

The buffer is laid out as the shard's bytes will be in the file, and reused by every save: a fresh one would fault
its pages in each time. Where a replicator writes the file, it is memory that can be passed to another process and that
lives as long as one of the two holds it (``memfd_create``: no name, no limit of a mounted tmpfs). On CUDA it is pinned
in parallel with training (``pinned``).
"""

from __future__ import annotations

import fcntl
import math
import mmap
import os
import weakref
from collections import defaultdict
from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.default_planner import create_default_local_save_plan
from torch.distributed.tensor import DTensor

from muster.checkpoint import compact, exchange
from muster.checkpoint.pinned import pin_soon
from muster.checkpoint_format import shards
from muster.core.errors import CheckpointError

Box = tuple[str, str, tuple[int, ...], tuple[int, ...], tuple[int, ...]]
"""name, dtype, global shape, offsets, shape."""


def boxes(state: Mapping[str, torch.Tensor]) -> list[Box]:
    """What this rank holds of each tensor, as torch.distributed.checkpoint sees it."""
    result: list[Box] = []
    for item in create_default_local_save_plan(dict(state), is_coordinator=True).items:
        data = item.tensor_data
        if data is None or data.chunk is None:
            raise CheckpointError(f"{item.index.fqn} is not a tensor: only tensors are saved")
        dtype = str(data.properties.dtype).removeprefix("torch.")
        result.append((item.index.fqn, dtype, tuple(data.size), tuple(data.chunk.offsets), tuple(data.chunk.sizes)))
    return result


def shares(held: list[list[Box]]) -> list[list[Box]]:
    """Who writes what: each box once, by the least loaded of the ranks that hold it. Pure.

    Raises:
        CheckpointError: the boxes do not make up the tensors, or ranks disagree about one.
    """
    holders: dict[tuple[str, tuple[int, ...]], list[int]] = defaultdict(list)
    known: dict[tuple[str, tuple[int, ...]], Box] = {}
    for rank, boxes_of_rank in enumerate(held):
        for box in boxes_of_rank:
            key = (box[0], box[3])
            if known.setdefault(key, box) != box:
                raise CheckpointError(f"{box[0]}: ranks disagree about its shape or type")
            if math.prod(box[4]):
                holders[key].append(rank)
    written: list[list[Box]] = [[] for _ in held]
    load = [0] * len(held)
    covered: dict[str, int] = defaultdict(int)
    # Boxes without a choice first, so that the free ones can even the load out.
    for key in sorted(holders, key=lambda key: (len(holders[key]), key)):
        box = known[key]
        rank = min(holders[key], key=lambda rank: (load[rank], rank))
        written[rank].append(box)
        load[rank] += math.prod(box[4]) * shards.ITEM_BYTES.get(box[1], 1)
        covered[box[0]] += math.prod(box[4])
    for name, _, shape, *_ in known.values():
        if covered[name] != math.prod(shape):
            raise CheckpointError(f"{name}: ranks hold {covered[name]} of its {math.prod(shape)} elements")
    return written


class Staging:
    """The buffer of one rank and the plan of all. Making one is collective over ``group``."""

    def __init__(
        self, state: Mapping[str, torch.Tensor], group: dist.ProcessGroup | None, *, shared: bool = False
    ) -> None:
        """``shared``: in memory that can be passed to a replicator, where there is room for it (then ``fd`` is set)."""
        local_boxes = boxes(state)
        held = [[_box(*item) for item in rank] for rank in exchange.gather(local_boxes, group)]
        self.chunks = [shards.pack(rank) for rank in shares(held)]
        """Per rank: what its file holds."""
        self.local_chunks = self.chunks[exchange.rank_of(group)]
        self._signature = local_boxes
        length = max((chunk.byte_offset + chunk.bytes for chunk in self.local_chunks), default=0)
        self.fd: int | None = None
        """The buffer as an open file; None: it is this process's own."""
        result = _shared(length) if shared and length else None
        if result is None:
            self.buffer = torch.zeros(length, dtype=torch.uint8)
        else:
            self.buffer, self.fd = result
            weakref.finalize(self, os.close, self.fd)
        gpu = next((tensor.device for tensor in state.values() if tensor.is_cuda), None)
        if gpu is not None and length:
            pin_soon(self, [self.buffer], gpu, purpose="memory for saves")
        self._views = [
            self.buffer[chunk.byte_offset : chunk.byte_offset + chunk.bytes]
            .view(getattr(torch, chunk.dtype))
            .view(chunk.shape)
            for chunk in self.local_chunks
        ]

    def copy(self, state: Mapping[str, torch.Tensor]) -> None:
        """Copy this rank's share; when it returns the originals may change.

        Raises:
            CheckpointError: the state has other tensors than the one this was made for.
        """
        if boxes(state) != self._signature:
            raise CheckpointError("the state's tensors have changed since the first save")
        whole = [state[chunk.name].detach() for chunk in self.local_chunks]
        sources = [tensor.to_local() if isinstance(tensor, DTensor) else tensor for tensor in whole]
        here = [pair for pair in zip(self._views, sources, strict=True) if _on_host(pair[1])]
        if here:
            torch._foreach_copy_([view for view, _ in here], [source for _, source in here])
        for view, source in zip(self._views, sources, strict=True):
            if not _on_host(source):
                compact.copy(view, source)
        if any(source.is_cuda for source in sources):
            torch.cuda.current_stream().synchronize()


def _on_host(tensor: torch.Tensor) -> bool:
    """Whether it can be copied as it is: neither on a GPU nor computed on the way."""
    return not tensor.is_cuda and not compact.is_compact(tensor)


def _shared(length: int) -> tuple[torch.Tensor, int] | None:
    """Memory behind a file descriptor, its pages there already; None where the system gives none."""
    fd = -1
    try:
        fd = os.memfd_create("muster-staging", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.posix_fallocate(fd, 0, length)
        # Readers may rely on its length: no SIGBUS.
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
        mapped = mmap.mmap(fd, length, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE)
    except OSError:
        if fd >= 0:
            os.close(fd)
        return None
    return torch.frombuffer(mapped, dtype=torch.uint8), fd


def _box(name: str, dtype: str, *places: Sequence[int]) -> Box:
    global_shape, offsets, shape = map(tuple, places)
    return (name, dtype, global_shape, offsets, shape)
