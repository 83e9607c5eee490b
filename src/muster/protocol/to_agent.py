"""Supervisor to agent."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, TypeAlias, get_args

from muster.core.snapshots import SnapshotCopy
from muster.core.typed_json import Count, Record, Seconds, Step
from muster.core.types import Checksum
from muster.protocol.channel import Channel
from muster.protocol.hello import Refused
from muster.protocol.ranks import RankContext
from muster.protocol.values import Address, CommandRanks, TraceSteps
from muster.protocol.version import Version


@dataclass(frozen=True, kw_only=True)
class Welcome(Record):
    """The answer to an agent's hello."""

    version: Version
    attempt: Annotated[Count, "the run's current attempt"]


@dataclass(frozen=True, kw_only=True)
class FetchShard(Record):
    """Where a host finds one rank's state."""

    rank: Annotated[Count, "whose state, of the world that took the snapshot"]
    copy: SnapshotCopy
    address: Annotated[Address | None, "the replicator that has it; None: it is on this host"] = None


@dataclass(frozen=True, kw_only=True)
class StartAttempt(Record):
    """Start these ranks. What other hosts hold of their state is fetched first."""

    attempt: Count
    contexts: Annotated[tuple[RankContext, ...], "the ranks of this host"]
    fetch: Annotated[tuple[FetchShard, ...], "the state that they start from"] = ()
    peer: Annotated[Address | None, "the replicator that gets copies of their snapshots"] = None
    copies_of: Annotated[tuple[Count, ...], "ranks of another host whose copies come here"] = ()


@dataclass(frozen=True, kw_only=True)
class EndAttempt(Record):
    """End the ranks up to this attempt, then answer with ``RanksEnded``."""

    attempt: Count
    why: str
    keep: Annotated[tuple[Count, ...], "ranks whose processes pause and stay, for the next attempt"] = ()
    pause_s: Annotated[Seconds, "how long they may take to pause"] = 0.0
    reset: Annotated[tuple[Count, ...], "GPUs to be reset once the ranks are gone"] = ()


@dataclass(frozen=True, kw_only=True)
class PeerMoved(Record):
    """The replicator that gets this host's copies has another address."""

    peer: Address


@dataclass(frozen=True, kw_only=True)
class FlushShard(Record):
    """One rank's part of a version that is to be written, and where this host holds it."""

    rank: Count
    copy: SnapshotCopy


@dataclass(frozen=True, kw_only=True)
class FlushSnapshots(Record):
    """Write what this host holds of a version to the checkpoint folder."""

    step: Step
    attempt: Count
    layout: str
    uri: Annotated[str, "the checkpoint folder"]
    ranks: tuple[FlushShard, ...]


@dataclass(frozen=True, kw_only=True)
class FlushedFile(Record):
    """A file that a host wrote of a version."""

    rank: Count
    name: str
    bytes: Count
    checksum: Checksum
    data_offset: Annotated[Count, "where the tensors' bytes begin in it"]


@dataclass(frozen=True, kw_only=True)
class CommitFlushed(Record):
    """All hosts have written their files of a version: make a checkpoint of them."""

    step: Step
    attempt: Count
    layout: str
    uri: Annotated[str, "the checkpoint folder"]
    files: tuple[FlushedFile, ...]


@dataclass(frozen=True, kw_only=True)
class Ping(Record):
    """Asks for the host's clock."""

    number: Count


@dataclass(frozen=True, kw_only=True)
class Reload(Record):
    """The run file was corrected: read it again and prepare its data."""


@dataclass(frozen=True, kw_only=True)
class DropCopies(Record):
    """These copies are not intact: hold them no longer."""

    copies: tuple[SnapshotCopy, ...]


@dataclass(frozen=True, kw_only=True)
class GatherEvidence(Record):
    """Capture what every rank here does, then answer with ``EvidenceReady``."""

    attempt: Count
    limit_s: Annotated[Seconds, "how long that may take: what has not come by then is missing"] = 0.2


@dataclass(frozen=True, kw_only=True)
class TraceRanks(Record):
    """Have ranks of this host write traces of their next steps."""

    attempt: Count
    ranks: tuple[Count, ...]
    trace: TraceSteps


@dataclass(frozen=True, kw_only=True)
class LookAtHost(Record):
    """Inspect the host's hardware now, while the ranks run, then answer with ``HostLooked``."""

    number: Annotated[Count, "whose answer it is"]


@dataclass(frozen=True, kw_only=True)
class Shutdown(Record):
    """The run is over for this host."""

    reason: str


ToAgent: TypeAlias = (
    Welcome
    | StartAttempt
    | EndAttempt
    | CommandRanks
    | PeerMoved
    | FlushSnapshots
    | CommitFlushed
    | Ping
    | Reload
    | DropCopies
    | GatherEvidence
    | LookAtHost
    | TraceRanks
    | Shutdown
    | Refused
)
TO_AGENT: Channel[ToAgent] = Channel(
    name="supervisor to agent", sender="supervisor", receiver="agent", over="TCP", messages=get_args(ToAgent)
)
