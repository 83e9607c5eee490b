"""A checkpoint's index: which file holds which box of which tensor, so that a reader opens one small file. No torch."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from muster.checkpoint_format.decoding import check_format, damage_as
from muster.checkpoint_format.shards import Chunk, StoredChunk, checked_chunk, stored_chunk
from muster.core import typed_json
from muster.core.typed_json import Record

INDEX = "index.json"
FORMAT = 2

Entry = tuple[str, int, tuple[Chunk, ...]]
"""A file, where its tensors' bytes begin in it, and what they are."""


def shard_file(rank: int) -> str:
    """Name of the file that holds a rank's share."""
    return f"rank-{rank:05d}.shard"


@dataclass(frozen=True, kw_only=True)
class _File(Record):
    name: str
    begin: int
    tensors: tuple[StoredChunk, ...]


@dataclass(frozen=True, kw_only=True)
class _Index(Record):
    format: int
    files: tuple[_File, ...]


def encode_index(files: Sequence[Entry]) -> bytes:
    """The index's bytes. Their checksum is in the manifest."""
    stored = tuple(
        _File(name=name, begin=begin, tensors=tuple(map(stored_chunk, chunks))) for name, begin, chunks in files
    )
    return typed_json.encode(_Index(format=FORMAT, files=stored))


def decode_index(data: bytes) -> list[Entry]:
    """The inverse of ``encode_index``, every box checked. Raises CheckpointError."""
    with damage_as("no index"):
        check_format(typed_json.parse_object(data).get("format"), reads=FORMAT, what="an index")
        index = typed_json.decode(_Index, data)
        return [(file.name, file.begin, tuple(map(checked_chunk, file.tensors))) for file in index.files]


def incomplete(files: Iterable[Sequence[Chunk]]) -> str | None:
    """Which tensor's boxes do not make up the whole of it, over all files; None when all do."""
    held: dict[str, dict[tuple[int, ...], int]] = defaultdict(dict)
    whole: dict[str, int] = {}
    for chunks in files:
        for chunk in chunks:
            held[chunk.name][chunk.offsets] = math.prod(chunk.shape)
            whole[chunk.name] = math.prod(chunk.global_shape)
    for name, boxes in held.items():
        if sum(boxes.values()) != whole[name]:
            return f"{name}: {sum(boxes.values())} of its {whole[name]} elements"
    return None if held else "no tensors"
