"""Snapshots in memory as a checkpoint on the disk or in the bucket, without any rank: it may be dead or stopped.

Each host's replicator writes what its host holds of one version (``flush``); when all have, one replicator writes the
index and the marker (``commit_flushed``). The files are under the version's prefix, with names of their own: they never
mix with a save of the same step that a rank left incomplete.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import muster
from muster.checkpoint_format import manifest as manifests
from muster.checkpoint_format import shards
from muster.checkpoint_format.manifest import Manifest, StoredFile
from muster.checkpoint_format.shard_file import write_shard
from muster.checkpoint_format.shards import Chunk
from muster.checkpoint_format.snapshot_checksum import verify_checksum
from muster.checkpoint_format.snapshot_ring import Ring, Version, file_name
from muster.checkpoint_format.tensor_index import INDEX, boxes_of_table, encode_index, incomplete, shard_file
from muster.core.errors import CheckpointError
from muster.core.types import Layout
from muster.storage import uris
from muster.storage.store import blobs, open_store

_FLUSHED = "flushed-"
_PARALLEL_SHARDS = 4
"""Shards that one host writes in parallel: faster on a bucket, little slower on a disk."""


@dataclass(frozen=True, kw_only=True)
class _Shard:
    """One rank's part of the version: what this host writes of it, and from where."""

    rank: int
    ring: Ring
    version: Version
    in_slot: tuple[Chunk, ...]
    """The boxes in the ring's slot."""
    in_file: tuple[Chunk, ...]
    """The same boxes as the file will have them."""
    extra: Mapping[str, Any]


def flush(order: Mapping[str, Any], memory: Path) -> dict[str, Any]:
    """Write this host's shards of the version that ``order`` names (step, attempt, layout, ranks, uri, run_id).

    Each of ``ranks`` is {rank, tier, held_as}. The answer's ``files`` are {rank, name, bytes, crc32, table}; a box that
    several of the ranks hold is written once. A version that is committed already is not written again.

    Raises:
        CheckpointError: a version is missing, fails its checksum, or was overwritten meanwhile (ranks train).
        AccessError, BackendError: it cannot be written.
    """
    step, attempt, layout = int(order["step"]), int(order["attempt"]), Layout.from_key(str(order["layout"]))
    ours = _shards(order, memory, step, attempt)
    if _committed(str(order["uri"]), step, attempt) is not None:
        return {"files": []}
    folder = uris.join(str(order["uri"]), manifests.step_prefix(step, attempt))

    def write(shard: _Shard) -> dict[str, Any]:
        verify_checksum(shard.ring, shard.version)  # memory is read far faster than any disk or bucket is written
        name = f"{_FLUSHED}{shard_file(shard.rank)}"
        preamble = shards.preamble(
            shards.ShardHeader(
                run_id=str(order["run_id"]), attempt=attempt, step=step, rank=shard.rank, layout=layout,
                extra=shard.extra, tensors=shard.in_file,
            )
        )  # fmt: skip
        count, crc = write_shard(uris.join(folder, name), _parts(preamble, shard))
        if shard.ring.find(step, attempt) != shard.version:
            raise CheckpointError(f"the snapshot of step {step} of rank {shard.rank} was overwritten meanwhile")
        # The tensors' table is in the file's own header: too large for a message where models are large.
        return {"rank": shard.rank, "name": name, "bytes": count, "crc32": crc, "table": {"begin": len(preamble)}}

    with ThreadPoolExecutor(_PARALLEL_SHARDS) as pool:
        return {"files": list(pool.map(write, ours))}


