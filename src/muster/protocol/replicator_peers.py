"""Replicator and replicator of another host, or a rank of another host that reads parts of a version.

Raw bytes of a whole version follow ``Go``, then ``Whole`` or ``Torn``. Of parts: the sums of the version's blocks
follow ``Go``, and each ``WantBlocks`` is answered by the blocks' bytes alone, which their reader compares with their
sums.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, TypeAlias, get_args

from muster.core.snapshots import SnapshotCopy
from muster.core.typed_json import Count, Record, Step
from muster.core.types import Checksum
from muster.protocol.channel import Channel
from muster.protocol.hello import Refused
from muster.protocol.version import Version


@dataclass(frozen=True, kw_only=True)
class PeerHello(Record):
    """The first message of the one that connects."""

    version: Version


@dataclass(frozen=True, kw_only=True)
class ReadVersion(Record):
    """Send me this version."""

    file: Annotated[str, "a ring's name, without a folder"]
    copy: SnapshotCopy


@dataclass(frozen=True, kw_only=True)
class PushVersion(Record):
    """Take a copy of this version."""

    file: Annotated[str, "a ring's name, without a folder"]
    attempt: Annotated[Count, "the attempt in which it is copied: of two senders the newer one's counts"]
    header: Annotated[str, "of the ring: what the bytes are"]
    slot_bytes: Count
    copy: SnapshotCopy
    keep: Annotated[Step, "a step whose slot is not written to"] = -1


@dataclass(frozen=True, kw_only=True)
class VersionFollows(Record):
    """The answer to ``ReadVersion``: what is sent after ``Go``."""

    copy: SnapshotCopy
    header: Annotated[str, "of the ring: what the bytes are"]
    slot_bytes: Count


@dataclass(frozen=True, kw_only=True)
class ReadSlices(Record):
    """I want parts of this version: say what it holds."""

    file: Annotated[str, "a ring's name, without a folder"]
    copy: SnapshotCopy


@dataclass(frozen=True, kw_only=True)
class SlicesFollow(Record):
    """The answer to ``ReadSlices``: the version matches its checksum. The sums of its blocks are sent after ``Go``."""

    header: Annotated[str, "of the ring: what the bytes are"]
    slot_bytes: Count
    block_bytes: Annotated[Count, "each sum is of as many bytes, the last one of what is left"]
    sums: Annotated[Checksum, "of all sums"]


@dataclass(frozen=True, kw_only=True)
class WantBlocks(Record):
    """Send these blocks of a version for which ``SlicesFollow`` came, one run behind the other."""

    file: Annotated[str, "a ring's name, without a folder"]
    copy: SnapshotCopy
    runs: Annotated[tuple[tuple[Count, Count], ...], "(first block, number of blocks)"]


@dataclass(frozen=True, kw_only=True)
class Absent(Record):
    """The version is no longer there."""


@dataclass(frozen=True, kw_only=True)
class Go(Record):
    """Send the bytes."""


@dataclass(frozen=True, kw_only=True)
class Got(Record):
    """The bytes have arrived."""


@dataclass(frozen=True, kw_only=True)
class Whole(Record):
    """The version was not changed while it was sent."""

    checksum: Checksum


@dataclass(frozen=True, kw_only=True)
class Torn(Record):
    """It was overwritten meanwhile: what was sent does not count."""


@dataclass(frozen=True, kw_only=True)
class Held(Record):
    """The receiver has the version, whole."""


@dataclass(frozen=True, kw_only=True)
class NotIntact(Record):
    """The bytes and their checksum differ."""

    reason: str


@dataclass(frozen=True, kw_only=True)
class PushRefused(Record):
    """The receiver takes no copy now."""

    reason: str
    no_room: Annotated[bool, "its memory is full"]


PeerMessage: TypeAlias = (
    PeerHello
    | ReadVersion
    | PushVersion
    | VersionFollows
    | ReadSlices
    | SlicesFollow
    | WantBlocks
    | Absent
    | Go
    | Got
    | Whole
    | Torn
    | Held
    | NotIntact
    | PushRefused
    | Refused
)
#: Both directions: either end may send a version. A rank only reads.
REPLICATOR_PEERS: Channel[PeerMessage] = Channel(
    name="replicator to replicator",
    sender="replicator",
    receiver="replicator of another host",
    over="TCP, raw bytes between messages",
    messages=get_args(PeerMessage),
)
