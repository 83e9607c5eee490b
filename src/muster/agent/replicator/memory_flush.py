"""Snapshots in memory as a checkpoint on the disk or in the bucket, without any rank: it may be dead or stopped.

Each host's mover writes what its host holds of one version (``flush``); when all have, one mover writes the index
and the marker (``commit_flushed``). The files lie under the version's prefix, with names of their own: a save of the
same step that a rank left half done is never mixed with them.
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
_AT_A_TIME = 4
"""Shards that one host writes side by side: a bucket gives more to several streams, a disk suffers little."""


@dataclass(frozen=True, kw_only=True)
class _Share:
    """One rank's part of the version: what of it this host writes, and from where."""

    rank: int
    ring: Ring
    version: Version
    there: tuple[Chunk, ...]
    """The boxes in the ring's slot."""
    here: tuple[Chunk, ...]
    """The same boxes as the file will have them."""
    extra: Mapping[str, Any]


def flush(order: Mapping[str, Any], memory: Path) -> dict[str, Any]:
    """Write this host's shards of the version that ``order`` names (step, attempt, layout, ranks, uri, run_id).

    Each of ``ranks`` is {rank, tier, held_as}. The answer's ``files`` are {rank, name, bytes, crc32, table}; a box that
    several of the ranks hold is written once. A version that is committed already is not written again.

    Raises:
        CheckpointError: a version is not there, is not what was sealed, or was overwritten meanwhile (ranks train).
        AccessError, BackendError: it cannot be written.
    """
    step, attempt, layout = int(order["step"]), int(order["attempt"]), Layout.from_key(str(order["layout"]))
    shares = _shares(order, memory, step, attempt)
    if _committed(str(order["uri"]), step, attempt) is not None:
        return {"files": []}
    folder = uris.join(str(order["uri"]), manifests.step_prefix(step, attempt))

    def write(share: _Share) -> dict[str, Any]:
        verify_checksum(share.ring, share.version)  # memory is read far faster than any disk or bucket is written
        name = f"{_FLUSHED}{shard_file(share.rank)}"
        preamble = shards.preamble(
            shards.ShardHeader(
                run_id=str(order["run_id"]), attempt=attempt, step=step, rank=share.rank, layout=layout,
                extra=share.extra, tensors=share.here,
            )
        )  # fmt: skip
        count, crc = write_shard(uris.join(folder, name), _parts(preamble, share))
        if share.ring.find(step, attempt) != share.version:
            raise CheckpointError(f"the snapshot of step {step} of rank {share.rank} was overwritten meanwhile")
        # What the tensors are stands in the file's own header: too much for a message where models are large.
        return {"rank": share.rank, "name": name, "bytes": count, "crc32": crc, "table": {"begin": len(preamble)}}

    with ThreadPoolExecutor(_AT_A_TIME) as pool:
        return {"files": list(pool.map(write, shares))}


def commit_flushed(order: Mapping[str, Any], _memory: Path) -> dict[str, Any]:
    """Make a checkpoint of what all hosts have flushed: {uri, bytes}. The same order twice makes one.

    ``order``: step, attempt, layout, uri, run_id, ``files`` (of all hosts) and ``fence``: the attempt in whose name it
    is committed, the newest that this host knows. An attempt begins where an older one's snapshots ended, so it
    may hold the folder already while the newest version is still its predecessor's.

    Raises:
        CheckpointError: a file is missing or short (hosts without a common folder), or tensors are not whole.
        ConflictError: a newer attempt holds the folder.
    """
    store, directory, run_id = open_store(), str(order["uri"]), str(order["run_id"])
    step, attempt = int(order["step"]), int(order["attempt"])
    prefix = manifests.step_prefix(step, attempt)
    there = _committed(directory, step, attempt)
    if there is not None:
        return {"uri": there.uri, "bytes": there.bytes}
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
    found = Manifest(
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
    problem = manifests.missing(found)
    if problem is not None:
        raise CheckpointError(f"{found.uri}: {problem}")
    manifests.commit(store, found)
    return {"uri": found.uri, "bytes": found.bytes}


def _header(uri: str) -> shards.ShardHeader:
    """Of a shard file that another host wrote. Raises CheckpointError."""
    try:
        end, _ = shards.preamble_bytes(blobs.read_range(uri, 0, 16))
        return shards.decode_header(blobs.read_range(uri, 16, end))
    except FileNotFoundError as error:
        raise CheckpointError(f"{uri} is missing: do all hosts write to the same folder?") from error


def _committed(directory: str, step: int, attempt: int) -> Manifest | None:
    """The checkpoint of this very version, by a rank's save or an earlier flush, where it stands."""
    prefix = manifests.step_prefix(step, attempt)
    for manifest in manifests.committed(open_store(), directory):
        if (manifest.step, manifest.prefix) == (step, prefix) and manifests.missing(manifest) is None:
            return manifest
    return None


def _shares(order: Mapping[str, Any], memory: Path, step: int, attempt: int) -> list[_Share]:
    """What is to be written: per rank the boxes that no rank before it has."""
    written: set[tuple[str, tuple[int, ...]]] = set()
    found = []
    for item in order["ranks"]:
        rank, tier = int(item["rank"]), "own" if item["tier"] == "memory" else "peer"
        ring = Ring.open(memory / file_name(tier, str(order["layout"]), int(item.get("held_as", rank))))
        version = ring.find(step, attempt)
        if version is None:
            raise CheckpointError(f"the snapshot of step {step} of rank {rank} is no longer there")
        header = json.loads(ring.header)
        boxes = boxes_of_table(header["tensors"])
        there = tuple(box for box in boxes if (box.name, box.offsets) not in written)
        written |= {(box.name, box.offsets) for box in there}
        packed = shards.pack((box.name, box.dtype, box.global_shape, box.offsets, box.shape) for box in there)
        extra = header.get("extra", {})
        found.append(_Share(rank=rank, ring=ring, version=version, there=there, here=packed, extra=extra))
    return found


def _parts(preamble: bytes, share: _Share) -> Iterator[bytes | memoryview]:
    """The file's bytes, piece by piece: the slot's boxes where ``pack`` put them."""
    yield preamble
    slot, at = share.ring.slot(share.version.slot), 0
    for there, here in zip(share.there, share.here, strict=True):
        yield bytes(here.byte_offset - at)
        yield slot[there.byte_offset : there.byte_offset + there.bytes]
        at = here.byte_offset + here.bytes
