"""A rank's in-memory snapshots: written after each step, read (``snapshot_restore``) by the rank that takes its place.

The bytes are in a ring on tmpfs (``checkpoint_format.snapshot_ring``) that outlives the process. The ring's header is a
table of the tensors, each with its place in the global one (``checkpoint_format.shards``), so that a world of another
size can read slices of it. A version counts once its checksum is there, and is verified before a byte of it is used.
"""

from __future__ import annotations

import contextlib
import ctypes
import math
import mmap
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from muster.checkpoint import compact
from muster.checkpoint.pinned import pin_soon
from muster.checkpoint_format.shards import Chunk, ShardHeader, encode_header
from muster.checkpoint_format.snapshot_ring import NoRoom, Ring, Version, file_name
from muster.core.errors import AccessError, CheckpointError, MusterError
from muster.core.snapshots import COPIED_SLOTS, MAX_SLOTS, OWN_SLOTS
from muster.core.typed_json import JsonObject
from muster.protocol.ranks import RankContext, Restore
from muster.storage.memory_dir import MemoryDir
from muster.train.distributed.reduce import local
from muster.train.state.side_stream import SideStream, ThreadCopy

_ALIGN = 64  # of each tensor in a slot: a cache line, any dtype
#: A version of this size gets its checksum while the step waits (0.1 ms); a larger one in a thread.
INLINE_BYTES = 512 << 10
#: A copy that takes longer is reported.
COPY_PATIENCE_S = 60.0
_MADV_POPULATE_WRITE = 23  # linux/mman.h


def own_path(context: RankContext) -> Path:
    """The path of this rank's ring."""
    assert context.snapshot_dir is not None
    return Path(context.snapshot_dir) / file_name("own", context.layout.key, context.rank)


