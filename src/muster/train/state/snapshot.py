"""A rank's in-memory snapshots: written after each step, read by the rank that takes its place.

The bytes are in a ring on tmpfs (``checkpoint_format.snapshot_ring``) that outlives the process. The ring's header is a
table of the tensors, each with its place in the global one (``checkpoint_format.shards``), so that a world of another
size can read slices of it.
"""

from __future__ import annotations

import contextlib
import json
import math
import mmap
import os
import queue
import threading
import time
import weakref
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from muster.checkpoint import shards
from muster.checkpoint.pinned import pin_soon
from muster.checkpoint.reader import Shard
from muster.checkpoint_format.snapshot_checksum import checksum_of, verify_checksum
from muster.checkpoint_format.snapshot_ring import NoRoom, Ring, Version, file_name, refusal
from muster.checkpoint_format.tensor_index import boxes_of_table
from muster.core.errors import CheckpointError
from muster.core.snapshot_slots import COPIED_SLOTS, MAX_SLOTS, OWN_SLOTS
from muster.protocol.ranks import RankContext, Restore
from muster.train.distributed.reduce import local

_ALIGN = 64  # of each tensor in a slot: a cache line, any dtype
_FETCH_TIMEOUT_S = 60.0
#: A copy that takes longer is reported.
COPY_PATIENCE_S = 60.0


def own_path(context: RankContext) -> Path:
    """The path of this rank's ring."""
    assert context.snapshot_dir is not None
    return Path(context.snapshot_dir) / file_name("own", context.layout.key, context.rank)


