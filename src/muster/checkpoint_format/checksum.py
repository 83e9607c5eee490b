"""Checksums of what is stored and sent: XXH3-64, which runs at the speed of memory. No torch.

A flipped bit, swapped pages or zeroes change it with a probability of 1 - 2**-64; it guards against accidents, not
against an attacker who writes to the files. Each value travels with the algorithm's name (``core.types.Checksum``).
"""

from __future__ import annotations

import xxhash

from muster.core.types import Checksum

#: What is read of a shard is verified in pieces of this size, so that a part of a file can be read.
BLOCK_BYTES = 1 << 20
#: The same of a snapshot that is read in slices over the network: smaller, since many ranks need a little of each
#: tensor, and large enough for other threads to run while one is summed.
SLICE_BLOCK_BYTES = 128 << 10
#: Bytes of a block's sum in a shard's end.
SUM_BYTES = 8


class Digest:
    """A checksum in the making, by one thread: XXH3 mixes its state after each 1,024 bytes by a multiplication and an
    exclusive or (XXH3's ``scrambleAcc``), so what others made of later bytes could not be joined to it. Sums of blocks
    can be made by many (``BlockSums``), and are another value."""

    def __init__(self, start: bytes = b"") -> None:
        self._state = xxhash.xxh3_64(start)

    def update(self, data: bytes | bytearray | memoryview) -> None:
        """Add bytes. Other threads run meanwhile where there are many."""
        self._state.update(data)

    def copy(self) -> Digest:
        """Another one that continues from here."""
        result = Digest()
        result._state = self._state.copy()
        return result

    @property
    def number(self) -> int:
        """The checksum so far, unsigned."""
        return self._state.intdigest()


def checksum_of(*parts: bytes | bytearray | memoryview) -> Checksum:
    """Of the parts one behind the other."""
    digest = Digest()
    for part in parts:
        digest.update(part)
    return checksum(digest.number)


def checksum(number: int) -> Checksum:
    return Checksum(value=f"{number:016x}")


class BlockSums:
    """The sums of a stream's blocks; their own checksum is the stream's."""

    def __init__(self, block_bytes: int = BLOCK_BYTES) -> None:
        self._block = Digest()
        self._left = self._block_bytes = block_bytes
        self._sums = bytearray()

    def update(self, data: memoryview) -> None:
        while len(data):
            part = data[: self._left]
            self._block.update(part)
            self._left -= len(part)
            data = data[len(part) :]
            if not self._left:
                self._end_block()

    def finish(self) -> bytes:
        """The sums of all blocks, ``SUM_BYTES`` each."""
        if self._left != self._block_bytes:
            self._end_block()
        return bytes(self._sums)

    def _end_block(self) -> None:
        self._sums += self._block.number.to_bytes(SUM_BYTES, "little")
        self._block, self._left = Digest(), self._block_bytes


def block_sum(data: bytes | memoryview) -> bytes:
    """The sum of one block."""
    return xxhash.xxh3_64_intdigest(data).to_bytes(SUM_BYTES, "little")