def commit_flushed(order: Mapping[str, Any], _memory: Path) -> dict[str, Any]:
    """Make a checkpoint of what all hosts have flushed: {uri, bytes}. The same order twice makes one.

    ``order``: step, attempt, layout, uri, run_id, ``files`` (of all hosts) and ``fence``: the attempt in whose name it
    is committed, the newest that this host knows. An attempt starts from an older one's snapshots, so it may
    hold the folder while the newest version is still its predecessor's.

    Raises:
        CheckpointError: a file is missing or short (hosts without a common folder), or tensors are incomplete.
        ConflictError: a newer attempt holds the folder.
    """
    store, directory, run_id = open_store(), str(order["uri"]), str(order["run_id"])
    step, attempt = int(order["step"]), int(order["attempt"])
    prefix = manifests.step_prefix(step, attempt)
    existing = _committed(directory, step, attempt)
    if existing is not None:
        return {"uri": existing.uri, "bytes": existing.bytes}
    files = sorted(order["files"], key=lambda item: int(item["rank"]))
    headers = [_header(uris.join(directory, prefix, str(item["name"]))) for item in files]
    gap = incomplete(header.tensors for header in headers)
    if gap is not None:
        raise CheckpointError(f"the flushed shards of step {step} are not the whole state: {gap}")
    entries = [
        (str(item["name"]), int(item["table"]["begin"]), header.tensors)
        for item, header in zip(files, headers, strict=True)
        if header.tensors
    ]
    fence = max(attempt, int(order.get("fence", attempt)))
    manifests.claim(store, directory, run_id=run_id, attempt=fence)
    index = encode_index(entries)
    name = f"{_FLUSHED}{INDEX}"
    store.put(uris.join(directory, prefix, name), index)
    stored = [StoredFile(name=str(item["name"]), bytes=int(item["bytes"]), crc32=int(item["crc32"])) for item in files]
    stored.append(StoredFile(name=name, bytes=len(index), crc32=manifests.crc32(index)))
    manifest = Manifest(
        run_id=run_id,
        attempt=fence,
        step=step,
        layout=Layout.from_key(str(order["layout"])),
        prefix=prefix,
        files=tuple(stored),
        bytes=sum(item.bytes for item in stored),
        created_ns=time.time_ns(),
        version=muster.__version__,
        extra=headers[0].extra,
        directory=directory,
    )
    problem = manifests.missing(manifest)
    if problem is not None:
        raise CheckpointError(f"{manifest.uri}: {problem}")
    manifests.commit(store, manifest)
    return {"uri": manifest.uri, "bytes": manifest.bytes}


def _header(uri: str) -> shards.ShardHeader:
    """Of a shard file that another host wrote. Raises CheckpointError."""
    try:
        end, _ = shards.preamble_bytes(blobs.read_range(uri, 0, 16))
        return shards.decode_header(blobs.read_range(uri, 16, end))
    except FileNotFoundError as error:
        raise CheckpointError(f"{uri} is missing: do all hosts write to the same folder?") from error


def _committed(directory: str, step: int, attempt: int) -> Manifest | None:
    """The checkpoint of this version, by a rank's save or an earlier flush; None: there is none."""
    prefix = manifests.step_prefix(step, attempt)
    for manifest in manifests.committed(open_store(), directory):
        if (manifest.step, manifest.prefix) == (step, prefix) and manifests.missing(manifest) is None:
            return manifest
    return None


def _shards(order: Mapping[str, Any], memory: Path, step: int, attempt: int) -> list[_Shard]:
    """What to write: per rank the boxes that no earlier rank has."""
    written: set[tuple[str, tuple[int, ...]]] = set()
    result = []
    for item in order["ranks"]:
        rank, tier = int(item["rank"]), "own" if item["tier"] == "memory" else "peer"
        ring = Ring.open(memory / file_name(tier, str(order["layout"]), int(item.get("held_as", rank))))
        version = ring.find(step, attempt)
        if version is None:
            raise CheckpointError(f"the snapshot of step {step} of rank {rank} is no longer there")
        header = json.loads(ring.header)
        boxes = boxes_of_table(header["tensors"])
        in_slot = tuple(box for box in boxes if (box.name, box.offsets) not in written)
        written |= {(box.name, box.offsets) for box in in_slot}
        in_file = shards.pack((box.name, box.dtype, box.global_shape, box.offsets, box.shape) for box in in_slot)
        extra = header.get("extra", {})
        result.append(_Shard(rank=rank, ring=ring, version=version, in_slot=in_slot, in_file=in_file, extra=extra))
    return result


def _parts(preamble: bytes, shard: _Shard) -> Iterator[bytes | memoryview]:
    """The file's bytes in pieces: the slot's boxes where ``pack`` placed them."""
    yield preamble
    slot, at = shard.ring.slot(shard.version.slot), 0
    for source, target in zip(shard.in_slot, shard.in_file, strict=True):
        yield bytes(target.byte_offset - at)
        yield slot[source.byte_offset : source.byte_offset + source.bytes]
        at = target.byte_offset + target.bytes
