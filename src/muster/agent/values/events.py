"""What happens to an agent, as values: read by its edge, or the answer to an action, and judged by ``decide``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeAlias

from muster.config.spec import RunSpec
from muster.core.snapshots import SnapshotCopy
from muster.protocol.fork_server import FromForkServer
from muster.protocol.rank_agent import FromRank, HostGreeting
from muster.protocol.ranks import RankContext
from muster.protocol.replicator_orders import CopyTo, FetchVersion
from muster.protocol.to_agent import ToAgent
from muster.protocol.to_supervisor import RankExit, StartFailed
from muster.protocol.values import Address, RankEvent

#: A connection, by the number that the edge gave it.
PeerId: TypeAlias = int

# ---------------------------------------------------------------- read by the edge


@dataclass(frozen=True)
class Started:
    """The loop begins."""


@dataclass(frozen=True)
class Tick:
    """The last event of each turn: what is due by the clock."""


@dataclass(frozen=True)
class Greeted:
    peer: PeerId
    hello: HostGreeting


@dataclass(frozen=True)
class RankMessage:
    """A message of a rank or a standby."""

    peer: PeerId
    message: FromRank


@dataclass(frozen=True)
class ForkServerMessage:
    message: FromForkServer
    tail: str = ""
    """The end of the log of a child that SIGABRT ended."""


@dataclass(frozen=True)
class SupervisorMessage:
    message: ToAgent


@dataclass(frozen=True)
class PeerLost:
    peer: PeerId


@dataclass(frozen=True)
class RankExiting:
    """A rank begins to go. All that it sent was read before."""

    pid: int
    signal: int | None
    """That ends it; None: none does, or it is not known."""
    tail: str = ""
    """As of ``ForkServerMessage``."""


@dataclass(frozen=True)
class RankThreadsEnded:
    pid: int
    has_room: bool
    """There is room on the host for the memory of another one."""


@dataclass(frozen=True)
class ProcessGone:
    """A watched process no longer exists. All that it sent was read before."""

    pid: int


@dataclass(frozen=True)
class ProgramLine:
    program: str
    line: bytes


@dataclass(frozen=True)
class ProgramEnded:
    """Of the newest program with this name alone."""

    program: str
    code: int | None
    """None: it was left, was not started, or is no child of this agent."""
    output: bytes = b""
    """All that it wrote, where it is not read by lines; the last line of its log, where that has all of it."""
    failure: StartFailed | None = None


@dataclass(frozen=True)
class KernelLine:
    text: str


@dataclass(frozen=True)
class KernelLogLost:
    reason: str
    once_open: bool = False
    """It was open, and cannot be read any longer."""


@dataclass(frozen=True)
class RasAnswered:
    report: str
    problem: str


@dataclass(frozen=True)
class RunFileRead:
    spec: RunSpec


@dataclass(frozen=True)
class Noted:
    """For the run's log."""

    text: str


@dataclass(frozen=True)
class SupervisorConnected:
    peer: PeerId


@dataclass(frozen=True)
class SupervisorUnreachable:
    pass


@dataclass(frozen=True)
class Noticed:
    """This host is being taken away."""

    source: str


@dataclass(frozen=True)
class WatchdogGone:
    pass


# ---------------------------------------------------------------- answers to actions


@dataclass(frozen=True)
class Killed:
    pid: int
    was_exiting: bool


@dataclass(frozen=True)
class RankWatched:
    pid: int
    parent: int
    is_stopped: bool


@dataclass(frozen=True)
class Looked:
    """At a rank, or at the replicator."""

    pid: int
    is_stopped: bool


@dataclass(frozen=True)
class StatePrepared:
    attempt: int
    contexts: tuple[RankContext, ...]
    copies: CopyTo | None = None
    fetches: tuple[FetchVersion, ...] = ()


@dataclass(frozen=True)
class StateNotPrepared:
    attempt: int
    reason: str


@dataclass(frozen=True)
class SnapshotsListed:
    held: tuple[SnapshotCopy, ...]
    refusal: str = ""


@dataclass(frozen=True)
class ForkServerFound:
    pid: int | None
    """A dead agent's that lives; None: there is none."""
    follows: bool
    """Another agent was here before: its ranks may live, and connect by themselves."""


@dataclass(frozen=True)
class ProgramStarted:
    program: str
    pid: int


@dataclass(frozen=True)
class SetupFound:
    """``digest``: of the setup that this host is to have; empty: there is none. ``is_done``: it has had it."""

    digest: str
    is_done: bool


@dataclass(frozen=True)
class LeaseRead:
    address: Address | None
    is_changed: bool
    is_released: bool
    refusal: str = ""
    """Why its holder is not to be spoken to."""


@dataclass(frozen=True)
class MemoryChecked:
    """``renewed``: how the host's folder in memory was lost and made again; empty: it is the same."""

    socket: str
    renewed: str = ""
    rebound: bool = False
    has_replicator_socket: bool = True
    trouble: str = ""


@dataclass(frozen=True, kw_only=True)
class Counters:
    """As they stand at one moment; None: not to be read here."""

    at_ns: int
    ranks_cpu_s: Mapping[int, float]
    """By pid."""
    busy_ticks: int | None
    all_ticks: int | None
    received_bytes: int | None
    sent_bytes: int | None


@dataclass(frozen=True)
class CountersRead:
    step: int
    attempt: int
    counters: Counters
    memory: tuple[int, int] | None
    """(used, unused) bytes of the host."""


@dataclass(frozen=True)
class OomKills:
    """Since the last look, for a rank's exit."""

    exit: RankExit
    new: int


@dataclass(frozen=True)
class HardwareListed:
    gpus: Mapping[str, int]
    """PCI address -> the driver's number."""
    own: frozenset[str] | None
    """Addresses of the GPUs that this host's ranks may use; None: all."""
    has_ports: bool
    """Of RDMA."""
    sees_all_pids: bool
    """The kernel log's process numbers are this process's."""


@dataclass(frozen=True)
class EventLogged:
    """No dead agent had logged it before."""

    event: RankEvent


@dataclass(frozen=True)
class EventRefused:
    """A rank reported what is no event; its connection is closed."""

    peer: PeerId
    reason: str


Event: TypeAlias = (
    Started | Tick | Greeted | RankMessage | ForkServerMessage | SupervisorMessage | PeerLost | RankExiting
    | RankThreadsEnded | ProcessGone | ProgramLine | ProgramEnded | KernelLine | KernelLogLost | RasAnswered
    | RunFileRead | Noted | SupervisorConnected | SupervisorUnreachable | Noticed
    | WatchdogGone | Killed | RankWatched | Looked | StatePrepared | StateNotPrepared | SnapshotsListed
    | ForkServerFound | ProgramStarted | SetupFound | LeaseRead | MemoryChecked | CountersRead | OomKills
    | HardwareListed | EventLogged | EventRefused
)  # fmt: skip
