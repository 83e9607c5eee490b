"""Where a tensor's bytes come from: one shape for every tier.

A tier hands over ``Shard``s (what the bytes are, and a way to get some of them); ``checkpoint.shards``
reads tensors by name and slice from any set of them, written in any layout.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from muster.checkpoint_format import shards
from muster.checkpoint_format.manifest import Manifest, read_index
from muster.checkpoint_format.shard_file import ShardFile
from muster.checkpoint_format.tensor_index import decode_index
from muster.core.errors import CheckpointError
from muster.storage import uris

Read = Callable[[int, int], bytes | bytearray | memoryview]
"""Verified bytes ``start`` to ``stop`` of a shard, counted from the first tensor's. Raises CheckpointError."""


@dataclass(frozen=True)
class Shard:
    """What a shard holds, and where to get it."""

    tensors: tuple[shards.Chunk, ...]
    read: Read
    name: str = "shard"
    expect: Callable[[Sequence[tuple[int, int]]], None] = lambda ranges: None
    """Called with the (start, stop) that will be read, in this order: a source across a network gets many at a time."""


def open_checkpoint(manifest: Manifest) -> list[Shard]:
    """The shards of a committed checkpoint, from its index. Raises CheckpointError.

    Every byte that is read from them is verified first.
    """
    known = {item.name: item for item in manifest.files}
    uri = uris.join(manifest.uri, manifest.index.name)
    try:
        entries = decode_index(read_index(manifest))
    except CheckpointError as error:
        raise CheckpointError(f"{uri}: {error}") from error
    opened = []
    for name, begin, chunks in entries:
        if name not in known:
            raise CheckpointError(f"{uri} names {name!r}, which the manifest does not")
        file = ShardFile(manifest.uri, known[name])
        opened.append(Shard(chunks, partial(_read, file, begin), name))
    return opened


def _read(file: ShardFile, begin: int, start: int, stop: int) -> memoryview:
    return file.read(begin + start, begin + stop)
