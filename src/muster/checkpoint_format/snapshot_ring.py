"""In-memory snapshots of one rank: a ring of slots in a file on tmpfs, which outlives the rank.

The rank writes, others only read: the agent lists what is there, the replicator copies it to a peer, a
restarted rank maps it. A slot counts when its stamp names a step; the stamp is cleared before the bytes
change and set after they are whole and their checksum is computed, so a rank killed in mid-copy leaves a slot without
a version, and no version is without a checksum.

Layout of the file: fixed header, three marks and ``MAX_SLOTS`` stamps (four 64-bit numbers each), the shard header
(JSON: what the bytes are, of which run and layout, see ``checkpoint_format.shards``), then the slots, page-aligned. A
stamp is a slot's step, attempt, rank and checksum (step -1: no version). The checksum is over the fixed header, the
shard header, the slot's bytes, and step, attempt and rank. The marks are versions too: the one to copy to the
peer next (``request_copy``), the one that the peer last confirmed (``note_copied``), and the step that every rank's
peer holds (``note_agreed``). Slots beyond the reserved ones are a hole in the file: they take no memory until ``grow``.
"""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import re
import secrets
import struct
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path

from muster.checkpoint_format.checksum import BlockSums, Digest, checksum
from muster.checkpoint_format.decoding import damage_as
from muster.checkpoint_format.shards import ShardHeader, check_magic, check_places, decode_header
from muster.core.errors import CheckpointError
from muster.core.layout import KEY_PATTERN
from muster.core.snapshots import COPIED_SLOTS, MAX_SLOTS, SnapshotCopy, Tier
from muster.core.types import Checksum

FORMAT = 4
_MAGIC = b"MUSTRNG"
_FIXED = struct.Struct("<8sIIQ")  # magic, reserved slots, bytes of the shard header, bytes of a slot
_REQUESTED, _COPIED, _AGREED, _MARKS = 0, 1, 2, 3
_STAMP = struct.Struct("<qqqQ")  # step, attempt, rank (of a mark: attempt of the peer), checksum
_IDENTITY = struct.Struct("<qqq")  # step, attempt, rank
_OPEN = os.O_NOFOLLOW | os.O_CLOEXEC
_SLOTS_AT = 8
_HEADER_AT = _FIXED.size + (_MARKS + MAX_SLOTS) * _STAMP.size
_FULL = (errno.ENOSPC, errno.ENOMEM, errno.EDQUOT, errno.EFBIG)
_PAGE = 4096
_PIECE = 1 << 20
_OF_COPY = "copy: "
_NAME = re.compile(rf"^(?P<tier>own|peer|fetched)\.(?P<layout>{KEY_PATTERN})\.(?P<rank>\d+)\.ring$")


def file_name(tier: str, layout_key: str, rank: int) -> str:
    """``own.r1s4t1p1c1e1.3.ring``; tier: own, peer (a copy held for another host) or fetched (got for a restore)."""
    return f"{tier}.{layout_key}.{rank}.ring"


def refuse(path: Path, reason: str, *, of_copy: bool) -> None:
    """Leave the reason why no ring will be fetched, next to the path where a rank waits for it.

    ``of_copy``: the copy is gone or damaged; otherwise nothing is known of it.
    """
    part = path.with_name(f"{path.name}.saying")
    part.write_text(f"{_OF_COPY if of_copy else ''}{reason}")
    os.rename(part, _refusal_file(path))


def refusal(path: Path) -> tuple[str, bool] | None:
    """(the reason that ``refuse`` left for ``path``, whether the copy is at fault); None: none."""
    try:
        text = _refusal_file(path).read_text()
    except FileNotFoundError:
        return None
    return text.removeprefix(_OF_COPY), text.startswith(_OF_COPY)


def forget_refusal(path: Path) -> None:
    _refusal_file(path).unlink(missing_ok=True)


def _refusal_file(path: Path) -> Path:
    return path.with_name(f"{path.name}.failed")


class NoRoom(CheckpointError):
    """Not enough memory for snapshots; existing snapshots are intact."""

    def __init__(self, requested: int, free: int, folder: Path) -> None:
        super().__init__(
            f"no room for snapshots in memory: {_size(requested)} wanted, {_size(free)} free in {folder}",
            hint="checkpoint.replicate_snapshots: false needs less, checkpoint.snapshot_every_steps: 0 none",
        )


