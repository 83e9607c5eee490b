"""A shard as a file on the disk or in the bucket: written once, and verified as it is read.

Behind the tensors' bytes lie the sums of the file's blocks (``checksum.BlockSums``); the checksum of these sums is the
file's, which the manifest holds. So a reader of any part verifies the very bytes that it uses.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from muster.checkpoint_format import shards
from muster.checkpoint_format.checksum import BLOCK_BYTES, SUM_BYTES, BlockSums, block_sum, checksum_of
from muster.checkpoint_format.shards import ShardHeader
from muster.core.errors import CheckpointError
from muster.core.typed_json import Record
from muster.core.types import Checksum
from muster.storage import uris
from muster.storage.store import blobs

_PIECE_BYTES = 16 << 20


@dataclass(frozen=True, kw_only=True)
class StoredFile(Record):
    """One file of a checkpoint."""

    name: str
    bytes: int
    checksum: Checksum
    """Of a shard: that of its blocks' sums. Of the index: that of its bytes."""


def write_shard(
    uri: str, parts: Iterable[bytes | bytearray | memoryview], *, still_needed: Callable[[], bool] = lambda: True
) -> StoredFile:
    """Write ``parts`` (a preamble and tensors' bytes) one behind the other as a new file. Durable when it returns.

    ``still_needed`` is asked before every piece: a share whose rank has died is not written to its end.

    Raises:
        AccessError, BackendError: it cannot be written.
        CheckpointError: ``still_needed`` returned false.
    """
    count, sums = 0, BlockSums()

    def write(data: memoryview) -> None:
        while len(data):
            data = data[file.write(data) :]

    with blobs.writing(uri) as file:
        for part in parts:
            data = memoryview(part)
            for start in range(0, len(data), _PIECE_BYTES):
                if not still_needed():
                    raise CheckpointError(f"{uri}: no longer needed")
                piece = data[start : start + _PIECE_BYTES]
                sums.update(piece)
                write(piece)
            count += len(data)
        end = sums.finish()
        write(memoryview(end))
    return StoredFile(name=uris.name(uri), bytes=count + len(end), checksum=checksum_of(end))


class ShardFile:
    """Reads a stored shard. What it returns has been verified.

    Raises (all methods):
        CheckpointError: the file is missing or truncated, or does not match its checksum.
        AccessError, BackendError: it cannot be read.
    """

    def __init__(self, folder: str, stored: StoredFile) -> None:
        self._uri, self._stored = uris.join(folder, stored.name), stored
        blocks = -(-stored.bytes // (BLOCK_BYTES + SUM_BYTES))
        self._content = stored.bytes - blocks * SUM_BYTES
        """Bytes before the sums."""
        self._sums = b""
        self._kept: tuple[int, bytes] = (-1, b"")
        """The last block that was read: the next tensor often begins in it."""

    def read(self, start: int, stop: int) -> memoryview:
        """Bytes ``start`` to ``stop`` of the file."""
        if not 0 <= start <= stop <= self._content:
            raise CheckpointError(f"{self._uri}: {start} to {stop} lies outside of it")
        first, last = start // BLOCK_BYTES, -(-stop // BLOCK_BYTES)
        kept, data = self._kept
        if not (kept == first and last == first + 1):
            data = self._blocks(first, last)
            self._kept = (last - 1, data[(last - 1 - first) * BLOCK_BYTES :]) if last > first else self._kept
        at = first * BLOCK_BYTES
        return memoryview(data)[start - at : stop - at]

    def header(self) -> ShardHeader:
        """What the file says of itself."""
        end, _ = shards.preamble_bytes(bytes(self.read(0, 16)))
        return shards.decode_header(bytes(self.read(16, end)))

    def verify(self) -> None:
        """Read the whole file."""
        sums = BlockSums()
        try:
            with blobs.reading(self._uri) as file:
                left = self._content
                while left:
                    piece = file.read(min(left, _PIECE_BYTES))
                    if not piece:
                        raise self._truncated(self._stored.bytes - left)
                    sums.update(memoryview(piece))
                    left -= len(piece)
                end = file.read()
        except FileNotFoundError as error:
            raise self._missing() from error
        if len(end) != self._stored.bytes - self._content:
            raise self._truncated(self._content + len(end))
        if sums.finish() != end or checksum_of(end) != self._stored.checksum:
            raise self._damaged()

    def _blocks(self, first: int, last: int) -> bytes:
        if not self._sums:
            end = self._range(self._content, self._stored.bytes)
            if checksum_of(end) != self._stored.checksum:
                raise self._damaged()
            self._sums = end
        data = self._range(first * BLOCK_BYTES, min(last * BLOCK_BYTES, self._content))
        view = memoryview(data)
        for number in range(first, last):
            at = (number - first) * BLOCK_BYTES
            expected = self._sums[number * SUM_BYTES : (number + 1) * SUM_BYTES]
            if block_sum(view[at : at + BLOCK_BYTES]) != expected:
                raise self._damaged()
        return data

    def _range(self, start: int, stop: int) -> bytes:
        try:
            data = blobs.read_range(self._uri, start, stop)
        except FileNotFoundError as error:
            raise self._missing() from error
        if len(data) != stop - start:
            raise self._truncated(start + len(data))
        return data

    def _missing(self) -> CheckpointError:
        return CheckpointError(f"{self._stored.name} is missing")

    def _truncated(self, size: int) -> CheckpointError:
        return CheckpointError(f"{self._stored.name} has {size} bytes, not {self._stored.bytes}: truncated")

    def _damaged(self) -> CheckpointError:
        return CheckpointError(f"{self._stored.name} does not match its checksum: damaged")
