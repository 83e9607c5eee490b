"""A rank's in-memory snapshots: written after each step, read back by whoever takes its place.

The bytes lie in a ring on tmpfs (``core.ring``) that outlives the process. The ring's header is a table of
the tensors, each with its place in the whole (``core.shards``), so that a world of another size can read
slices of it.
"""

from __future__ import annotations

import contextlib
import json
import mmap
import os
import queue
import threading
import time
import weakref
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from muster.checkpoint.pinned import pin_soon
from muster.checkpoint_format.snapshot_checksum import checksum_of, verify_checksum
from muster.checkpoint_format.snapshot_ring import (
    COPIED_SLOTS,
    MAX_SLOTS,
    OWN_SLOTS,
    NoRoom,
    Ring,
    Version,
    file_name,
    refusal,
)
from muster.core.errors import CheckpointError
from muster.protocol.ranks import RankContext, Restore

_ALIGN = 64  # of each tensor in a slot: whole cache lines, any dtype
_FETCH_TIMEOUT_S = 60.0
#: A copy that takes longer is said.
COPY_PATIENCE_S = 60.0


def own_path(context: RankContext) -> Path:
    """Where this rank's ring lies."""
    assert context.snapshot_dir is not None
    return Path(context.snapshot_dir) / file_name("own", context.layout.key, context.rank)


class Snapshots:
    """The writing end, one per rank and attempt.

    **Which versions live.** Each step's snapshot is taken, however slow copies are: the newest local version is what a
    lost rank costs nothing with. Copies go one at a time: the ranks agree each step whether every peer holds the
    version that was ordered last, and where it does, the snapshot just taken is the next one, on all ranks alike. So
    three versions are spared when a slot is chosen: the one that all peers hold (*agreed*), the one under way
    (*ordered*), and the newest. A peer keeps the agreed one while the ordered one arrives. Whichever host is lost, the
    agreed version is whole: in the others' own memory and, of the lost ranks, at their peer.

    With three slots that leaves one to write to unless a copy takes longer than a step. Then a fourth is reserved;
    where there is no room for it the newest is written over, and a rank that is killed in mid-copy costs the steps
    since the ordered version.
    """

    def __init__(
        self,
        context: RankContext,
        sharded: Mapping[str, Tensor],
        *,
        extra: Mapping[str, Any] | None = None,
        say: Callable[[str], None] = lambda text: None,
    ) -> None:
        """``extra``: small values that a checkpoint made of these snapshots carries. ``say``: to the run's log.

        Raises NoRoom when there is no memory even without copies.
        """
        assert context.snapshot_dir is not None
        table, slot_bytes = table_of(sharded)
        known = {"layout": context.layout.key, "extra": dict(extra or {}), "tensors": table}
        header = json.dumps(known, separators=(",", ":")).encode()
        path = own_path(context)
        self.no_room: NoRoom | None = None
        """Why this rank takes no part in copies."""
        slots = COPIED_SLOTS if context.replicate_snapshots else OWN_SLOTS
        try:
            self._ring = Ring.create(path, header=header, slot_bytes=slot_bytes, slots=slots)
        except NoRoom as error:
            if not context.replicate_snapshots:
                raise
            self.no_room = error
            self._ring = Ring.create(path, header=header, slot_bytes=slot_bytes, slots=OWN_SLOTS)
        self._attempt = context.attempt
        self._say = say if context.local_rank == 0 else lambda text: None
        self._said = False
        self._table = table
        self._views: dict[int, dict[str, Tensor]] = {}
        self._copies = context.replicate_snapshots and self.no_room is None
        self._cramped = False
        self._pinned = 0
        """Slots that are registered with CUDA, or soon will be, or were refused."""
        self._checksum_writer = ChecksumWriter(self._ring)
        self._begin_course(context.restore if context.restore and context.restore.layout == context.layout else None)

    def _begin_course(self, restore: Restore | None) -> None:
        """Versions newer than what this attempt starts from belong to a course that was given up."""
        ring = self._ring
        ring.forget_after(restore.step if restore else -1, attempt=restore.attempt if restore else None)
        there = {version.step for version in ring.versions()}
        self.reached = max({ring.agreed(), ring.copied()[0]} & there, default=-1)
        """In the attempts before: the newest step that this rank's peer held; -1: none, or not known here."""
        self._newest = ring.find(restore.step, restore.attempt) if restore else None
        self._last = self._copied = -1
        self._agree(-1)
        self._order(None)

    def begin(self, *, copies: bool, reached: int) -> None:
        """What the ranks found together: whether copies are made, and the oldest step that one of them had ``reached``,
        which is spared until this attempt's first copy is everywhere. That is of the state it starts from."""
        self._copies = self._copies and copies
        self._agree(reached if any(version.step == reached for version in self._ring.versions()) else -1)
        self._order(self._newest if self._copies else None)

    def save(self, step: int, local_tensors: Mapping[str, Tensor], *, agreed: bool = False) -> None:
        """Copy; returns when the tensors may change again. A kill at any point leaves whole versions only.

        ``agreed``: no rank was ``behind`` when all were asked, so that every peer holds what was ordered.
        """
        next_one = agreed and self._asked and self._copies
        if next_one and self._ordered is not None:
            self._copied = self._ordered.step
            self._agree(self._ordered.step)
        slot = self._ring.begin(spare=self._spared())
        if slot not in self._views:
            self._views[slot] = _views(self._ring, slot, self._table)
        views = self._views[slot]
        for name, tensor in local_tensors.items():
            views[name].copy_(tensor, non_blocking=True)
        if any(tensor.is_cuda for tensor in local_tensors.values()):
            torch.cuda.current_stream().synchronize()
        version = self._ring.commit(slot, step=step, attempt=self._attempt)
        self._checksum_writer.seal(version)
        self._last, self._newest = step, version
        if next_one:
            self._order(version)
        self._pin(local_tensors)

    def _pin(self, local_tensors: Mapping[str, Tensor]) -> None:
        """Have the slots registered with CUDA, now that one snapshot is taken: no restart waits for that."""
        gpu = next((tensor.device for tensor in local_tensors.values() if tensor.is_cuda), None)
        if gpu is not None and self._pinned < self._ring.slots:
            new, self._pinned = range(self._pinned, self._ring.slots), self._ring.slots
            memory = [torch.frombuffer(self._ring.slot(slot), dtype=torch.uint8) for slot in new]
            pin_soon(self, memory, gpu, what="memory for snapshots")

    def let_go(self) -> None:
        """No rank takes snapshots in this attempt: a ring that holds nothing gives its memory back."""
        if not self._ring.versions():
            self._ring.path.unlink(missing_ok=True)

    def held(self) -> dict[str, int]:
        """For the ``step`` event: the newest step in the hosts' own memory, and in another host's."""
        found = {"snapshot_step": self._last, "peer_step": self._copied}
        return {name: step for name, step in found.items() if step >= 0}

    def keep(self, step: int, local_tensors: Mapping[str, Tensor]) -> None:
        """``save``, unless that step's snapshot is the newest already."""
        if step > max(self._last, 0):
            self.save(step, local_tensors)

    def behind(self) -> bool:
        """Whether this rank's peer does not hold yet what was ordered: while any rank's does not, no other copy is.

        Nothing waits for it. A copy that does not come for ``COPY_PATIENCE_S`` is said, once until one comes.
        """
        self._asked = True
        if self._ordered is None:
            return False
        if self._ring.copied(world=self._attempt) == (self._ordered.step, self._ordered.attempt):
            self._said = False
            return False
        if not self._said and time.monotonic() - self._ordered_s > COPY_PATIENCE_S:
            self._said = True
            since = f"it has {self._copied}" if self._copied >= 0 else "none came before it"
            self._say(
                f"the copy of step {self._ordered.step} has not reached the other host for {COPY_PATIENCE_S:.0f} s "
                f"({since}): snapshots in the host's own memory go on, a lost host costs more"
            )
        return True

    def _order(self, version: Version | None) -> None:
        self._ring.order(version)
        self._ordered, self._ordered_s = version, time.monotonic()
        self._asked = False  # an agreement that was begun before is about what was ordered before

    def _agree(self, step: int) -> None:
        self._agreed = step
        self._ring.agree(step)

    def _spared(self) -> set[int]:
        """Steps whose slots are not written to now; the fourth slot is reserved when it is first needed."""
        kept = {self._newest.step} if self._newest is not None else set()
        copied = {self._agreed} | ({self._ordered.step} if self._ordered is not None else set())
        if not self._copies:
            return kept
        if self._ring.next_slot(spare=kept | copied) is None and not self._cramped:
            try:
                self._ring.grow(MAX_SLOTS)
            except CheckpointError:
                self._cramped = True
        wishes: tuple[set[int], ...] = (kept | copied, copied, {self._agreed})
        return next((spare for spare in wishes if self._ring.next_slot(spare=spare) is not None), set())