@dataclass(frozen=True, kw_only=True)
class Version:
    """A whole version in a ring."""

    step: int
    attempt: int
    rank: int
    """The rank that took it."""
    slot: int


@dataclass(frozen=True, kw_only=True)
class SnapshotInfo:
    """A complete version on this host, and its rank."""

    tier: Tier
    layout: str
    rank: int
    step: int
    attempt: int


def ring_of(held: SnapshotCopy | SnapshotInfo) -> str:
    """The file, in its host's memory, of what that host lists."""
    return file_name("own" if held.tier == "memory" else "peer", held.layout, held.rank)


class Ring:
    """A mapped ring file. ``create`` for the rank that writes it, ``open`` for all others."""

    def __init__(self, path: Path, mapped: mmap.mmap) -> None:
        self.path = path
        self.mapped = mapped
        magic, slots, header_bytes, self.slot_bytes = _FIXED.unpack_from(mapped)
        check_magic(magic, _MAGIC, reads=FORMAT, what="a snapshot ring")
        self.header = bytes(mapped[_HEADER_AT : _HEADER_AT + header_bytes])
        self._data = _aligned(_HEADER_AT + header_bytes)
        if slots > MAX_SLOTS or len(mapped) != self._data + MAX_SLOTS * self.slot_bytes:
            raise CheckpointError(f"it has {len(mapped)} bytes: truncated, or its first bytes are wrong")
        self._digest = Digest(_FIXED.pack(magic, 0, header_bytes, self.slot_bytes) + self.header)

    @classmethod
    def create(cls, path: Path, *, header: bytes, slot_bytes: int, slots: int = COPIED_SLOTS) -> Ring:
        """A ring of this shape with at least ``slots`` slots. One of this shape that exists is kept, versions and all.

        Raises:
            NoRoom: no memory for it (found out now, not by SIGBUS at the first write). What existed is untouched.
        """
        if path.exists():
            try:
                result = cls.open(path, writable=True)
            except CheckpointError:
                result = None
            if result is not None and (result.header, result.slot_bytes) == (header, slot_bytes):
                result.grow(slots)
                return result
        data = _aligned(_HEADER_AT + len(header))
        temporary = path.with_suffix(f".{secrets.token_hex(4)}.tmp")
        with _room(path.parent, data + slots * slot_bytes):
            fd = os.open(temporary, os.O_RDWR | os.O_CREAT | os.O_EXCL | _OPEN, 0o600)
            try:
                os.posix_fallocate(fd, 0, data + slots * slot_bytes)
                os.ftruncate(fd, data + MAX_SLOTS * slot_bytes)
                os.pwrite(fd, _FIXED.pack(_MAGIC + b"%d" % FORMAT, slots, len(header), slot_bytes), 0)
                os.pwrite(fd, _STAMP.pack(-1, -1, -1, 0) * (_MARKS + MAX_SLOTS), _FIXED.size)
                os.pwrite(fd, header, _HEADER_AT)
                os.rename(temporary, path)
                return cls(path, mmap.mmap(fd, 0))
            except OSError:
                temporary.unlink(missing_ok=True)
                raise
            finally:
                os.close(fd)

    @classmethod
    def open(cls, path: Path, *, writable: bool = False) -> Ring:
        """Map an existing ring. Raises CheckpointError when absent or damaged."""
        try:
            fd = os.open(path, (os.O_RDWR if writable else os.O_RDONLY) | _OPEN)
        except OSError as error:
            raise CheckpointError(f"no snapshot ring {path}: {error.strerror}") from error
        try:
            with damage_as("not a snapshot ring"):
                return cls(path, mmap.mmap(fd, 0, access=mmap.ACCESS_WRITE if writable else mmap.ACCESS_READ))
        except CheckpointError as error:
            raise CheckpointError(f"{path}: {error}") from error
        finally:
            os.close(fd)

    @property
    def slots(self) -> int:
        """Slots that have memory."""
        return int(_FIXED.unpack_from(self.mapped)[1])

    def grow(self, slots: int) -> None:
        """Reserve memory for ``slots`` slots; never fewer than there are. Raises NoRoom."""
        has = self.slots
        if slots <= has:
            return
        size = (slots - has) * self.slot_bytes
        with _room(self.path.parent, size):
            fd = os.open(self.path, os.O_RDWR | _OPEN)
            try:
                os.posix_fallocate(fd, self._data + has * self.slot_bytes, size)
            finally:
                os.close(fd)
        self.mapped[_SLOTS_AT : _SLOTS_AT + 4] = struct.pack("<I", slots)

    def versions(self) -> list[Version]:
        """Whole versions, newest first."""
        result = []
        for slot in range(self.slots):
            step, attempt, rank, _ = _STAMP.unpack_from(self.mapped, _at(_MARKS + slot))
            if min(step, attempt, rank) >= 0:  # a damaged stamp is no version: no reader takes a negative number
                result.append(Version(step=step, attempt=attempt, rank=rank, slot=slot))
        return sorted(result, key=lambda version: (version.step, version.attempt), reverse=True)

    def find(self, step: int, attempt: int) -> Version | None:
        return next((v for v in self.versions() if (v.step, v.attempt) == (step, attempt)), None)

    def slot(self, index: int) -> memoryview:
        """The bytes of a slot."""
        start = self._data + index * self.slot_bytes
        return memoryview(self.mapped)[start : start + self.slot_bytes]

    def next_slot(self, *, spare: Collection[int] = ()) -> int | None:
        """A free slot, else that of the oldest version whose step is not in ``spare``; None where all are spared."""
        taken = {version.slot: (version.step, version.attempt) for version in self.versions()}
        free = [slot for slot in range(self.slots) if slot not in taken]
        if free:
            return free[0]
        left = [slot for slot, (step, _) in taken.items() if step not in spare]
        return min(left, key=lambda slot: taken[slot]) if left else None

    def begin(self, *, spare: Collection[int] = ()) -> int:
        """The slot to write next (``next_slot``), its stamp cleared. Raises CheckpointError where all are spared."""
        slot = self.next_slot(spare=spare)
        if slot is None:
            raise CheckpointError(f"{self.path.name}: each of its {self.slots} slots is spared")
        self._stamp(_MARKS + slot, -1, -1)
        return slot

    def commit(self, slot: int, *, step: int, attempt: int, rank: int, expected: Checksum | None = None) -> Version:
        """The slot's bytes are whole: they are now the version ``step`` that ``rank`` took. Reads all of them.

        ``expected``: the checksum that it has where it comes from. Raises CheckpointError where it is another one.
        """
        version = Version(step=step, attempt=attempt, rank=rank, slot=slot)
        number = self._sum(version)
        if expected is not None and checksum(number) != expected:
            raise CheckpointError(f"{self.path.name}: {_name(version)} does not match its checksum on arrival")
        self._stamp(_MARKS + slot, step, attempt, rank, number)
        return version

    def checksum(self, version: Version) -> Checksum | None:
        """What ``commit`` computed; None where the version is no longer there."""
        stamp = self._stamp_of(version)
        return checksum(stamp) if stamp is not None else None

    def verify(self, version: Version, sums: BlockSums | None = None) -> None:
        """Read the version. Raises CheckpointError where it is not, or no longer, what was committed.

        ``sums``: gets the bytes as they are verified.
        """
        stamp = self._stamp_of(version)
        if stamp is None or self._sum(version, sums) != stamp:
            gone = self._stamp_of(version) != stamp or stamp is None
            problem = "is no longer there" if gone else "does not match its checksum"
            raise CheckpointError(f"{self.path.name}: {_name(version)} {problem}")

    def drop(self, version: Version) -> None:
        """The version counts no longer."""
        if self._stamp_of(version) is not None:
            self._stamp(_MARKS + version.slot, -1, -1)

    def shard_header(self) -> ShardHeader:
        """What the slots' bytes are; to be trusted where a version has been verified. Raises CheckpointError."""
        header = decode_header(self.header)
        check_places(header.tensors, self.slot_bytes)
        return header

    def _sum(self, version: Version, sums: BlockSums | None = None) -> int:
        digest, data = self._digest.copy(), self.slot(version.slot)
        piece = _PIECE if sums is not None else max(1, len(data))  # what the caches hold is read from memory once
        for start in range(0, len(data), piece):
            part = data[start : start + piece]
            digest.update(part)
            if sums is not None:
                sums.update(part)
        digest.update(_IDENTITY.pack(version.step, version.attempt, version.rank))
        return digest.number

    def _stamp_of(self, version: Version) -> int | None:
        """The version's checksum; None where its slot is another's."""
        step, attempt, rank, number = _STAMP.unpack_from(self.mapped, _at(_MARKS + version.slot))
        return int(number) if (step, attempt, rank) == (version.step, version.attempt, version.rank) else None

    def forget_after(self, step: int, *, attempt: int | None = None) -> None:
        """Clear versions newer than ``step`` (the run went back to it) and, at ``step``, of other attempts."""
        for version in self.versions():
            other = version.step == step and attempt is not None and version.attempt != attempt
            if version.step > step or other:
                self._stamp(_MARKS + version.slot, -1, -1)

    def request_copy(self, version: Version | None) -> None:
        """Request a copy to the peer (from the rank to the replicator). None: nothing."""
        self._stamp(_REQUESTED, *((version.step, version.attempt) if version else (-1, -1)))

    def requested_copy(self) -> tuple[int, int]:
        """(step, attempt) of what the peer is to get; (-1, -1): nothing."""
        return self._mark(_REQUESTED)[:2]

    def note_copied(self, version: Version, *, world: int = -1) -> None:
        """Note that the peer of attempt ``world`` holds ``version`` (from the replicator to the rank)."""
        self._stamp(_COPIED, version.step, version.attempt, world)

    def copied(self, *, world: int | None = None) -> tuple[int, int]:
        """(step, attempt) of the newest version that a peer holds whole, or that of attempt ``world``; (-1, -1):
        none."""
        step, attempt, of = self._mark(_COPIED)
        return (step, attempt) if world in (None, of) else (-1, -1)

    def note_agreed(self, step: int) -> None:
        """Every rank's peer holds ``step`` (-1: none): here and at the peer it is spared until the next one is."""
        self._stamp(_AGREED, step, -1)

    def agreed(self) -> int:
        """What ``note_agreed`` noted."""
        return self._mark(_AGREED)[0]

    def close(self) -> None:
        """Close the mapping; where a buffer still refers to it, it is freed with the buffer."""
        with contextlib.suppress(BufferError):
            self.mapped.close()

    def _mark(self, index: int) -> tuple[int, int, int]:
        step, attempt, world, _ = _STAMP.unpack_from(self.mapped, _at(index))
        return (step, attempt, world) if step >= 0 else (-1, -1, -1)

    def _stamp(self, index: int, step: int, attempt: int, rank: int = -1, number: int = 0) -> None:
        # The step goes in last, and out first: a reader that sees it sees what belongs to it.
        at = _at(index)
        self.mapped[at : at + 8] = struct.pack("<q", -1)
        if step < 0:
            return
        self.mapped[at + 8 : at + 32] = struct.pack("<qqQ", attempt, rank, number)
        self.mapped[at : at + 8] = struct.pack("<q", step)


