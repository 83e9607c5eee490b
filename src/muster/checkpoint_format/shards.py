"""Shards: one rank's tensors as bytes, described by a JSON header. No torch, no pickle.

The same header describes a file of a checkpoint, a snapshot in a host's memory and what a peer sends. A file
(``checkpoint_format.shard_file``) is

::

    MUSTRSH2 | header bytes (uint64, little-endian) | header (JSON) | zeros to 64 bytes | tensors' bytes | blocks' sums

A tensor here is a box of a global tensor: ``offsets`` and ``shape`` within ``global_shape``, row-major,
little-endian. ``byte_offset`` counts from the start of the tensors' bytes, 64-byte aligned.
"""

from __future__ import annotations

import math
import re
import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from muster.checkpoint_format.decoding import check_format, damage_as
from muster.core import typed_json
from muster.core.errors import CheckpointError
from muster.core.typed_json import JsonObject, Record
from muster.core.types import Layout

FORMAT = 2
_MAGIC = b"MUSTRSH"
ALIGN_BYTES = 64
MAX_HEADER_BYTES = 1 << 30
_FIXED = struct.Struct("<8sQ")
_OWNED = re.compile(r"(?:rank|replica)(\d+)(?:\.|$)")

ITEM_BYTES: Mapping[str, int] = {
    "float64": 8, "float32": 4, "float16": 2, "bfloat16": 2, "int64": 8, "int32": 4, "int16": 2, "int8": 1,
    "uint8": 1, "bool": 1, "float8_e4m3fn": 1, "float8_e5m2": 1, "complex64": 8, "complex128": 16,
}  # fmt: skip
"""Bytes an element, by torch's name of the type without ``torch.``."""


def owner_of(name: str) -> int | None:
    """The rank or replica whose own a tensor is, by its name (``rank3.loader.place``, ``replica1.model.norm.weight``);
    None: it is the whole world's."""
    result = _OWNED.match(name)
    return int(result[1]) if result else None


def of_replica(name: str, replica: int) -> str:
    """The name that a replica's own tensor has in another replica; any other name stays."""
    return re.sub(r"^replica\d+\.", f"replica{replica}.", name)


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
    extra: JsonObject = field(default_factory=dict)


StoredChunk = tuple[str, str, tuple[int, ...], tuple[int, ...], tuple[int, ...], int]
"""A chunk as headers and indexes hold it: name, dtype, global shape, offsets, shape, byte offset."""


@dataclass(frozen=True, kw_only=True)
class _StoredHeader(Record):
    run_id: str
    attempt: int
    step: int
    rank: int
    layout: Mapping[str, int]
    extra: JsonObject
    tensors: tuple[StoredChunk, ...]


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
    stored = _StoredHeader(
        run_id=header.run_id,
        attempt=header.attempt,
        step=header.step,
        rank=header.rank,
        layout=header.layout.sizes,
        extra=header.extra,
        tensors=tuple(map(stored_chunk, header.tensors)),
    )
    return typed_json.encode(stored)


def decode_header(data: bytes) -> ShardHeader:
    """The inverse of ``encode_header``; every box is checked. Raises CheckpointError."""
    with damage_as("not a shard header"):
        stored = typed_json.decode(_StoredHeader, data)
        return ShardHeader(
            run_id=stored.run_id,
            attempt=stored.attempt,
            step=stored.step,
            rank=stored.rank,
            layout=Layout.of(stored.layout),
            extra=stored.extra,
            tensors=tuple(map(checked_chunk, stored.tensors)),
        )


def prepare_reading() -> None:
    """Build now what reads a header, which otherwise the first one does (5 ms)."""
    typed_json.prepare(_StoredHeader)


def preamble(header: ShardHeader) -> bytes:
    """The bytes before the tensors' bytes in a file."""
    text = encode_header(header)
    start = _FIXED.pack(_MAGIC + b"%d" % FORMAT, len(text)) + text
    return start + b"\0" * (_aligned(len(start)) - len(start))


def preamble_bytes(start: bytes) -> tuple[int, int]:
    """From a file's first 16 bytes: (where the header ends, where the tensors' bytes begin).

    Raises CheckpointError.
    """
    if len(start) < _FIXED.size:
        raise CheckpointError("not a shard: too short")
    magic, length = _FIXED.unpack_from(start)
    check_magic(magic, _MAGIC, reads=FORMAT, what="a shard")
    if length > MAX_HEADER_BYTES:
        raise CheckpointError("not a shard: its first bytes are wrong")
    end = _FIXED.size + length
    return end, _aligned(end)


def check_magic(found: bytes, name: bytes, *, reads: int, what: str) -> None:
    """Raise CheckpointError unless ``found`` is ``name`` and the digit of the format that this version reads."""
    if found[:-1] != name or not found[-1:].isdigit():
        raise CheckpointError(f"not {what}: its first bytes are wrong")
    check_format(int(found[-1:]), reads=reads, what=what)


def stored_chunk(chunk: Chunk) -> StoredChunk:
    """One entry of a header's or an index's ``tensors``."""
    return (chunk.name, chunk.dtype, chunk.global_shape, chunk.offsets, chunk.shape, chunk.byte_offset)


def checked_chunk(stored: StoredChunk) -> Chunk:
    """The inverse of ``stored_chunk``. Raises ValueError where it is no box of its tensor."""
    name, dtype, global_shape, offsets, shape, byte_offset = stored
    chunk = Chunk(
        name=name, dtype=dtype, global_shape=global_shape, offsets=offsets, shape=shape, byte_offset=byte_offset
    )
    inside = len(global_shape) == len(offsets) == len(shape) and min((*offsets, *shape, byte_offset)) >= 0
    if not inside or any(o + n > g for o, n, g in zip(offsets, shape, global_shape, strict=True)):
        raise ValueError(f"{name}: a box outside its tensor")
    if dtype not in ITEM_BYTES:
        raise ValueError(f"{name}: unknown type {dtype!r}")
    return chunk


def check_places(chunks: Iterable[Chunk], size: int) -> None:
    """Raise CheckpointError where boxes overlap, or do not lie in ``size`` bytes."""
    end = 0
    for chunk in sorted(chunks, key=lambda chunk: chunk.byte_offset):
        if not chunk.bytes:
            continue
        if chunk.byte_offset < end or chunk.byte_offset + chunk.bytes > size:
            raise CheckpointError(f"{chunk.name}: its bytes overlap another tensor's, or lie outside")
        end = chunk.byte_offset + chunk.bytes


def _aligned(size: int) -> int:
    return -(-size // ALIGN_BYTES) * ALIGN_BYTES