class Snapshots:
    """Writes the snapshots, one object per rank and attempt.

    **Which versions are kept.** Each snapshot that is due is taken, however slow the copies are: with the newest local
    version a lost rank costs no step. Copies are made one at a time: each step the ranks agree whether every peer holds
    the version whose copy was requested last; if so, the snapshot just taken is copied next, on all ranks alike. So
    three versions are protected when a slot is chosen: the one that all peers hold (*agreed*), the one being copied
    (*ordered*), and the newest. A peer keeps the agreed one while the ordered one arrives. Whichever host is lost, the
    agreed version is complete: in the others' own memory and, for the lost ranks, at their peer.

    With three slots that leaves one to write to, unless a copy takes longer than a step. Then a fourth is reserved;
    if there is no memory for it the newest is overwritten, and a rank that is killed while it writes costs the steps
    since the ordered version.

    **When a version counts.** Its checksum is computed after the copy, of a large one by a thread while training goes
    on; the next ``save`` waits for it. A rank that is killed in between costs that step. From a GPU the copy itself
    goes on meanwhile too, on a stream of its own (``SideStream``), on the CPU in that thread: the next step reads the
    same state until its update.
    """

    def __init__(
        self,
        context: RankContext,
        sharded: Mapping[str, Tensor],
        *,
        extra: JsonObject | None = None,
        report: Callable[[str], None] = lambda text: None,
    ) -> None:
        """``extra``: small values for a checkpoint made of these snapshots. ``report``: writes to the run's log.

        Raises NoRoom when there is not enough memory even without copies.
        """
        assert context.snapshot_dir is not None
        self._chunks, slot_bytes = chunks_of(sharded)
        header = encode_header(
            ShardHeader(run_id=context.run_id, rank=-1, layout=context.layout, extra=extra or {}, tensors=self._chunks)
        )  # of any rank that holds these parts: a twin's ring becomes this rank's
        self._context = context
        self._make_ring = partial(Ring.create, header=header, slot_bytes=slot_bytes)
        path = own_path(context)
        self.no_room: NoRoom | None = None
        """Why this rank's snapshots are not copied."""
        try:
            self._ring = self._make_ring(path, slots=COPIED_SLOTS if context.replicate_snapshots else OWN_SLOTS)
        except NoRoom as error:
            if not context.replicate_snapshots:
                raise
            self.no_room = error
            self._ring = self._make_ring(path, slots=OWN_SLOTS)
        self._path = path
        self._inode: int | None = path.stat().st_ino
        """None: the ring was deleted, and there is none in its place yet."""
        self._no_room_reported = False
        self._attempt, self._rank = context.attempt, context.rank
        self._report = report if context.local_rank == 0 else lambda text: None
        self._delay_reported = False
        self._ordered: Version | None = None
        """What every rank's peer is to get now."""
        self._views: dict[int, dict[str, Tensor]] = {}
        self._copies = context.replicate_snapshots and self.no_room is None
        self._growth_failed = False
        self._pinned = 0
        """Slots that are registered with CUDA, will be soon, or were refused."""
        self._side: SideStream | None = None
        self._copying: ThreadCopy | None = None
        self.overlapped_s = 0.0
        """Time of the last copy that a thread of this process made during a step."""
        self.waited_s = 0.0
        """What the last ``save`` waited until the version before counted."""
        self.takes_s = 0.0
        """From a ``save`` until its version counted, of the last one whose checksum a thread computed."""
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="muster-checksum", initializer=_give_way)
        self._pending: tuple[int, Future[None]] | None = None
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

    def save(
        self,
        step: int,
        local_tensors: Mapping[str, Tensor],
        *,
        copies_arrived: bool = False,
        overlap: bool = False,
    ) -> None:
        """Copy; returns when the tensors may change again. A kill at any point leaves only complete versions.

        ``copies_arrived``: the ranks agreed that every peer holds the ordered version. ``overlap``: copies from a GPU
        go on while the next step computes; the caller calls ``before_change`` before the tensors change.
        Where the host's memory was emptied, nothing is copied until its agent has recreated the folder.
        """
        began = time.monotonic()
        self.settle()
        settled = time.monotonic()
        self.waited_s = settled - began
        copy_next = copies_arrived and self._asked and self._copies
        if self._is_ring_lost() and not self._renew_ring():
            return
        if copy_next and self._ordered is not None:
            self._copied = self._ordered.step
            self._agree(self._ordered.step)
        slot = self._ring.begin(spare=self._protected())
        if slot not in self._views:
            populate(self._ring.slot(slot))
            self._views[slot] = slot_tensors(self._ring, slot, self._chunks)
        self._newest = Version(step=step, attempt=self._attempt, rank=self._rank, slot=slot)
        commit = partial(self._ring.commit, slot, step=step, attempt=self._attempt, rank=self._rank)
        copied = self._copy(self._views[slot], local_tensors, overlap=overlap)
        if copied is None and self._ring.slot_bytes <= INLINE_BYTES:
            commit()
            self._last = step
        else:
            self._pending = step, self._executor.submit(self._count, settled, copied, commit)
        if copy_next:
            self._order(self._newest)
        self._pin(local_tensors)

    def _copy(
        self, views: Mapping[str, Tensor], local_tensors: Mapping[str, Tensor], *, overlap: bool
    ) -> Callable[[], None] | None:
        """Copy; or, with ``overlap``, begin to, and return what waits for these copies, for the thread that computes
        the checksum. On the CPU that thread makes them. Small states are copied at once."""

        def copy() -> None:
            for name, tensor in local_tensors.items():
                compact.copy(views[name], tensor)

        gpu = next((tensor.device for tensor in local_tensors.values() if tensor.is_cuda), None)
        if gpu is not None and overlap:
            self._side = self._side or SideStream(gpu)
            return self._side.copy(copy).synchronize
        if gpu is None and overlap and self._ring.slot_bytes > INLINE_BYTES:
            self._copying = ThreadCopy(copy)
            return self._copying
        copy()
        if gpu is not None:
            torch.cuda.current_stream(gpu).synchronize()
        return None

    def _count(self, began: float, copied: Callable[[], None] | None, commit: Callable[[], Version]) -> None:
        """In the thread: wait for the copies, compute the checksum."""
        if copied is not None:
            copied()
        commit()
        self.takes_s = time.monotonic() - began

    def before_change(self) -> None:
        """The tensors are about to change: wait for the copies that overlap with the step."""
        if self._side is not None:
            self._side.before_change()
        if self._copying is not None:
            self.overlapped_s = self._copying.wait()
            self._copying = None

    @property
    def size_bytes(self) -> int:
        """Of one snapshot of this rank."""
        return int(self._ring.slot_bytes)

    def settle(self) -> None:
        """Wait until the version that was taken last counts."""
        if self._pending is not None:
            step, commit = self._pending
            commit.result()
            self._last, self._pending = step, None

    def _pin(self, local_tensors: Mapping[str, Tensor]) -> None:
        """Register the slots with CUDA, after the first snapshot: no restart waits for that."""
        gpu = next((tensor.device for tensor in local_tensors.values() if tensor.is_cuda), None)
        if gpu is not None and self._pinned < self._ring.slots:
            new, self._pinned = range(self._pinned, self._ring.slots), self._ring.slots
            memory = [torch.frombuffer(self._ring.slot(slot), dtype=torch.uint8) for slot in new]
            pin_soon(self._ring, memory, gpu, purpose="memory for snapshots")

    def _is_ring_lost(self) -> bool:
        """Whether the ring is gone from its path: what is written to it would be lost with this process."""
        try:
            return os.stat(self._path, follow_symlinks=False).st_ino != self._inode
        except OSError:
            return True

    def _renew_ring(self) -> bool:
        """Begin an empty ring in the host's folder in memory, once that is there again. False: not now."""
        if self._inode is not None:
            self._newest, self._ordered, self._inode = None, None, None
            self._last = self._copied = -1
            self._pinned, self._growth_failed = 0, False
            self._views.clear()
            del self._ring  # with its memory: the new one may need the room
        try:
            path = _memory_of(self._context) / self._path.name
            self._ring = self._make_ring(path, slots=COPIED_SLOTS if self._copies else OWN_SLOTS)
            self._path, self._inode = path, path.stat().st_ino
        except (OSError, MusterError) as error:  # mostly: the agent has not made the folder yet
            if isinstance(error, NoRoom) and not self._no_room_reported:
                self._no_room_reported = True
                self._report(f"{error}: training goes on without snapshots of rank {self._rank}")
            return False
        self._agree(-1)
        self._order(None)
        return True

    def release_if_empty(self) -> None:
        """No rank takes snapshots in this attempt: release the memory of an empty ring."""
        if not self._ring.versions():
            self._ring.path.unlink(missing_ok=True)

    def newest_steps(self) -> dict[str, int]:
        """For the ``step`` event: the newest step in the hosts' own memory, and in another host's."""
        if self._pending is not None and self._pending[1].done():
            self.settle()
        steps = {"snapshot_step": self._last, "peer_step": self._copied}
        return {name: step for name, step in steps.items() if step >= 0}

    def save_if_newer(self, step: int, local_tensors: Mapping[str, Tensor]) -> None:
        """``save``, unless that step's snapshot is already the newest. It counts when this returns."""
        self.settle()
        if step > max(self._last, 0):
            self.save(step, local_tensors)
            self.settle()

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
        self._ring.request_copy(version)
        self._ordered, self._ordered_s = version, time.monotonic()
        self._asked = False  # an agreement that was started earlier is about the earlier version

    def _agree(self, step: int) -> None:
        self._agreed = step
        self._ring.note_agreed(step)

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


