"""A checkpoint's index: which file holds which box of which tensor, so that a reader opens one small file. No torch."""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from muster.checkpoint_format.shards import Chunk, chunk_from_json, chunk_to_json
from muster.core.errors import CheckpointError

INDEX = "index.json"
INDEX_FORMAT = 1

#: Of an entry in a snapshot ring's header, in the order of ``chunk_to_json``.
TABLE_KEYS = ("name", "dtype", "global_shape", "offsets", "local_shape", "byte_offset")

Entry = tuple[str, int, tuple[Chunk, ...]]
"""A file, where its tensors' bytes begin in it, and what they are."""


def shard_file(rank: int) -> str:
    """Name of the file that holds a rank's share."""
    return f"rank-{rank:05d}.shard"


def index_file(names: Iterable[str]) -> str:
    """The index among a checkpoint's files. Raises CheckpointError when there is none."""
    for name in names:
        if name.endswith(INDEX):
            return name
    raise CheckpointError(f"{INDEX} is missing")


def encode_index(files: Sequence[Entry]) -> bytes:
    """The index's bytes."""
    result = [
        {"name": name, "begin": begin, "tensors": [chunk_to_json(chunk) for chunk in chunks]}
        for name, begin, chunks in files
    ]
    return json.dumps({"format": INDEX_FORMAT, "files": result}, separators=(",", ":")).encode()


def decode_index(data: bytes) -> list[Entry]:
    """The inverse of ``encode_index``, every box checked. Raises CheckpointError."""
    try:
        result = json.loads(data)
        if result["format"] != INDEX_FORMAT:
            raise ValueError(f"unknown format {result['format']!r}")
        return [
            (str(item["name"]), int(item["begin"]), tuple(chunk_from_json(entry) for entry in item["tensors"]))
            for item in result["files"]
        ]
    except (ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"no index: {error}") from error


def boxes_of_table(table: Iterable[Mapping[str, Any]]) -> list[Chunk]:
    """The boxes in a snapshot ring's header, empty ones left out. Raises CheckpointError."""
    try:
        result = [chunk_from_json([entry[key] for key in TABLE_KEYS]) for entry in table]
    except (ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"not a snapshot's table: {error}") from error
    return [chunk for chunk in result if math.prod(chunk.shape)]


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
