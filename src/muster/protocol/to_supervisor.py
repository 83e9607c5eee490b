"""Agent and watchdog to supervisor, after their hello."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Literal, TypeAlias, get_args

from muster.core.snapshots import SnapshotCopy
from muster.core.typed_json import Count, Int64, Record, Seconds, Step
from muster.protocol.channel import Channel
from muster.protocol.codec import encode
from muster.protocol.hello import AgentHello, BeatHello, ClientHello, Refused
from muster.protocol.to_agent import FlushedFile
from muster.protocol.values import Address, HostLook, LastWords, RankEvent, StoreAddress


@dataclass(frozen=True, kw_only=True)
class HostReady(Record):
    """The host has what a start needs."""

    store: Address | None = None
    memory: Annotated[Address | None, "its replicator"] = None


@dataclass(frozen=True, kw_only=True)
class HostPreparing(Record):
    """The host is not ready, and what it prepares moves: data, or a model's files from the hub."""

    activity: str
    done: Count = 0
    total: Annotated[Count, "0: unknown"] = 0


@dataclass(frozen=True, kw_only=True)
class StoreLost(Record):
    """There is no rendezvous store for the next attempt: an attempt was given it, or the fork server died."""


@dataclass(frozen=True, kw_only=True)
class ReplicatorAddress(Record):
    """The host's replicator was restarted."""

    memory: Address


@dataclass(frozen=True, kw_only=True)
class RanksProgress(Record):
    """A rank makes progress outside of steps."""

    attempt: Count


@dataclass(frozen=True, kw_only=True)
class RankExit(Record):
    """A rank's process has ended."""

    attempt: Count
    rank: Count
    pid: Count
    code: Annotated[Int64, "exit code; -N: ended by signal N"]
    step: Annotated[Step, "the last that it began"]
    last: Annotated[LastWords | None, "what it said before; None: nothing"] = None


@dataclass(frozen=True, kw_only=True)
class RankHang(Record):
    """A rank lives and makes no progress."""

    attempt: Count
    rank: Count
    evidence: str
    silent_s: Annotated[Seconds, "since its last progress"] = 0.0


@dataclass(frozen=True, kw_only=True)
class EvidenceReady(Record):
    """The answer to ``GatherEvidence``; or, after a rank's exit, what was captured of it and of the others here."""

    attempt: Count
    ranks: Annotated[tuple[str, ...], "of each rank: health.hang.evidence.RankEvidence as JSON"] = ()
    ras: Annotated[str, "the report of NCCL's RAS, from the host of rank 0"] = ""
    missing: Annotated[tuple[str, ...], "what of the host could not be captured, a sentence each"] = ()
    exited: Annotated[Count | None, "the rank that has exited; None: the run hangs"] = None


@dataclass(frozen=True, kw_only=True)
class ResetResult(Record):
    """How a reset of GPUs ended."""

    ok: bool
    evidence: str


@dataclass(frozen=True, kw_only=True)
class RanksEnded(Record):
    """The answer to ``EndAttempt``: every rank is gone or paused, the GPUs are reset."""

    attempt: Count
    snapshots: Annotated[tuple[SnapshotCopy, ...], "what the host holds"] = ()
    kept: Annotated[Mapping[Count, Step], "rank -> the step after which it paused"] = field(default_factory=dict)
    reset: ResetResult | None = None


@dataclass(frozen=True, kw_only=True)
class SnapshotsFlushed(Record):
    """The answer to ``FlushSnapshots``."""

    step: Step
    attempt: Count
    files: Annotated[tuple[FlushedFile, ...], "none: the version is committed already"] = ()
    failure: Annotated[str | None, "why not; None: it is written"] = None
    rejected: Annotated[tuple[SnapshotCopy, ...], "copies that are not intact"] = ()


@dataclass(frozen=True, kw_only=True)
class FlushCommitted(Record):
    """The answer to ``CommitFlushed``."""

    step: Step
    attempt: Count
    uri: Annotated[str, "the checkpoint"] = ""
    bytes: Count = 0
    failure: Annotated[str | None, "why not; None: it is committed"] = None


@dataclass(frozen=True, kw_only=True)
class SnapshotsRejected(Record):
    """Copies that are not intact, found elsewhere than by a rank that starts or a flush."""

    copies: tuple[SnapshotCopy, ...]
    reason: str


@dataclass(frozen=True, kw_only=True)
class StartFailed(Record):
    """The host cannot start ranks."""

    reason: str
    exit_code: Int64 = 1
    hint: str | None = None


@dataclass(frozen=True, kw_only=True)
class HostNotice(Record):
    """The host is being taken away."""

    notice: str
    source: str
    grace_s: Seconds


@dataclass(frozen=True, kw_only=True)
class HostFault(Record):
    """The host's own look at its hardware found a fault."""

    verdict: Annotated[Literal["reset", "drain", "replace"], "what it asks for"]
    evidence: Annotated[str, "one sentence with values"]
    resettable: Annotated[tuple[Count, ...], "GPUs that a reset may repair"] = ()
    at_ns: Annotated[Int64, "the host's monotonic clock: the same where it is repeated"] = 0
    sound_step: Annotated[Step | None, "of an error of memory: the last step that its ranks had taken"] = None
    attempt: Annotated[Count, "in which they had"] = 0


@dataclass(frozen=True, kw_only=True)
class HostLooked(Record):
    """The host has looked at its hardware: by itself before ranks use it, or asked by ``LookAtHost``."""

    number: Annotated[Count, "of the question; 0: by itself"] = 0
    look: HostLook
    at_ns: Annotated[Int64, "the host's monotonic clock"] = 0


@dataclass(frozen=True, kw_only=True)
class Pong(Record):
    """The answer to ``Ping``."""

    number: Count
    mono_ns: Int64


@dataclass(frozen=True, kw_only=True)
class Beat(Record):
    """The host lives."""


#: The only frame that a watchdog sends after its hello. It is not encoded for each beat, nor decoded.
BEAT_FRAME = encode(Beat())


Greeting: TypeAlias = AgentHello | BeatHello | ClientHello
FromAgent: TypeAlias = (
    HostReady
    | HostPreparing
    | StoreAddress
    | StoreLost
    | ReplicatorAddress
    | RanksProgress
    | RankEvent
    | RankExit
    | RankHang
    | EvidenceReady
    | RanksEnded
    | SnapshotsFlushed
    | FlushCommitted
    | SnapshotsRejected
    | StartFailed
    | HostNotice
    | HostFault
    | HostLooked
    | Pong
    | AgentHello
)
GREETING: Channel[Greeting] = Channel(
    name="first message to the supervisor",
    sender="agent, watchdog or client",
    receiver="supervisor",
    over="TCP",
    messages=get_args(Greeting),
)
FROM_AGENT: Channel[FromAgent] = Channel(
    name="agent to supervisor", sender="agent", receiver="supervisor", over="TCP", messages=get_args(FromAgent)
)
FROM_WATCHDOG: Channel[Beat] = Channel(
    name="watchdog to supervisor", sender="watchdog", receiver="supervisor", over="TCP", messages=(Beat,)
)
TO_WATCHDOG: Channel[Refused] = Channel(
    name="supervisor to watchdog", sender="supervisor", receiver="watchdog", over="TCP", messages=(Refused,)
)
