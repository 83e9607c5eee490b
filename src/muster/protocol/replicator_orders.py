"""Agent and its replicator: one message on each line of the replicator's stdin and stdout."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, TypeAlias, get_args

from muster.core.snapshots import SnapshotCopy
from muster.core.typed_json import Count, Port, Record
from muster.protocol.channel import Channel
from muster.protocol.to_agent import CommitFlushed, FlushSnapshots
from muster.protocol.to_supervisor import FlushCommitted, SnapshotsFlushed, SnapshotsRejected
from muster.protocol.values import Address


@dataclass(frozen=True, kw_only=True)
class CopyTo(Record):
    """From now on these ranks' snapshots are copied to this replicator; those of earlier attempts no longer."""

    attempt: Count
    peer: Annotated[Address | None, "None: nowhere"]
    layout: str
    ranks: tuple[Count, ...]
    copies_of: Annotated[tuple[Count, ...], "ranks of another host whose copies come here"] = ()


@dataclass(frozen=True, kw_only=True)
class CopyNext(Record):
    """A step was taken: see what its ranks have ordered to be copied."""


@dataclass(frozen=True, kw_only=True)
class FetchVersion(Record):
    """Get a version from another host's replicator."""

    address: Address
    file: Annotated[str, "its ring there"]
    target: Annotated[str, "its file here, when it is whole"]
    copy: SnapshotCopy


@dataclass(frozen=True, kw_only=True)
class FlushOrder(Record):
    """Write a version that is in memory."""

    flush: FlushSnapshots | CommitFlushed
    run_id: str
    fence: Annotated[Count, "the newest attempt that this host knows: it is committed in its name"]
    alone: Annotated[bool, "ordered by a host without a supervisor"] = False


@dataclass(frozen=True, kw_only=True)
class ListenAddress(Record):
    """Where other replicators connect to this one."""

    address: Address


@dataclass(frozen=True, kw_only=True)
class LogNote(Record):
    """For the run's log."""

    text: str


@dataclass(frozen=True, kw_only=True)
class ReplicatorRecord(Record):
    """The file with which an agent's successor starts a replicator like the one before."""

    port: Port
    peers: CopyTo | None = None


ToReplicator: TypeAlias = CopyTo | CopyNext | FetchVersion | FlushOrder
FromReplicator: TypeAlias = ListenAddress | LogNote | SnapshotsFlushed | FlushCommitted | SnapshotsRejected
TO_REPLICATOR: Channel[ToReplicator] = Channel(
    name="agent to replicator", sender="agent", receiver="replicator", over="pipe", messages=get_args(ToReplicator)
)
FROM_REPLICATOR: Channel[FromReplicator] = Channel(
    name="replicator to agent", sender="replicator", receiver="agent", over="pipe", messages=get_args(FromReplicator)
)