def list_snapshots(directory: Path) -> Iterator[SnapshotInfo]:
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
            yield SnapshotInfo(
                tier="memory" if match["tier"] == "own" else "peer",
                layout=match["layout"],
                rank=int(match["rank"]),
                step=version.step,
                attempt=version.attempt,
            )
        ring.close()


@contextlib.contextmanager
def _room(folder: Path, requested: int) -> Iterator[None]:
    """Raise NoRoom where ``requested`` bytes are not free in ``folder``, or were not when it came to it."""
    try:
        free = _free(folder)
        if requested > free:  # asked first: a reservation that fails half-way takes memory that others need
            raise NoRoom(requested, free, folder)
        yield
    except OSError as error:
        if error.errno in _FULL:
            raise NoRoom(requested, _free(folder), folder) from error
        raise CheckpointError(f"no snapshots in {folder}: {error.strerror}") from error


def _name(version: Version) -> str:
    return f"the snapshot of step {version.step} of attempt {version.attempt} of rank {version.rank}"


def _free(folder: Path) -> int:
    there = os.statvfs(folder)
    return there.f_bavail * there.f_frsize


def _size(count: int) -> str:
    return f"{count / 1e9:.1f} GB" if count >= 1e8 else f"{count / 1e6:.2f} MB"


def _at(index: int) -> int:
    """Offset of a mark or a stamp in the file."""
    return _FIXED.size + index * _STAMP.size


def _aligned(size: int) -> int:
    return -(-size // _PAGE) * _PAGE
