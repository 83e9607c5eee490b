"""Where a tensor's bytes come from: one protocol for every tier.

A tier hands over ``Shard``s (what the bytes are, and a way to get some of them); ``checkpoint.shards``
reads tensors by name and slice from any set of them, whatever layout they were written in.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from muster.checkpoint_format import shards
from muster.checkpoint_format.manifest import Manifest
from muster.checkpoint_format.tensor_index import decode_index, index_file
from muster.core.errors import CheckpointError
from muster.storage import uris
from muster.storage.store import blobs


class Source(Protocol):
    """Random access to the tensors' bytes of one shard."""

    def read(self, start: int, stop: int) -> bytes | bytearray | memoryview:
        """Bytes ``start`` to ``stop``, counted from the first tensor's. Raises CheckpointError when short."""
        ...


@dataclass(frozen=True)
class Shard:
    """What a shard holds, and where to get it."""

    tensors: tuple[shards.Chunk, ...]
    source: Source
    name: str = "shard"


@dataclass(frozen=True)
class BufferSource:
    """Bytes in memory: a ring's slot, what a peer sent."""

    data: memoryview
    """The tensors' bytes alone, without the header."""

    def read(self, start: int, stop: int) -> memoryview:
        if stop > len(self.data):
            raise CheckpointError(f"shard in memory ends at {len(self.data)}, before {stop}")
        return self.data[start:stop]


@dataclass(frozen=True)
class BlobSource:
    """A file on a disk or in a bucket, read by ranges."""

    uri: str
    begin: int
    """Where the tensors' bytes begin in it."""

    def read(self, start: int, stop: int) -> bytes:
        try:
            data = blobs.read_range(self.uri, self.begin + start, self.begin + stop)
        except FileNotFoundError as error:
            raise CheckpointError(f"{self.uri} is missing") from error
        if len(data) != stop - start:
            raise CheckpointError(f"{self.uri} is truncated: {len(data)} bytes at {start}, not {stop - start}")
        return data


def open_buffer(data: bytes | bytearray | memoryview, *, name: str = "shard") -> Shard:
    """A whole shard (header and bytes) in memory. Raises CheckpointError."""
    header, body = shards.split(memoryview(data))
    return Shard(tensors=header.tensors, source=BufferSource(body), name=name)


def open_header(header: bytes, data: memoryview, *, name: str = "shard") -> Shard:
    """A shard whose header is apart from its bytes (a ring). Raises CheckpointError."""
    result = shards.decode_header(header)
    if len(data) < result.data_bytes:
        raise CheckpointError(f"{name}: {len(data)} bytes, its header says {result.data_bytes}")
    return Shard(tensors=result.tensors, source=BufferSource(data), name=name)


def open_blob(uri: str) -> Shard:
    """A shard file. Reads its header alone. Raises CheckpointError."""
    try:
        end, begin = shards.preamble_bytes(blobs.read_range(uri, 0, 16))
        header = shards.decode_header(blobs.read_range(uri, 16, end))
        if blobs.size(uri) < begin + header.data_bytes:
            raise CheckpointError(f"{uri} is truncated")
    except FileNotFoundError as error:
        raise CheckpointError(f"{uri} is missing") from error
    return Shard(tensors=header.tensors, source=BlobSource(uri, begin), name=uris.name(uri))


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
        opened.append(Shard(tensors=chunks, source=BlobSource(uris.join(manifest.uri, name), begin), name=name))
    return opened
