"""A rank's in-memory snapshots: written after each step, read back by whoever takes its place.

The bytes lie in a ring on tmpfs (``core.ring``) that outlives the process. The ring's header is a table of
the tensors, each with its place in the whole (``core.shards``), so that a world of another size can read
slices of it.
"""

from __future__ import annotations

import json
import queue
import threading
import time
import weakref
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from muster.core.errors import CheckpointError
from muster.core.ranks import RankContext, Restore
from muster.core.ring import Ring, Version, file_name, refusal
from muster.core.seals import check_seal, seal_of

_ALIGN = 64  # of each tensor in a slot: whole cache lines, any dtype
_FETCH_TIMEOUT_S = 60.0
#: So long a snapshot waits for the copy of the one before to reach the peer.
COPY_PATIENCE_S = 60.0


class Snapshots:
    """The writing end, one per rank and attempt."""

    def __init__(
        self, context: RankContext, sharded: Mapping[str, Tensor], *, extra: Mapping[str, Any] | None = None
    ) -> None:
        """``extra``: small values that a checkpoint made of these snapshots carries.

        Raises CheckpointError when the memory for the ring is not there.
        """
        assert context.snapshot_dir is not None
        table, slot_bytes = table_of(sharded)
        known = {"rank": context.rank, "layout": context.layout.key, "extra": dict(extra or {}), "tensors": table}
        header = json.dumps(known, separators=(",", ":")).encode()
        path = Path(context.snapshot_dir) / file_name("own", context.layout.key, context.rank)
        self._ring = Ring.create(path, header=header, slot_bytes=slot_bytes)
        # A version newer than the step we start from belongs to a course that was given up.
        if context.restore is not None and context.restore.layout == context.layout:
            self._ring.forget_after(context.restore.step, attempt=context.restore.attempt)
        else:
            self._ring.forget_after(-1)
        self._attempt = context.attempt
        self._peer_copy = context.peer_copy
        self._last, self._saved_s = -1, 0.0
        self._copied = -1
        self._sealer = Sealer(self._ring)
        self._views = [_views(self._ring, slot, table) for slot in range(self._ring.slots)]

    def save(self, step: int, local_tensors: Mapping[str, Tensor], *, agreed: bool = True) -> None:
        """Copy; returns when the tensors may change again. A kill at any point leaves whole versions only.

        ``agreed``: no rank was ``behind``, so that every peer holds the version before.
        """
        if agreed and self._peer_copy and self._copy_came():
            self._copied = self._last
        slot = self._ring.begin()
        views = self._views[slot]
        for name, tensor in local_tensors.items():
            views[name].copy_(tensor, non_blocking=True)
        if any(tensor.is_cuda for tensor in local_tensors.values()):
            torch.cuda.current_stream().synchronize()
        version = self._ring.commit(slot, step=step, attempt=self._attempt)
        self._sealer.seal(version)
        self._last, self._saved_s = step, time.monotonic()

    def held(self) -> dict[str, int]:
        """For the ``step`` event: the newest step in the hosts' own memory, and in another host's."""
        found = {"snapshot_step": self._last, "peer_step": self._copied}
        return {name: step for name, step in found.items() if step >= 0}

    def keep(self, step: int, local_tensors: Mapping[str, Tensor]) -> None:
        """``save``, unless that step's snapshot is the newest already."""
        if step > max(self._last, 0):
            self.save(step, local_tensors)

    def behind(self) -> bool:
        """Whether the peer does not hold the last snapshot yet.

        A new one is taken only when no rank is behind (the ranks agree on that at each step): so the last
        version that every peer holds is still in every ring, however slow a network is, and a lost host
        never leaves ranks without a common step. After ``COPY_PATIENCE_S`` nobody waits any more: no copy comes
        (a mover that gave up), and a snapshot in the hosts' own memory is better than none.
        """
        if not self._peer_copy or self._last < 0 or self._copy_came():
            return False
        return time.monotonic() - self._saved_s < COPY_PATIENCE_S

    def _copy_came(self) -> bool:
        return self._ring.copied() == (self._last, self._attempt)


