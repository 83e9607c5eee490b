"""Snapshots in memory as a checkpoint on the disk or in the bucket, without any rank: it may be dead or stopped.

Each host's replicator writes what its host holds of one version (``flush``); when all have, one replicator writes the
index and the marker (``commit_flushed``). The files are under the version's prefix, with names of their own: they never
mix with a save of the same step that a rank left incomplete.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from muster.checkpoint_format import fences, shards
from muster.checkpoint_format import manifest as manifests
from muster.checkpoint_format.draft import CheckpointDraft, WrittenShard
from muster.checkpoint_format.fences import NonceOf, unbound
from muster.checkpoint_format.manifest import Manifest
from muster.checkpoint_format.shard_file import ShardFile, StoredFile, write_shard
from muster.checkpoint_format.shards import Chunk
from muster.checkpoint_format.snapshot_ring import Ring, Version, ring_of
from muster.checkpoint_format.tensor_index import shard_file
from muster.core.errors import CheckpointError
from muster.core.snapshots import SnapshotCopy, SnapshotNotIntact
from muster.core.typed_json import JsonObject
from muster.core.types import Layout
from muster.protocol.to_agent import CommitFlushed, FlushedFile, FlushSnapshots
from muster.protocol.to_supervisor import FlushCommitted, SnapshotsFlushed
from muster.storage import uris
from muster.storage.store import open_store

_FLUSHED = "flushed-"
_PARALLEL_SHARDS = 4
"""Shards that one host writes in parallel: faster on a bucket, little slower on a disk."""


@dataclass(frozen=True, kw_only=True)
class _Shard:
    """One rank's part of the version: what this host writes of it, and from where."""

    rank: int
    copy: SnapshotCopy
    ring: Ring
    version: Version
    in_slot: tuple[Chunk, ...]
    """The boxes in the ring's slot."""
    in_file: tuple[Chunk, ...]
    """The same boxes as the file will have them."""
    extra: JsonObject

    def verify(self) -> None:
        """Raise SnapshotNotIntact, or CheckpointError where a rank has overwritten it."""
        try:
            self.ring.verify(self.version)
        except CheckpointError as error:
            if self.ring.checksum(self.version) is None:
                text = f"the snapshot of step {self.version.step} of rank {self.rank} was overwritten meanwhile"
                raise CheckpointError(text) from error
            raise SnapshotNotIntact(str(error), copies=(self.copy,)) from error


def flush(order: FlushSnapshots, memory: Path, *, run_id: str, nonce_of: NonceOf = unbound) -> SnapshotsFlushed:
    """Write this host's shards of a version. A box that several of its ranks hold is written once; a version that is
    committed already is not written again. Each is verified before it is written, and again after.

    Raises:
        SnapshotNotIntact: a version does not match its checksum.
        CheckpointError: it is missing, or was overwritten meanwhile (ranks train).
        AccessError, BackendError: it cannot be written.
        ConflictError: another copy of the run holds the folder.
    """
    if (held := fences.read(open_store(), order.uri)) is not None:
        held.refuse_copy(order.uri, run_id, nonce_of)
    draft = _draft(order, run_id)
    ours = _shards(order, memory, run_id)
    if _committed(order) is not None:
        return SnapshotsFlushed(step=order.step, attempt=order.attempt)

    def write(shard: _Shard) -> FlushedFile:
        shard.verify()
        preamble = shards.preamble(draft.header(shard.rank, shard.in_file, shard.extra))
        name = f"{_FLUSHED}{shard_file(shard.rank)}"
        stored = write_shard(uris.join(draft.uri, name), _parts(preamble, shard))
        shard.verify()
        # The tensors' table is in the file's own header: too large for a message where models are large.
        return FlushedFile(
            rank=shard.rank, name=name, bytes=stored.bytes, checksum=stored.checksum, data_offset=len(preamble)
        )

    with ThreadPoolExecutor(_PARALLEL_SHARDS) as pool:
        return SnapshotsFlushed(step=order.step, attempt=order.attempt, files=tuple(pool.map(write, ours)))


