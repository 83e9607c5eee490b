"""Where a tensor's bytes come from: one shape for every tier.

A tier hands over ``Shard``s (what the bytes are, and a way to get some of them); ``checkpoint.shards``
reads tensors by name and slice from any set of them, whatever layout they were written in.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from muster.checkpoint_format import shards
from muster.checkpoint_format.manifest import Manifest
from muster.checkpoint_format.tensor_index import decode_index, index_file
from muster.core.errors import CheckpointError
from muster.storage import uris
from muster.storage.store import blobs

Read = Callable[[int, int], bytes | bytearray | memoryview]
"""Bytes ``start`` to ``stop`` of a shard, counted from the first tensor's. Raises CheckpointError when short."""


@dataclass(frozen=True)
class Shard:
    """What a shard holds, and where to get it."""

    tensors: tuple[shards.Chunk, ...]
    read: Read
    name: str = "shard"


def _read_blob(uri: str, begin: int, start: int, stop: int) -> bytes:
    """From a file on a disk or in a bucket, in which the tensors' bytes ``begin`` there."""
    try:
        data = blobs.read_range(uri, begin + start, begin + stop)
    except FileNotFoundError as error:
        raise CheckpointError(f"{uri} is missing") from error
    if len(data) != stop - start:
        raise CheckpointError(f"{uri} is truncated: {len(data)} bytes at {start}, not {stop - start}")
    return data


def open_checkpoint(manifest: Manifest) -> list[Shard]:
    """The shards of a committed checkpoint, from its index. Raises CheckpointError."""
    known = {item.name for item in manifest.files}
    uri = uris.join(manifest.uri, index_file(item.name for item in manifest.files))
    try:
        with blobs.reading(uri) as file:
            data = file.read()
    except FileNotFoundError as error:
        raise CheckpointError(f"{uri} is missing") from error
    try:
        entries = decode_index(data)
    except CheckpointError as error:
        raise CheckpointError(f"{uri}: {error}") from error
    opened = []
    for name, begin, chunks in entries:
        if name not in known:
            raise CheckpointError(f"{uri} names {name!r}, which the manifest does not")
        opened.append(Shard(chunks, partial(_read_blob, uris.join(manifest.uri, name), begin), name))
    return opened