class Sealer:
    """Seals versions in a thread of its own, so that no step waits; where it lags, only the newest one.

    A rank that dies at once leaves its last version without a seal: that one is taken as it is. The thread ends with
    the sealer.
    """

    def __init__(self, ring: Ring) -> None:
        self._ring = ring
        self._wanted: queue.SimpleQueue[Version | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        weakref.finalize(self, self._wanted.put, None)

    def seal(self, version: Version) -> None:
        """Have it sealed soon."""
        if self._thread is None:
            self._thread = threading.Thread(
                target=_seal_all, args=(self._ring, self._wanted), name="muster-seal", daemon=True
            )
            self._thread.start()
        self._wanted.put(version)


def _seal_all(ring: Ring, wanted: queue.SimpleQueue[Version | None]) -> None:
    going = True
    while going:
        waiting = [wanted.get()]
        while not wanted.empty():
            waiting.append(wanted.get())
        going = None not in waiting
        newest = next((version for version in reversed(waiting) if version is not None), None)
        if newest is None:
            return
        seal = seal_of(ring.slot(newest.slot))
        if ring.find(newest.step, newest.attempt) == newest:
            ring.seal(newest, seal)


def table_of(sharded: Mapping[str, Tensor]) -> tuple[list[dict[str, Any]], int]:
    """(one entry per tensor: name, dtype, global_shape, offsets, local_shape, byte_offset; bytes in all)."""
    table, at = [], 0
    for name, tensor in sharded.items():
        local, offsets = _place(tensor)
        table.append(
            {
                "name": name,
                "dtype": str(tensor.dtype).removeprefix("torch."),
                "global_shape": list(tensor.shape),
                "offsets": offsets,
                "local_shape": list(local.shape),
                "byte_offset": at,
            }
        )
        at += -(-local.numel() * local.element_size() // _ALIGN) * _ALIGN
    return table, max(at, _ALIGN)


def _place(tensor: Tensor) -> tuple[Tensor, list[int]]:
    """This rank's part and where it begins in the whole."""
    if not isinstance(tensor, DTensor):
        return tensor, [0] * tensor.dim()
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    _, offsets = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    return tensor.to_local(), [int(offset) for offset in offsets]


def _views(ring: Ring, slot: int, table: list[dict[str, Any]]) -> dict[str, Tensor]:
    """Name -> tensor that lies in the slot's bytes."""
    data = ring.slot(slot)
    found = {}
    for entry in table:
        dtype = getattr(torch, entry["dtype"])
        count = 1
        for size in entry["local_shape"]:
            count *= size
        if count == 0:
            found[entry["name"]] = torch.empty(entry["local_shape"], dtype=dtype)
            continue
        flat = torch.frombuffer(data, dtype=dtype, count=count, offset=entry["byte_offset"])
        found[entry["name"]] = flat.view(entry["local_shape"])
    return found


def open_shard(path: Path, restore: Restore, *, check: bool = True) -> tuple[Ring, list[dict[str, Any]], int]:
    """(ring, table, slot) of the version to restore; waits for a file that is still being fetched.

    ``check``: compare its bytes with its seal, which reads them all.

    Raises:
        CheckpointError: it did not come (the mover says at once when it cannot be had), the version is not in it, or
            is not what was sealed.
    """
    deadline = time.monotonic() + (_FETCH_TIMEOUT_S if path.name.startswith("fetched.") else 0.0)
    while True:
        waits = time.monotonic() < deadline
        if path.exists() or not waits:
            ring = Ring.open(path, writable=True)
            version = ring.find(restore.step, restore.attempt)
            if version is not None:
                if check:
                    check_seal(ring, version)
                return ring, json.loads(ring.header)["tensors"], version.slot
        refused = refusal(path)
        if refused is not None:
            raise CheckpointError(f"{path.name} of step {restore.step} could not be fetched: {refused}")
        if not waits:
            raise CheckpointError(f"{path.name} does not hold step {restore.step} of attempt {restore.attempt}")
        time.sleep(0.005)


def restore_same_layout(context: RankContext, restore: Restore) -> dict[str, Tensor]:
    """This rank's own parts, as ``TrainState.load`` takes them: views into the ring, nothing copied yet."""
    ring, table, slot = open_shard(Path(restore.shards[str(context.rank)]), restore)
    return _views(ring, slot, table)


def restore_other_layout(
    restore: Restore, wanted: Mapping[str, Tensor], *, local_rank: int = 0, local_world_size: int = 1
) -> dict[str, Tensor]:
    """The parts that ``wanted`` (this rank's sharded state) needs, put together from the former ranks' shards.

    Reads only the overlaps, and compares the seals of this rank's share of the files on its host, so that each is
    compared once; one that is wrong ends the whole attempt.

    Raises:
        CheckpointError: a shard is missing, or the shards do not cover a tensor.
    """
    paths = [Path(path) for _, path in sorted(restore.shards.items(), key=lambda item: int(item[0]))]
    shards = [
        open_shard(path, restore, check=number % local_world_size == local_rank) for number, path in enumerate(paths)
    ]
    views = [(_views(ring, slot, table), {entry["name"]: entry for entry in table}) for ring, table, slot in shards]
    found = {}
    for name, tensor in wanted.items():
        part, offsets = _place(tensor)
        target = torch.empty(part.shape, dtype=part.dtype)
        filled = 0
        seen: set[tuple[int, ...]] = set()
        for tensors, entries in views:
            entry = entries.get(name)
            if entry is None or tuple(entry["offsets"]) in seen:
                continue  # a replica's twin holds the same bytes
            count = copy_overlap(target, offsets, tensors[name], entry["offsets"])
            if count:
                seen.add(tuple(entry["offsets"]))
            filled += count
        if filled != target.numel():
            raise CheckpointError(
                f"the snapshots of step {restore.step} hold {filled} of {target.numel()} values of {name}"
            )
        found[name] = target
    return found


def copy_overlap(target: Tensor, target_at: list[int], source: Tensor, source_at: list[int]) -> int:
    """Copy what two boxes of one global tensor share; return how many values that was."""
    if target.dim() == 0:
        target.copy_(source)
        return 1
    into, out_of = [], []
    for axis in range(target.dim()):
        begin = max(target_at[axis], source_at[axis])
        end = min(target_at[axis] + target.shape[axis], source_at[axis] + source.shape[axis])
        if end <= begin:
            return 0
        into.append(slice(begin - target_at[axis], end - target_at[axis]))
        out_of.append(slice(begin - source_at[axis], end - source_at[axis]))
    target[tuple(into)].copy_(source[tuple(out_of)])
    return target[tuple(into)].numel()


def restored(context: RankContext, restore: Restore, sharded: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    """This rank's parts of the version that ``restore`` names, from whichever layout took it."""
    if restore.layout == context.layout and str(context.rank) in restore.shards:
        return restore_same_layout(context, restore)
    return restore_other_layout(
        restore, sharded, local_rank=context.local_rank, local_world_size=context.local_world_size
    )
