"""What a rank starts from: the snapshot of the rank whose place it takes, or slices of an earlier layout's."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Mapping, Sequence, Set
from functools import partial
from pathlib import Path

from torch import Tensor

from muster.checkpoint import shards
from muster.checkpoint.peer_slices import PeerMemory
from muster.checkpoint_format.decoding import damage_as
from muster.checkpoint_format.reader import Shard
from muster.checkpoint_format.shards import Chunk, ShardHeader, prepare_reading
from muster.checkpoint_format.snapshot_ring import Ring, Version, refusal
from muster.core.errors import BackendError, CheckpointError
from muster.core.snapshots import SnapshotNotIntact
from muster.protocol.held_snapshots import replica_peers
from muster.protocol.ranks import RankContext, Restore, ShardSource
from muster.train.distributed.reduce import local
from muster.train.state.snapshot import own_path, slot_tensors

__all__ = ["open_shard", "prepare_reading", "restore_other_layout", "restored"]
_FETCH_TIMEOUT_S = 60.0


def open_shard(
    source: ShardSource, restore: Restore, *, run_id: str, verify: bool = True
) -> tuple[Ring, tuple[Chunk, ...], int]:
    """(ring, what is in a slot, slot) of the version to restore; waits for a file that is still being fetched.

    ``verify``: compare its checksum, which reads all its bytes.

    Raises:
        SnapshotNotIntact: its host has it no longer or found it damaged, it is not in the file, its checksum is wrong,
            or it is of another run, layout or rank. ``copies`` is ``source``'s.
        BackendError: it did not arrive, which says nothing about the copy (the replicator reports a failed fetch at
            once): its host cannot be reached, or this one has no room.
    """
    path = Path(source.path)
    try:
        with damage_as(path.name):
            ring, version = _wait_for(path, restore)
            if verify:
                ring.verify(version)
            header = ring.shard_header()
    except CheckpointError as error:
        raise SnapshotNotIntact(str(error), copies=(source.copy,)) from error
    took = {source.copy.rank, *replica_peers(restore.layout, source.copy.rank)}
    if (header.run_id, header.layout) != (run_id, restore.layout) or version.rank not in took:
        found = f"{header.layout.key} rank {version.rank} of run {header.run_id}"
        raise SnapshotNotIntact(f"{path.name} is another snapshot: of {found}", copies=(source.copy,))
    return ring, header.tensors, version.slot


def _wait_for(path: Path, restore: Restore) -> tuple[Ring, Version]:
    fetched = path.name.startswith("fetched.")
    deadline = time.monotonic() + (_FETCH_TIMEOUT_S if fetched else 0.0)
    while True:
        waits = time.monotonic() < deadline
        if path.exists() or not fetched:
            ring = Ring.open(path, writable=True)
            version = ring.find(restore.step, restore.attempt)
            if version is not None:
                return ring, version
            if not waits:
                raise CheckpointError(f"{path.name} does not hold step {restore.step} of attempt {restore.attempt}")
        refused = refusal(path)
        if refused is not None:
            reason, of_copy = refused
            text = f"{path.name} of step {restore.step} could not be fetched: {reason}"
            raise CheckpointError(text) if of_copy else BackendError(text)
        if not waits:
            raise BackendError(f"{path.name} of step {restore.step} was not fetched within {_FETCH_TIMEOUT_S:g} s")
        time.sleep(0.005)


def restore_other_layout(
    context: RankContext, restore: Restore, sharded: Mapping[str, Tensor], *, elsewhere: Set[str] = frozenset()
) -> tuple[dict[str, Tensor], int]:
    """(the parts of ``sharded``, this rank's state, filled in place from the earlier world's shards; bytes that other
    hosts sent).

    Reads only the overlaps: of what is in another host's memory, only the blocks that they lie in come, each verified
    on arrival. Files of this host are verified whole; with ``restore.share_verification`` each by one of its ranks. A
    rank may have read a damaged file before the one that verifies it raises: callers let the ranks meet before a step
    is taken from this state.

    Raises:
        SnapshotNotIntact: a shard is missing or damaged, or the shards do not cover a tensor.
    """
    sources = dict(sorted(restore.sources.items()))
    far = {rank: source for rank, source in sources.items() if source.address is not None}
    opened = _opened_here(context, restore, [source for source in sources.values() if source.address is None])
    with contextlib.closing(PeerMemory(context.run_dir)) as peers:
        try:
            for rank, (header, shard) in peers.open(far).items():
                _check_whose(shard.name, header, restore, context.run_id, sources[rank])
                opened.append(shard)  # behind those of this host: what both hold is read here
            filled = {name: tensor for name, tensor in sharded.items() if tensor.numel()}
            shards.restore(opened, filled, elsewhere=elsewhere)
        except SnapshotNotIntact:
            raise
        except CheckpointError as error:
            text = f"the snapshots of step {restore.step} do not fit this state: {error}"
            raise SnapshotNotIntact(text, copies=tuple(source.copy for source in sources.values())) from error
        return {name: local(tensor) for name, tensor in sharded.items()}, peers.bytes_received


def _opened_here(context: RankContext, restore: Restore, sources: Sequence[ShardSource]) -> list[Shard]:
    opened = []
    for number, source in enumerate(sources):
        ring, chunks, slot = open_shard(
            source,
            restore,
            run_id=context.run_id,
            verify=not restore.share_verification or number % context.local_world_size == context.local_rank,
        )
        held = tuple(chunk for chunk in chunks if chunk.bytes)
        opened.append(Shard(held, partial(_slice, ring.slot(slot)), source.path))
    return opened


def _check_whose(name: str, header: ShardHeader, restore: Restore, run_id: str, source: ShardSource) -> None:
    if (header.run_id, header.layout) != (run_id, restore.layout):
        found = f"{header.layout.key} of run {header.run_id}"
        raise SnapshotNotIntact(f"{name} is another snapshot: of {found}", copies=(source.copy,))


def _slice(data: memoryview, start: int, stop: int) -> memoryview:
    return data[start:stop]


def restored(
    context: RankContext,
    restore: Restore,
    writable: Callable[[], Mapping[str, Tensor]],
    *,
    elsewhere: Set[str] = frozenset(),
) -> tuple[Mapping[str, Tensor], int]:
    """(this rank's parts of the version that ``restore`` names, from whichever layout took it; bytes that other hosts
    sent).

    Where this layout did, they are views into the ring, not copies; else ``writable`` makes what is filled.
    ``elsewhere``: as in ``shards.restore``.

    Raises:
        SnapshotNotIntact: as ``restore_other_layout``.
        CheckpointError: this rank holds other layers of the model than the one of the same layout that took it.
    """
    source = restore.sources.get(context.rank)
    if restore.layout != context.layout or source is None:
        return restore_other_layout(context, restore, writable(), elsewhere=elsewhere)
    ring, chunks, slot = open_shard(source, restore, run_id=context.run_id)
    path, fetched = Path(source.path), 0
    if any(chunk.name in elsewhere for chunk in chunks):
        raise CheckpointError(
            f"the snapshot of step {restore.step} is of stages with other layers: parallelism.pp_schedule or pp_chunks "
            "was changed",
            hint="recover with those before, which writes the state to disk; what is there goes on in any order",
        )
    if path.name.startswith("fetched."):  # the rank's own ring from now on, before its first step
        fetched = ring.slot_bytes
        os.rename(path, own_path(context))
    return slot_tensors(ring, slot, chunks), fetched