def commit_flushed(order: CommitFlushed, *, run_id: str, fence: int, nonce_of: NonceOf = unbound) -> FlushCommitted:
    """Make a checkpoint of what all hosts have flushed. The same order twice makes one.

    ``fence``: the attempt in whose name it is committed, the newest that this host knows. An attempt starts from an
    older one's snapshots, so it may hold the folder while the newest version is still its predecessor's.

    Raises:
        CheckpointError: a file is missing or short (hosts without a common folder), or tensors are incomplete.
        ConflictError: a newer attempt, or another copy of the run, holds the folder.
    """
    store, draft = open_store(), _draft(order, run_id)
    existing = _committed(order)
    if existing is not None:
        return FlushCommitted(step=order.step, attempt=order.attempt, uri=existing.uri, bytes=existing.bytes)
    written: list[WrittenShard] = []
    extra: JsonObject = {}
    for number, file in enumerate(sorted(order.files, key=lambda file: file.rank)):
        stored = StoredFile(name=file.name, bytes=file.bytes, checksum=file.checksum)
        try:
            header = ShardFile(draft.uri, stored).header()
        except CheckpointError as error:
            raise CheckpointError(f"{draft.uri}: {error}: do all hosts write to the same folder?") from error
        extra = header.extra if number == 0 else extra
        written.append(WrittenShard(file=stored, begin=file.data_offset, tensors=header.tensors))
    fence = max(order.attempt, fence)
    manifests.claim(store, order.uri, run_id=run_id, attempt=fence, on_rebuilt=_say, nonce_of=nonce_of)
    manifest = draft.finish(store, written, extra=extra, fence=fence, name_prefix=_FLUSHED)
    problem = manifests.missing(manifest)
    if problem is not None:
        raise CheckpointError(f"{manifest.uri}: {problem}")
    manifests.commit(store, manifest, on_rebuilt=_say, nonce_of=nonce_of)
    return FlushCommitted(step=order.step, attempt=order.attempt, uri=manifest.uri, bytes=manifest.bytes)


def _say(rebuilt: str) -> None:
    """Into this process's output: no rank is there to log an event."""
    print(rebuilt, file=sys.stderr, flush=True)


def _draft(order: FlushSnapshots | CommitFlushed, run_id: str) -> CheckpointDraft:
    return CheckpointDraft(
        directory=order.uri, run_id=run_id, step=order.step, attempt=order.attempt,
        layout=Layout.from_key(order.layout),
    )  # fmt: skip


def _committed(order: FlushSnapshots | CommitFlushed) -> Manifest | None:
    """The checkpoint of this version, by a rank's save or an earlier flush; None: there is none."""
    prefix = manifests.step_prefix(order.step, order.attempt)
    for manifest in manifests.committed(open_store(), order.uri):
        if (manifest.step, manifest.prefix) == (order.step, prefix) and manifests.missing(manifest) is None:
            return manifest
    return None


def _shards(order: FlushSnapshots, memory: Path, run_id: str) -> list[_Shard]:
    """What to write: per rank the boxes that no earlier rank has."""
    written: set[tuple[str, tuple[int, ...]]] = set()
    result = []
    for item in order.ranks:
        copy = item.copy
        name = ring_of(copy)
        ring = Ring.open(memory / name)
        version = ring.find(order.step, order.attempt)
        if version is None:
            raise CheckpointError(f"the snapshot of step {order.step} of rank {item.rank} is no longer there")
        try:
            header = ring.shard_header()
        except CheckpointError as error:
            raise SnapshotNotIntact(f"{name}: {error}", copies=(copy,)) from error
        if (header.run_id, header.layout.key) != (run_id, order.layout):
            raise SnapshotNotIntact(f"{name} is a snapshot of run {header.run_id}", copies=(copy,))
        in_slot = tuple(box for box in header.tensors if box.bytes and (box.name, box.offsets) not in written)
        written |= {(box.name, box.offsets) for box in in_slot}
        in_file = shards.pack((box.name, box.dtype, box.global_shape, box.offsets, box.shape) for box in in_slot)
        result.append(
            _Shard(
                rank=item.rank, copy=copy, ring=ring, version=version, in_slot=in_slot, in_file=in_file,
                extra=header.extra,
            )
        )  # fmt: skip
    return result


def _parts(preamble: bytes, shard: _Shard) -> Iterator[bytes | memoryview]:
    """The file's bytes in pieces: the slot's boxes where ``pack`` placed them."""
    yield preamble
    slot, at = shard.ring.slot(shard.version.slot), 0
    for source, target in zip(shard.in_slot, shard.in_file, strict=True):
        yield bytes(target.byte_offset - at)
        yield slot[source.byte_offset : source.byte_offset + source.bytes]
        at = target.byte_offset + target.bytes