def populate(memory: memoryview) -> None:
    """Map whole pages at once instead of one by one at the first write; without effect before Linux 5.14."""
    address = torch.frombuffer(memory, dtype=torch.uint8).data_ptr()
    ctypes.CDLL(None).madvise(ctypes.c_void_p(address), ctypes.c_size_t(len(memory)), _MADV_POPULATE_WRITE)


def _memory_of(context: RankContext) -> Path:
    """The host's folder in memory, where it was or under the name that its agent recorded. Raises AccessError."""
    assert context.snapshot_dir is not None
    try:
        return MemoryDir.open(context.snapshot_dir).folder
    except AccessError:
        moved = MemoryDir.recorded(Path(context.run_dir), context.host)
        if moved is None:
            raise
        return moved.folder


def _give_way() -> None:
    """Lower this thread's priority: woken, it does not take the core from the step; starved, the next step waits."""
    with contextlib.suppress(OSError):  # on Linux: of this thread only
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), os.getpriority(os.PRIO_PROCESS, 0) + 5)


def chunks_of(sharded: Mapping[str, Tensor]) -> tuple[tuple[Chunk, ...], int]:
    """(this rank's part of each tensor, empty ones included, and its place in a slot; bytes of a slot)."""
    chunks, at = [], 0
    known: dict[tuple[object, ...], list[int]] = {}  # of equal shapes that are placed alike: layers, moments
    for name, tensor in sharded.items():
        part = local(tensor)
        key = (tensor.shape, *((tensor.device_mesh, tensor.placements) if isinstance(tensor, DTensor) else ()))
        offsets = known.get(key) or known.setdefault(key, offsets_of(tensor))
        chunk = Chunk(
            name=name, dtype=str(tensor.dtype).removeprefix("torch."), global_shape=tuple(tensor.shape),
            offsets=tuple(offsets), shape=tuple(part.shape), byte_offset=at,
        )  # fmt: skip
        chunks.append(chunk)
        at += -(-part.numel() * part.element_size() // _ALIGN) * _ALIGN
    # Slots share no page, because CUDA pins whole pages.
    return tuple(chunks), -(-max(at, 1) // mmap.PAGESIZE) * mmap.PAGESIZE


def offsets_of(tensor: Tensor) -> list[int]:
    """Where this rank's part begins in the global tensor."""
    if not isinstance(tensor, DTensor):
        return [0] * tensor.dim()
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    _, offsets = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    return [int(offset) for offset in offsets]


def slot_tensors(ring: Ring, slot: int, chunks: Sequence[Chunk]) -> dict[str, Tensor]:
    """Name -> tensor over the slot's bytes."""
    data = ring.slot(slot)
    tensors = {}
    for chunk in chunks:
        dtype = getattr(torch, chunk.dtype)
        count = math.prod(chunk.shape)
        if count == 0:
            tensors[chunk.name] = torch.empty(chunk.shape, dtype=dtype)
            continue
        flat = torch.frombuffer(data, dtype=dtype, count=count, offset=chunk.byte_offset)
        tensors[chunk.name] = flat.view(chunk.shape)
    return tensors
