"""In-memory snapshots of one rank: a ring of slots in a file on tmpfs, which outlives the rank.

The rank writes, others only read: the agent lists what is there, the mover copies it to a peer, a
restarted rank maps it. A slot counts when its stamp names a step; the stamp is cleared before the bytes
change and set after they are whole, so a rank killed in mid-copy leaves a slot that is no version.

A version gets a seal, a sum over its bytes, a moment after it is whole; whoever restores it compares.

Layout of the file: fixed header, the copy's stamp (what a peer holds for certain), one stamp per slot (step,
attempt, seal, step of the seal; int64 each, step -1: no version, no seal), the shard header (JSON: what the bytes
are, see ``core.shards``), then the slots, page-aligned.
"""

from __future__ import annotations

import mmap
import os
import re
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from muster.core.errors import CheckpointError

MAGIC = b"MUSTRNG2"
SLOTS = 3
"""One being written, one complete, one that a peer may still be reading."""
_FIXED = struct.Struct("<8sIIQ")  # magic, slots, bytes of the shard header, bytes of a slot
_STAMP = struct.Struct("<qqqq")  # step, attempt, seal, step of the seal
_PAGE = 4096
_NAME = re.compile(r"^(?P<tier>own|peer|fetched)\.(?P<layout>r\d+s\d+t\d+)\.(?P<rank>\d+)\.ring$")


def file_name(tier: str, layout_key: str, rank: int) -> str:
    """``own.r1s4t1.3.ring``; tier: own, peer (a copy held for another host) or fetched (got for a restore)."""
    return f"{tier}.{layout_key}.{rank}.ring"


def refuse(path: Path, reason: str) -> None:
    """Say, beside the place where a rank waits for a fetched ring, why none will come."""
    part = path.with_name(f"{path.name}.saying")
    part.write_text(reason)
    os.rename(part, _refusal_file(path))


def refusal(path: Path) -> str | None:
    """What ``refuse`` said about ``path``; None where nothing."""
    try:
        return _refusal_file(path).read_text()
    except FileNotFoundError:
        return None


def forget_refusal(path: Path) -> None:
    _refusal_file(path).unlink(missing_ok=True)


def _refusal_file(path: Path) -> Path:
    return path.with_name(f"{path.name}.failed")


@dataclass(frozen=True, kw_only=True)
class Version:
    """A whole version in a ring."""

    step: int
    attempt: int
    slot: int


@dataclass(frozen=True, kw_only=True)
class Held:
    """A whole version on this host, and whose it is."""

    tier: str
    layout: str
    rank: int
    step: int
    attempt: int


