"""Parts of versions for ranks of other hosts: a world of another layout needs slices of many shards, and no whole one.

A version's one checksum cannot tell whether a part is intact. So before the first part of it is sent, the version is
read and compared with its checksum, and in the same pass each of its blocks gets a sum. The reader gets these sums
first and compares every block on arrival: what rots in memory after that, or on the way, is found there.
"""

from __future__ import annotations

import threading

from muster.agent.replicator.transfer import PeerStream
from muster.checkpoint_format.checksum import SLICE_BLOCK_BYTES, BlockSums, checksum_of
from muster.checkpoint_format.snapshot_ring import Ring, Version
from muster.core.errors import CheckpointError
from muster.core.types import Checksum
from muster.protocol.replicator_peers import Absent, Go, NotIntact, ReadSlices, SlicesFollow, WantBlocks


class SliceSource:
    """Remembers the sums of the versions that were asked for: each is read whole once, however many ranks ask."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._files: dict[str, _Summed] = {}

    def describe(self, ring: Ring, request: ReadSlices, stream: PeerStream) -> None:
        """Answer ``ReadSlices``. Raises CheckpointError, after refusing the reader, if the version is not intact."""
        version = ring.find(request.copy.step, request.copy.attempt)
        if version is None:
            stream.send(Absent())
            return
        with self._lock:
            summed = self._files.setdefault(ring.path.name, _Summed())
        try:
            sums = summed.sums(ring, version)
        except CheckpointError as error:
            stream.send(NotIntact(reason=str(error)))
            raise
        stream.send(
            SlicesFollow(
                header=ring.header.decode(), slot_bytes=ring.slot_bytes, block_bytes=SLICE_BLOCK_BYTES,
                sums=checksum_of(sums),
            )
        )  # fmt: skip
        if isinstance(stream.receive(), Go):
            stream.send_bytes(memoryview(sums))


def send_blocks(ring: Ring, request: WantBlocks, stream: PeerStream) -> None:
    """Answer ``WantBlocks``. Raises CheckpointError where the version is no longer there."""
    version = ring.find(request.copy.step, request.copy.attempt)
    if version is None:
        raise CheckpointError(f"{ring.path.name} of step {request.copy.step} is no longer there")
    slot = ring.slot(version.slot)
    for first, count in request.runs:
        stream.send_bytes(slot[first * SLICE_BLOCK_BYTES : (first + count) * SLICE_BLOCK_BYTES])


class _Summed:
    """One file's version that was asked for last, and the sums of its blocks."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._of: tuple[Version, Checksum] | None = None
        self._sums = b""

    def sums(self, ring: Ring, version: Version) -> bytes:
        """Raises CheckpointError where the version does not match its checksum."""
        with self._lock:
            checksum = ring.checksum(version)
            if checksum is None or self._of != (version, checksum):
                blocks = BlockSums(SLICE_BLOCK_BYTES)
                ring.verify(version, blocks)
                self._sums = blocks.finish()
                self._of = None if checksum is None else (version, checksum)
            return self._sums