class Snapshots:
    """Writes the snapshots, one object per rank and attempt.

    **Which versions are kept.** Every step's snapshot is taken, however slow the copies are: with the newest local
    version a lost rank costs no step. Copies are made one at a time: each step the ranks agree whether every peer holds
    the version whose copy was requested last; if so, the snapshot just taken is copied next, on all ranks alike. So
    three versions are protected when a slot is chosen: the one that all peers hold (*agreed*), the one being copied
    (*ordered*), and the newest. A peer keeps the agreed one while the ordered one arrives. Whichever host is lost, the
    agreed version is complete: in the others' own memory and, for the lost ranks, at their peer.

    With three slots that leaves one to write to, unless a copy takes longer than a step. Then a fourth is reserved;
    if there is no memory for it the newest is overwritten, and a rank that is killed while it writes costs the steps
    since the ordered version.
    """

    def __init__(
        self,
        context: RankContext,
        sharded: Mapping[str, Tensor],
        *,
        extra: Mapping[str, Any] | None = None,
        report: Callable[[str], None] = lambda text: None,
    ) -> None:
        """``extra``: small values for a checkpoint made of these snapshots. ``report``: writes to the run's log.

        Raises NoRoom when there is not enough memory even without copies.
        """
        assert context.snapshot_dir is not None
        table, slot_bytes = table_of(sharded)
        content = {"layout": context.layout.key, "extra": dict(extra or {}), "tensors": table}
        header = json.dumps(content, separators=(",", ":")).encode()
        path = own_path(context)
        self.no_room: NoRoom | None = None
        """Why this rank's snapshots are not copied."""
        slots = COPIED_SLOTS if context.replicate_snapshots else OWN_SLOTS
        try:
            self._ring = Ring.create(path, header=header, slot_bytes=slot_bytes, slots=slots)
        except NoRoom as error:
            if not context.replicate_snapshots:
                raise
            self.no_room = error
            self._ring = Ring.create(path, header=header, slot_bytes=slot_bytes, slots=OWN_SLOTS)
        self._attempt = context.attempt
        self._report = report if context.local_rank == 0 else lambda text: None
        self._delay_reported = False
        self._table = table
        self._views: dict[int, dict[str, Tensor]] = {}
        self._copies = context.replicate_snapshots and self.no_room is None
        self._growth_failed = False
        self._pinned = 0
        """Slots that are registered with CUDA, will be soon, or were refused."""
        self._checksum_writer = ChecksumWriter(self._ring)
        self._discard_newer(context.restore if context.restore and context.restore.layout == context.layout else None)

    def _discard_newer(self, restore: Restore | None) -> None:
        """Drop versions newer than the one that this attempt starts from: they belong to steps that are repeated."""
        ring = self._ring
        ring.forget_after(restore.step if restore else -1, attempt=restore.attempt if restore else None)
        steps = {version.step for version in ring.versions()}
        self.replicated_step = max({ring.agreed(), ring.copied()[0]} & steps, default=-1)
        """The newest step that this rank's peer held in earlier attempts; -1: none, or unknown here."""
        self._newest = ring.find(restore.step, restore.attempt) if restore else None
        self._last = self._copied = -1
        self._agree(-1)
        self._order(None)

    def start(self, *, copies: bool, replicated_step: int) -> None:
        """What the ranks agreed on: whether copies are made, and the oldest ``replicated_step`` of any rank, which is
        protected until this attempt's first copy, of the state that it starts from, has arrived everywhere."""
        self._copies = self._copies and copies
        held = any(version.step == replicated_step for version in self._ring.versions())
        self._agree(replicated_step if held else -1)
        self._order(self._newest if self._copies else None)

    def save(self, step: int, local_tensors: Mapping[str, Tensor], *, copies_arrived: bool = False) -> None:
        """Copy; returns when the tensors may change again. A kill at any point leaves only complete versions.

        ``copies_arrived``: the ranks agreed that every peer holds the ordered version.
        """
        copy_next = copies_arrived and self._asked and self._copies
        if copy_next and self._ordered is not None:
            self._copied = self._ordered.step
            self._agree(self._ordered.step)
        slot = self._ring.begin(spare=self._protected())
        if slot not in self._views:
            self._views[slot] = _views(self._ring, slot, self._table)
        views = self._views[slot]
        for name, tensor in local_tensors.items():
            views[name].copy_(tensor, non_blocking=True)
        if any(tensor.is_cuda for tensor in local_tensors.values()):
            torch.cuda.current_stream().synchronize()
        version = self._ring.commit(slot, step=step, attempt=self._attempt)
        self._checksum_writer.submit(version)
        self._last, self._newest = step, version
        if copy_next:
            self._order(version)
        self._pin(local_tensors)

    def _pin(self, local_tensors: Mapping[str, Tensor]) -> None:
        """Register the slots with CUDA, after the first snapshot: no restart waits for that."""
        gpu = next((tensor.device for tensor in local_tensors.values() if tensor.is_cuda), None)
        if gpu is not None and self._pinned < self._ring.slots:
            new, self._pinned = range(self._pinned, self._ring.slots), self._ring.slots
            memory = [torch.frombuffer(self._ring.slot(slot), dtype=torch.uint8) for slot in new]
            pin_soon(self, memory, gpu, what="memory for snapshots")

    def release_if_empty(self) -> None:
        """No rank takes snapshots in this attempt: release the memory of an empty ring."""
        if not self._ring.versions():
            self._ring.path.unlink(missing_ok=True)

    def newest_steps(self) -> dict[str, int]:
        """For the ``step`` event: the newest step in the hosts' own memory, and in another host's."""
        steps = {"snapshot_step": self._last, "peer_step": self._copied}
        return {name: step for name, step in steps.items() if step >= 0}

    def save_if_newer(self, step: int, local_tensors: Mapping[str, Tensor]) -> None:
        """``save``, unless that step's snapshot is already the newest."""
        if step > max(self._last, 0):
            self.save(step, local_tensors)

    def copy_is_pending(self) -> bool:
        """Whether this rank's peer lacks the ordered version: no other copy is ordered until every peer holds it.

        Nothing waits for it. A copy that takes over ``COPY_PATIENCE_S`` is reported, once until one arrives.
        """
        self._asked = True
        if self._ordered is None:
            return False
        if self._ring.copied(world=self._attempt) == (self._ordered.step, self._ordered.attempt):
            self._delay_reported = False
            return False
        if not self._delay_reported and time.monotonic() - self._ordered_s > COPY_PATIENCE_S:
            self._delay_reported = True
            since = f"it has step {self._copied}" if self._copied >= 0 else "no earlier one arrived"
            self._report(
                f"the copy of step {self._ordered.step} has not reached the other host for {COPY_PATIENCE_S:.0f} s "
                f"({since}): snapshots in the host's own memory continue, a lost host costs more steps"
            )
        return True

    def _order(self, version: Version | None) -> None:
        self._ring.order(version)
        self._ordered, self._ordered_s = version, time.monotonic()
        self._asked = False  # an agreement that was started earlier is about the earlier version

    def _agree(self, step: int) -> None:
        self._agreed = step
        self._ring.agree(step)

    def _protected(self) -> set[int]:
        """Steps whose slots must not be overwritten now; the fourth slot is reserved when it is first needed."""
        newest = {self._newest.step} if self._newest is not None else set()
        copied = {self._agreed} | ({self._ordered.step} if self._ordered is not None else set())
        if not self._copies:
            return newest
        if self._ring.next_slot(spare=newest | copied) is None and not self._growth_failed:
            try:
                self._ring.grow(MAX_SLOTS)
            except CheckpointError:
                self._growth_failed = True
        choices: tuple[set[int], ...] = (newest | copied, copied, {self._agreed})
        return next((spare for spare in choices if self._ring.next_slot(spare=spare) is not None), set())


class ChecksumWriter:
    """Computes checksums of versions in a thread, so that no step waits; if it lags, only of the newest version.

    A rank that dies immediately leaves its last version without a checksum: that one is used unverified. The thread
    ends with this object.
    """

    def __init__(self, ring: Ring) -> None:
        self._ring = ring
        self._queue: queue.SimpleQueue[Version | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        weakref.finalize(self, self._queue.put, None)

    def submit(self, version: Version) -> None:
        """Compute its checksum soon."""
        if self._thread is None:
            self._thread = threading.Thread(
                target=_write_checksums, args=(self._ring, self._queue), name="muster-checksum", daemon=True
            )
            self._thread.start()
        self._queue.put(version)


def _write_checksums(ring: Ring, versions: queue.SimpleQueue[Version | None]) -> None:
    with contextlib.suppress(OSError):  # on Linux: of this thread only. Training has precedence.
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 19)
    running = True
    while running:
        waiting = [versions.get()]
        while not versions.empty():
            waiting.append(versions.get())
        running = None not in waiting
        newest = next((version for version in reversed(waiting) if version is not None), None)
        if newest is None:
            return
        checksum = checksum_of(ring.slot(newest.slot))
        if ring.find(newest.step, newest.attempt) == newest:
            ring.seal(newest, checksum)