class Ring:
    """A mapped ring file. ``create`` for the rank that writes it, ``open`` for everybody else."""

    def __init__(self, path: Path, mapped: mmap.mmap) -> None:
        self.path = path
        self.mapped = mapped
        magic, self.slots, header_bytes, self.slot_bytes = _FIXED.unpack_from(mapped)
        if magic != MAGIC:
            raise CheckpointError(f"{path} is no snapshot ring")
        start = _FIXED.size + (1 + self.slots) * _STAMP.size
        self.header = bytes(mapped[start : start + header_bytes])
        self._data = _aligned(start + header_bytes)
        if len(mapped) < self._data + self.slots * self.slot_bytes:
            raise CheckpointError(f"{path} is truncated: {len(mapped)} bytes")

    @classmethod
    def create(cls, path: Path, *, header: bytes, slot_bytes: int, slots: int = SLOTS) -> Ring:
        """A ring of this shape. One of the same shape that exists is kept, versions and all.

        Raises:
            CheckpointError: no room in memory for it (checked now, not by SIGBUS at the first write).
        """
        if path.exists():
            try:
                found = cls.open(path, writable=True)
                if (found.header, found.slot_bytes, found.slots) == (header, slot_bytes, slots):
                    return found
            except CheckpointError:
                pass
        start = _FIXED.size + (1 + slots) * _STAMP.size
        size = _aligned(start + len(header)) + slots * slot_bytes
        temporary = path.with_suffix(f".{os.getpid()}.tmp")
        fd = os.open(temporary, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o600)
        try:
            os.posix_fallocate(fd, 0, size)
            os.pwrite(fd, _FIXED.pack(MAGIC, slots, len(header), slot_bytes), 0)
            os.pwrite(fd, _STAMP.pack(-1, -1, 0, -1) * (1 + slots), _FIXED.size)
            os.pwrite(fd, header, start)
            os.rename(temporary, path)
            return cls(path, mmap.mmap(fd, size))
        except OSError as error:
            temporary.unlink(missing_ok=True)
            raise CheckpointError(
                f"no room for in-memory snapshots: {size} bytes in {path.parent}: {error.strerror}",
                hint="checkpoint.memory_every_steps=0 turns them off",
            ) from error
        finally:
            os.close(fd)

    @classmethod
    def open(cls, path: Path, *, writable: bool = False) -> Ring:
        """Map an existing ring. Raises CheckpointError when absent or damaged."""
        try:
            fd = os.open(path, os.O_RDWR if writable else os.O_RDONLY)
        except OSError as error:
            raise CheckpointError(f"no snapshot ring {path}: {error.strerror}") from error
        try:
            return cls(path, mmap.mmap(fd, 0, access=mmap.ACCESS_WRITE if writable else mmap.ACCESS_READ))
        except (ValueError, struct.error) as error:
            raise CheckpointError(f"{path} is no snapshot ring") from error
        finally:
            os.close(fd)

    def versions(self) -> list[Version]:
        """Whole versions, newest first."""
        found = []
        for slot in range(self.slots):
            step, attempt, _, _ = _STAMP.unpack_from(self.mapped, _FIXED.size + (1 + slot) * _STAMP.size)
            if step >= 0:
                found.append(Version(step=step, attempt=attempt, slot=slot))
        return sorted(found, key=lambda version: (version.step, version.attempt), reverse=True)

    def find(self, step: int, attempt: int) -> Version | None:
        return next((v for v in self.versions() if (v.step, v.attempt) == (step, attempt)), None)

    def slot(self, index: int) -> memoryview:
        """The bytes of a slot."""
        start = self._data + index * self.slot_bytes
        return memoryview(self.mapped)[start : start + self.slot_bytes]

    def begin(self) -> int:
        """The slot to write next (a free one, else the oldest), its stamp cleared."""
        taken = {version.slot: (version.step, version.attempt) for version in self.versions()}
        free = [slot for slot in range(self.slots) if slot not in taken]
        slot = free[0] if free else min(taken, key=lambda index: taken[index])
        self._stamp(slot, -1, -1)
        return slot

    def commit(self, slot: int, *, step: int, attempt: int) -> Version:
        """The slot's bytes are whole: it is now the version ``step``, not sealed yet."""
        self._stamp(slot, step, attempt)
        return Version(step=step, attempt=attempt, slot=slot)

    def seal(self, version: Version, seal: int | None) -> None:
        """Note the sum of the version's bytes (any signed 64-bit number); None: it has none.

        May come from another thread: a seal of a version that is overwritten meanwhile names its own step, and so
        seals nothing.
        """
        at = _FIXED.size + (1 + version.slot) * _STAMP.size
        self.mapped[at + 24 : at + 32] = struct.pack("<q", -1)
        if seal is not None:
            self.mapped[at + 16 : at + 24] = struct.pack("<q", seal)
            self.mapped[at + 24 : at + 32] = struct.pack("<q", version.step)

    def sealed(self, version: Version) -> int | None:
        """What ``seal`` noted about it; None where it was not sealed (yet)."""
        step, attempt, seal, of = _STAMP.unpack_from(self.mapped, _FIXED.size + (1 + version.slot) * _STAMP.size)
        return seal if (step, attempt, of) == (version.step, version.attempt, version.step) else None

    def forget_after(self, step: int, *, attempt: int | None = None) -> None:
        """Clear versions newer than ``step`` (the run went back to it) and, at ``step``, of other attempts."""
        for version in self.versions():
            other = version.step == step and attempt is not None and version.attempt != attempt
            if version.step > step or other:
                self._stamp(version.slot, -1, -1)

    def copied(self) -> tuple[int, int]:
        """(step, attempt) of the newest version that a peer holds whole; (-1, -1): none."""
        step, attempt, _, _ = _STAMP.unpack_from(self.mapped, _FIXED.size)
        return step, attempt

    def note_copied(self, version: Version) -> None:
        """The peer said that it holds ``version`` (the mover's word to the rank)."""
        self._stamp(-1, version.step, version.attempt)

    def close(self) -> None:
        self.mapped.close()

    def _stamp(self, slot: int, step: int, attempt: int) -> None:
        # The step goes in last: a reader that sees it sees the attempt that belongs to it.
        at = _FIXED.size + (1 + slot) * _STAMP.size
        if step < 0:
            self.mapped[at : at + 8] = struct.pack("<q", -1)
            return
        self.mapped[at + 24 : at + 32] = struct.pack("<q", -1)
        self.mapped[at + 8 : at + 16] = struct.pack("<q", attempt)
        self.mapped[at : at + 8] = struct.pack("<q", step)


def inventory(directory: Path) -> Iterator[Held]:
    """Every whole version in ``directory``; damaged files are passed over."""
    for path in sorted(directory.glob("*.ring")) if directory.is_dir() else []:
        match = _NAME.match(path.name)
        if match is None or match["tier"] == "fetched":
            continue
        try:
            ring = Ring.open(path)
        except CheckpointError:
            continue
        for version in ring.versions():
            yield Held(
                tier="memory" if match["tier"] == "own" else "peer",
                layout=match["layout"],
                rank=int(match["rank"]),
                step=version.step,
                attempt=version.attempt,
            )
        ring.close()


def _aligned(size: int) -> int:
    return -(-size // _PAGE) * _PAGE
