"""Shards: one rank's tensors as bytes, described by a JSON header. No torch, no pickle.

The same header describes a file of a checkpoint, a snapshot in a host's memory and what a peer sends.

::

    MUSTRSH1 | header bytes (uint64, little-endian) | header (JSON) | zeros to 64 bytes | tensors' bytes

A tensor here is a box of a global tensor: ``offsets`` and ``shape`` within ``global_shape``, row-major,
little-endian. ``byte_offset`` counts from the start of the tensors' bytes, 64-byte aligned.
"""

from __future__ import annotations

import json
import math
import re
import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from muster.core.errors import CheckpointError
from muster.core.types import Layout

MAGIC = b"MUSTRSH1"
ALIGN_BYTES = 64
MAX_HEADER_BYTES = 1 << 30
_FIXED = struct.Struct("<8sQ")
_OWNED = re.compile(r"rank(\d+)(?:\.|$)")

ITEM_BYTES: Mapping[str, int] = {
    "float64": 8, "float32": 4, "float16": 2, "bfloat16": 2, "int64": 8, "int32": 4, "int16": 2, "int8": 1,
    "uint8": 1, "bool": 1, "float8_e4m3fn": 1, "float8_e5m2": 1, "complex64": 8, "complex128": 16,
}  # fmt: skip
"""Bytes an element, by torch's name of the type without ``torch.``."""


def owner_of(name: str) -> int | None:
    """The rank whose own a tensor is, by its name (``rank3.loader.place``); None: it is the whole world's."""
    result = _OWNED.match(name)
    return int(result[1]) if result else None


@dataclass(frozen=True, kw_only=True)
class Chunk:
    """A box of one tensor, and where its bytes are."""

    name: str
    dtype: str
    global_shape: tuple[int, ...]
    offsets: tuple[int, ...]
    shape: tuple[int, ...]
    byte_offset: int

    @property
    def bytes(self) -> int:
        return math.prod(self.shape) * ITEM_BYTES[self.dtype]


@dataclass(frozen=True, kw_only=True)
class ShardHeader:
    """What a shard's bytes are. ``step`` and ``attempt`` are -1 where they are stored elsewhere (a ring's stamp)."""

    rank: int
    layout: Layout
    tensors: tuple[Chunk, ...]
    step: int = -1
    attempt: int = -1
    run_id: str = ""
    extra: Mapping[str, Any] = field(default_factory=dict)


def pack(boxes: Iterable[tuple[str, str, Sequence[int], Sequence[int], Sequence[int]]]) -> tuple[Chunk, ...]:
    """Lay boxes (name, dtype, global shape, offsets, shape) one behind the other, each aligned."""
    position, chunks = 0, []
    for name, dtype, global_shape, offsets, shape in boxes:
        if dtype not in ITEM_BYTES:
            raise CheckpointError(f"{name}: tensors of type {dtype} cannot be saved")
        chunk = Chunk(
            name=name,
            dtype=dtype,
            global_shape=tuple(map(int, global_shape)),
            offsets=tuple(map(int, offsets)),
            shape=tuple(map(int, shape)),
            byte_offset=position,
        )
        chunks.append(chunk)
        position = _aligned(position + chunk.bytes)
    return tuple(chunks)


def encode_header(header: ShardHeader) -> bytes:
    """The header's JSON alone (what a ring file keeps)."""
    result = {
        "run_id": header.run_id,
        "attempt": header.attempt,
        "step": header.step,
        "rank": header.rank,
        "layout": header.layout.sizes,
        "extra": dict(header.extra),
        "tensors": [chunk_to_json(chunk) for chunk in header.tensors],
    }
    return json.dumps(result, separators=(",", ":"), allow_nan=False).encode()


def decode_header(data: bytes | bytearray | memoryview) -> ShardHeader:
    """The inverse of ``encode_header``; every box is checked. Raises CheckpointError."""
    try:
        result = json.loads(bytes(data))
        return ShardHeader(
            run_id=result["run_id"],
            attempt=int(result["attempt"]),
            step=int(result["step"]),
            rank=int(result["rank"]),
            layout=Layout.of(result["layout"]),
            extra=result["extra"],
            tensors=tuple(chunk_from_json(item) for item in result["tensors"]),
        )
    except (ValueError, TypeError, KeyError) as error:
        raise CheckpointError(f"not a shard header: {error}") from error


def preamble(header: ShardHeader) -> bytes:
    """The bytes before the tensors' bytes in a file."""
    text = encode_header(header)
    start = _FIXED.pack(MAGIC, len(text)) + text
    return start + b"\0" * (_aligned(len(start)) - len(start))


def preamble_bytes(start: bytes) -> tuple[int, int]:
    """From a file's first 16 bytes: (where the header ends, where the tensors' bytes begin).

    Raises CheckpointError.
    """
    if len(start) < _FIXED.size:
        raise CheckpointError("not a shard: too short")
    magic, length = _FIXED.unpack_from(start)
    if magic != MAGIC or length > MAX_HEADER_BYTES:
        raise CheckpointError("not a shard: its first bytes are wrong")
    end = _FIXED.size + length
    return end, _aligned(end)


def chunk_to_json(chunk: Chunk) -> list[Any]:
    """One entry of a header's ``tensors``."""
    return [chunk.name, chunk.dtype, chunk.global_shape, chunk.offsets, chunk.shape, chunk.byte_offset]


def chunk_from_json(item: Sequence[Any]) -> Chunk:
    """One entry of a header's ``tensors``, checked. Raises ValueError or TypeError."""
    name, dtype, global_shape, offsets, shape, byte_offset = item
    chunk = Chunk(
        name=str(name),
        dtype=str(dtype),
        global_shape=tuple(global_shape),
        offsets=tuple(offsets),
        shape=tuple(shape),
        byte_offset=int(byte_offset),
    )
    inside = len(chunk.global_shape) == len(chunk.offsets) == len(chunk.shape) and all(
        isinstance(number, int) and number >= 0 for number in (*chunk.offsets, *chunk.shape, chunk.byte_offset)
    )
    if not inside or any(o + n > g for o, n, g in zip(chunk.offsets, chunk.shape, chunk.global_shape, strict=True)):
        raise ValueError(f"{chunk.name}: a box outside its tensor")
    if chunk.dtype not in ITEM_BYTES:
        raise ValueError(f"{chunk.name}: unknown type {chunk.dtype!r}")
    return chunk


def _aligned(size: int) -> int:
    return -(-size // ALIGN_BYTES) * ALIGN_BYTES
