"""Writing a shard file to the disk or the bucket: by a host's replicator, or by the rank where there is none."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from muster.checkpoint_format.manifest import crc32
from muster.core.errors import CheckpointError
from muster.storage.store import blobs

_PIECE_BYTES = 16 << 20


def write_shard(
    uri: str, parts: Iterable[bytes | bytearray | memoryview], *, wanted: Callable[[], bool] = lambda: True
) -> tuple[int, int]:
    """Write ``parts`` one behind the other as a new file; (bytes, CRC-32). Durable when it returns.

    ``wanted`` is asked before every piece: a share whose rank has died is not written to its end.

    Raises:
        AccessError, BackendError: it cannot be written.
        CheckpointError: ``wanted`` returned false.
    """
    count, crc = 0, 0
    with blobs.writing(uri) as file:
        for part in parts:
            data = memoryview(part)
            for start in range(0, len(data), _PIECE_BYTES):
                if not wanted():
                    raise CheckpointError(f"{uri}: no longer needed")
                piece = data[start : start + _PIECE_BYTES]
                crc = crc32(piece, crc)
                while len(piece):
                    piece = piece[file.write(piece) :]
            count += len(data)
    return count, crc