def table_of(sharded: Mapping[str, Tensor]) -> tuple[list[dict[str, Any]], int]:
    """(one entry per tensor: name, dtype, global_shape, offsets, local_shape, byte_offset; total bytes)."""
    table, at = [], 0
    for name, tensor in sharded.items():
        part, offsets = local(tensor), offsets_of(tensor)
        table.append(
            {
                "name": name,
                "dtype": str(tensor.dtype).removeprefix("torch."),
                "global_shape": list(tensor.shape),
                "offsets": offsets,
                "local_shape": list(part.shape),
                "byte_offset": at,
            }
        )
        at += -(-part.numel() * part.element_size() // _ALIGN) * _ALIGN
    return table, -(-max(at, 1) // mmap.PAGESIZE) * mmap.PAGESIZE  # slots share no page, because CUDA pins whole pages


def offsets_of(tensor: Tensor) -> list[int]:
    """Where this rank's part begins in the global tensor."""
    if not isinstance(tensor, DTensor):
        return [0] * tensor.dim()
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    _, offsets = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    return [int(offset) for offset in offsets]


def _views(ring: Ring, slot: int, table: list[dict[str, Any]]) -> dict[str, Tensor]:
    """Name -> tensor over the slot's bytes."""
    data = ring.slot(slot)
    tensors = {}
    for entry in table:
        dtype = getattr(torch, entry["dtype"])
        count = math.prod(entry["local_shape"])
        if count == 0:
            tensors[entry["name"]] = torch.empty(entry["local_shape"], dtype=dtype)
            continue
        flat = torch.frombuffer(data, dtype=dtype, count=count, offset=entry["byte_offset"])
        tensors[entry["name"]] = flat.view(entry["local_shape"])
    return tensors


def open_shard(path: Path, restore: Restore, *, check: bool = True) -> tuple[Ring, list[dict[str, Any]], int]:
    """(ring, table, slot) of the version to restore; waits for a file that is still being fetched.

    ``check``: verify its checksum, which reads all its bytes.

    Raises:
        CheckpointError: it did not arrive (the replicator reports a failed fetch at once), the version is not in it, or
            its checksum is wrong.
    """
    deadline = time.monotonic() + (_FETCH_TIMEOUT_S if path.name.startswith("fetched.") else 0.0)
    while True:
        waits = time.monotonic() < deadline
        if path.exists() or not waits:
            ring = Ring.open(path, writable=True)
            version = ring.find(restore.step, restore.attempt)
            if version is not None:
                if check:
                    verify_checksum(ring, version)
                return ring, json.loads(ring.header)["tensors"], version.slot
        reason = refusal(path)
        if reason is not None:
            raise CheckpointError(f"{path.name} of step {restore.step} could not be fetched: {reason}")
        if not waits:
            raise CheckpointError(f"{path.name} does not hold step {restore.step} of attempt {restore.attempt}")
        time.sleep(0.005)


def restore_other_layout(context: RankContext, restore: Restore, sharded: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The parts of ``sharded`` (this rank's state), filled in place from the earlier world's shards.

    Reads only the overlaps, and verifies the checksums of this rank's share of the files on its host, so that each is
    verified once; a wrong one ends the whole attempt.

    Raises:
        CheckpointError: a shard is missing, or the shards do not cover a tensor.
    """
    opened = []
    for number, (_, path) in enumerate(sorted(restore.shards.items(), key=lambda item: int(item[0]))):
        ring, table, slot = open_shard(
            Path(path), restore, check=number % context.local_world_size == context.local_rank
        )
        opened.append(Shard(tuple(boxes_of_table(table)), partial(_slice, ring.slot(slot)), path))
    try:
        shards.restore(opened, {name: tensor for name, tensor in sharded.items() if tensor.numel()})
    except CheckpointError as error:
        raise CheckpointError(f"the snapshots of step {restore.step} do not fit this state: {error}") from error
    return {name: local(tensor) for name, tensor in sharded.items()}


def _slice(data: memoryview, start: int, stop: int) -> memoryview:
    return data[start:stop]


def restored(context: RankContext, restore: Restore, sharded: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    """This rank's parts of the version that ``restore`` names, from whichever layout took it.

    Where this one did, they are views into the ring, not copies.
    """
    if restore.layout != context.layout or str(context.rank) not in restore.shards:
        return restore_other_layout(context, restore, sharded)
    path = Path(restore.shards[str(context.rank)])
    ring, table, slot = open_shard(path, restore)
    if path.name.startswith("fetched."):  # the rank's own ring from now on, before its first step
        os.rename(path, own_path(context))
    return _views(ring, slot, table)
