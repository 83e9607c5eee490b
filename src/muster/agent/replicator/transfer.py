"""One version on its way from a replicator to another: the sender's end and the receiver's.

The version's own checksum, computed by the rank that took it, goes with it: the receiver compares it with the bytes
where they lie before the version counts. So what rots on the way, or before, is never committed.
"""

from __future__ import annotations

import threading
from dataclasses import replace
from pathlib import Path
from typing import TypeAlias

from muster.checkpoint_format.checksum import SLICE_BLOCK_BYTES, BlockSums, checksum_of
from muster.checkpoint_format.snapshot_ring import Ring, Version
from muster.core.errors import CheckpointError
from muster.core.snapshots import FETCHED_SLOTS
from muster.core.types import Checksum
from muster.protocol.replicator_peers import (
    Absent,
    Go,
    Got,
    Held,
    NotIntact,
    PeerMessage,
    PushVersion,
    ReadSlices,
    ReadVersion,
    SlicesFollow,
    Torn,
    VersionFollows,
    WantBlocks,
    Whole,
)
from muster.transport.stream import Stream

PeerStream: TypeAlias = Stream[PeerMessage]


def answer_read(ring: Ring, request: ReadVersion, stream: PeerStream) -> None:
    """Send what ``request`` names. Raises CheckpointError where the receiver says that it is not intact."""
    version = ring.find(request.copy.step, request.copy.attempt)
    if version is None:
        stream.send(Absent())
        return
    copy = replace(request.copy, rank=version.rank)  # a twin's ring: its rank took it, and the checksum contains that
    stream.send(VersionFollows(copy=copy, header=ring.header.decode(), slot_bytes=ring.slot_bytes))
    if isinstance(stream.receive(), Go):
        send_slot(ring, version, stream)


def send_slot(ring: Ring, version: Version, stream: PeerStream) -> bool:
    """After ``Go``: the version's bytes and checksum. Whether the receiver holds it; False: it was overwritten.

    Raises CheckpointError where the receiver says that it is not intact.
    """
    checksum = ring.checksum(version)
    stream.send_bytes(ring.slot(version.slot))
    stream.receive()
    if checksum is None or ring.checksum(version) != checksum:
        stream.send(Torn())
        return False
    stream.send(Whole(checksum=checksum))
    answer = stream.receive()
    if isinstance(answer, NotIntact):
        raise CheckpointError(answer.reason)
    return isinstance(answer, Held)


def receive_version(
    path: Path, offer: PushVersion | VersionFollows, stream: PeerStream, *, slots: int = FETCHED_SLOTS
) -> None:
    """Receive what is offered into the ring ``path``. Newer versions there were abandoned.

    Raises:
        NoRoom: no memory for it.
        CheckpointError: it did not arrive whole; it does not count.
    """
    ring = Ring.create(path, header=offer.header.encode(), slot_bytes=offer.slot_bytes, slots=slots)
    try:
        copy = offer.copy
        ring.forget_after(copy.step, attempt=copy.attempt)
        if ring.find(copy.step, copy.attempt) is not None:
            stream.send(Held())
            return
        slot = ring.begin(spare=(offer.keep,) if isinstance(offer, PushVersion) else ())
        stream.send(Go())
        stream.receive_bytes(ring.slot(slot))
        stream.send(Got())
        end = stream.receive()
        if not isinstance(end, Whole):
            raise CheckpointError(f"{path.name}: step {copy.step} was overwritten while it was copied")
        try:
            ring.commit(slot, step=copy.step, attempt=copy.attempt, rank=copy.rank, expected=end.checksum)
        except CheckpointError as error:
            stream.send(NotIntact(reason=str(error)))
            raise
        stream.send(Held())
    finally:
        ring.close()


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