class ChecksumWriter:
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
    with contextlib.suppress(OSError):  # Linux: of this thread alone. Where no core is free, training comes first.
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 19)
    going = True
    while going:
        waiting = [wanted.get()]
        while not wanted.empty():
            waiting.append(wanted.get())
        going = None not in waiting
        newest = next((version for version in reversed(waiting) if version is not None), None)
        if newest is None:
            return
        seal = checksum_of(ring.slot(newest.slot))
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
    return table, -(-max(at, 1) // mmap.PAGESIZE) * mmap.PAGESIZE  # slots share no page: CUDA pins whole ones


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
                    verify_checksum(ring, version)
                return ring, json.loads(ring.header)["tensors"], version.slot
        refused = refusal(path)
        if refused is not None:
            raise CheckpointError(f"{path.name} of step {restore.step} could not be fetched: {refused}")
        if not waits:
            raise CheckpointError(f"{path.name} does not hold step {restore.step} of attempt {restore.attempt}")
        time.sleep(0.005)


def restore_same_layout(context: RankContext, restore: Restore) -> dict[str, Tensor]:
    """This rank's own parts, as ``TrainingState.load`` takes them: views into the ring, nothing copied yet."""
    path = Path(restore.shards[str(context.rank)])
    ring, table, slot = open_shard(path, restore)
    if path.name.startswith("fetched."):  # from now on this host's own, before any step is taken
        os.rename(path, own_path(context))
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
