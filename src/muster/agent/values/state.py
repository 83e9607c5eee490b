"""All that an agent knows: plain values, which only ``decide`` and what it calls change."""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from muster.agent.values.actions import Action, Log, LogRankEvent, SendTo
from muster.agent.values.events import Counters, PeerId
from muster.agent.values.host_identity import HostIdentity
from muster.agent.values.kernel_faults import KernelFaults
from muster.agent.values.rank import Gathering, Rank
from muster.config.spec import RunSpec
from muster.core.typed_json import JsonObject
from muster.protocol.held_snapshots import Choice
from muster.protocol.pipes import DataFailed, DataPrepared
from muster.protocol.ranks import RankContext
from muster.protocol.replicator_orders import CopyTo, FetchVersion, FlushOrder
from muster.protocol.to_supervisor import (
    FlushCommitted,
    FromAgent,
    HostLooked,
    RankExit,
    ResetResult,
    SnapshotsFlushed,
    StartFailed,
)
from muster.protocol.values import Address, RankEvent

NEVER = math.inf
FlushAnswer = SnapshotsFlushed | FlushCommitted


@dataclass(kw_only=True)
class Standby:
    """A forked process that waits for a rank."""

    pid: int
    peer: PeerId
    local_rank: int = 0
    """The rank of the host that it was forked for."""
    bound: bool = False
    """It holds a CUDA context on that local rank's GPU, so that it can take no other."""
    warm: bool = False
    """It has run the work of a first step in advance, or cannot."""


@dataclass
class StepClock:
    """How long a step takes, and so how long one may take. Fed by one rank's steps: all ranks take them together."""

    steps_s: deque[float] = field(default_factory=lambda: deque(maxlen=20))
    last_s: float | None = None
    limit_s: float = 600.0

    def on_step(self, now_s: float) -> None:
        if self.last_s is not None:
            self.steps_s.append(now_s - self.last_s)
            self.limit_s = max(30.0, 10 * statistics.median(self.steps_s))
        self.last_s = now_s


@dataclass
class Ranks:
    """The processes that are, or will be, ranks of the host's attempt."""

    table: dict[int, Rank] = field(default_factory=dict)
    """By pid; also those whose end is half known."""
    attempt: int = 0
    ending: int | None = None
    """The attempt whose ranks are being ended."""
    ended: int = 0
    """The newest attempt whose ranks were to be ended."""
    exits: dict[int, RankExit] = field(default_factory=dict)
    """Rank -> its report, of the current attempt."""
    queue: list[RankContext] = field(default_factory=list)
    """Those that wait for a process: the data has to be there, and a standby."""
    standbys: dict[int, Standby] = field(default_factory=dict)
    """By pid."""
    silent: set[int] = field(default_factory=set)
    """Children of the fork server that have not registered with this agent (stopped, or holding Python's lock)."""
    ending_unregistered: set[int] = field(default_factory=set)
    """Those of them that were killed and still exist. They hold GPU memory."""
    pause_by_s: float = 0.0
    clock: StepClock = field(default_factory=StepClock)
    newest_step: int = 0
    progress_sent_s: float = 0.0

    def living(self) -> list[Rank]:
        return [rank for rank in self.table.values() if rank.is_living]

    def of_peer(self, peer: PeerId) -> Rank | None:
        return next((rank for rank in self.table.values() if rank.peer == peer), None)


@dataclass
class ForkServer:
    """At most one. It outlives the agent, and connects to the agent's successor by itself."""

    peer: PeerId | None = None
    pid: int | None = None
    store: Address | None = None
    """Its rendezvous store, which no attempt was given; None while there is none."""
    may_miss_start: bool = False
    """An order to start, which may give the store to ranks elsewhere, may have been lost."""
    socket: str = ""
    """Where it looks for an agent."""
    started: bool = False
    follows: bool = False
    """Another agent was here before: its ranks may live, and connect by themselves."""
    awaited: bool = False
    """A dead agent's that lives, and has not connected yet: its children are not known."""
    deaths: int = 0
    again_s: float = NEVER
    """When one is started that could not be before."""
    spawning: set[int] = field(default_factory=set)
    """Local ranks whose standbys were ordered and have not registered yet."""
    registered: set[int] = field(default_factory=set)
    """Pids of its children that have."""
    stillborn: int = 0
    """How many in a row have not."""
    contexts_fail: bool = False
    """A standby could not open a context on its GPU: none tries again."""


@dataclass
class Link:
    """The connection to the supervisor that holds the lease, and what is kept for one that is absent."""

    peer: PeerId | None = None
    address: Address | None = None
    connecting: bool = False
    search_s: float = 0.0
    """When a supervisor is looked for next."""
    lease_check_s: float = 0.0
    contact_after_s: float = 0.0
    """No supervisor is greeted before."""
    kept: dict[str, StartFailed] = field(default_factory=dict)
    committed: RankEvent | None = None
    """A checkpoint that was not reported: ranks repeat what a dead agent may not have heard, before its successor
    looks for a supervisor. Unaware of it, that would start from an older version in memory."""
    refusal: str = ""
    is_released: bool = False
    """By the lease when it was read last."""


@dataclass
class Leaving:
    """Why and when this host goes: a notice, or no supervisor and no work."""

    unreported: str = ""
    """The source of a notice that was not reported to a supervisor yet."""
    reported: str = ""
    """The source of one that was."""
    gone_s: float = 0.0
    """When this host is taken away."""
    alone_s: float = 0.0
    """Since when it has had neither a supervisor nor work."""
    was_held: bool | None = None
    """The lease was held during this agent's life; None: it was not read yet."""
    saving: Choice | None = None
    save_by_s: float = 0.0
    failed: set[tuple[int, int]] = field(default_factory=set)
    """(step, attempt) of versions that could not be saved."""
    reason: str | None = None
    """Set once this agent is to exit."""
    code: int = 0
    error: str = ""


@dataclass
class Preparation:
    """The host's setup, then its data."""

    digest: str = ""
    setup_began_s: float = 0.0
    prepared: bool = False
    running: bool = False
    kills: int = 0
    noted_s: float = 0.0
    result: DataPrepared | DataFailed | None = None
    failure: StartFailed | None = None
    """Why the data is not there, as it was reported last."""
    retry_s: float = NEVER


@dataclass
class GpuReset:
    """At most one, once the ranks are gone."""

    ordered: tuple[int, ...] = ()
    gpus: tuple[int, ...] = ()
    by_s: float = NEVER
    """When one that runs is given up."""
    result: ResetResult | None = None

    @property
    def running(self) -> bool:
        return self.by_s < NEVER


@dataclass
class Trackers:
    """The program that copies the run's figures to its trackers, on the host of rank 0."""

    running: bool = False
    spec: RunSpec | None = None
    """The run file that was followed last: another one may name other trackers."""
    attempt: int = 0
    died_s: float = -NEVER
    retry_s: float = NEVER


@dataclass
class Replicator:
    """One at a time. A successor gets its orders again: where copies go and what is being fetched."""

    pid: int | None = None
    started_s: float = 0.0
    first_by_s: float = 0.0
    """Until then the first hello to a supervisor waits for the address."""
    address: Address | None = None
    """Where other hosts' replicators connect."""
    port: int = 0
    listening: bool = False
    """It has bound its sockets."""
    is_replaced: bool = False
    """It was ended for a successor."""
    again_s: float = NEVER
    young_deaths: int = 0
    copies: CopyTo | None = None
    fetches: list[FetchVersion] = field(default_factory=list)
    flushes: list[FlushOrder] = field(default_factory=list)
    """Without an answer yet, oldest first."""
    looked_s: float = 0.0
    stopped_s: float | None = None


@dataclass
class Check:
    """A look at the host's hardware."""

    part: Literal["passive", "full"] | None = None
    """That runs."""
    begun_s: float = 0.0
    numbers: list[int] = field(default_factory=list)
    """The questions that it answers; 0: the agent's own."""
    unsent: list[HostLooked] = field(default_factory=list)
    ready_by_s: float = -NEVER
    """Until then a start waits for what runs; inf: until it has ended."""


@dataclass
class Usage:
    """What the steps of the ranks use."""

    next_s: float = 0.0
    seen: tuple[int, int] = (0, -1)
    """Attempt and step that all ranks here are in."""
    since: tuple[int, Counters] | None = None
    """The last step of which the newest event tells, and what was counted then."""
    has_tool: bool = False
    asked: int = 0
    """The attempt for which the tool was started: one that ends is not started again in it."""
    busy: dict[str, list[float]] = field(default_factory=dict)
    """By PCI address: shares."""
    memory_bytes: dict[str, int] = field(default_factory=dict)


@dataclass
class Hardware:
    gpus: Mapping[str, int] = field(default_factory=dict)
    own: frozenset[str] | None = None
    has_ports: bool = False
    sees_all_pids: bool = False
    faults: KernelFaults = field(default_factory=KernelFaults)
    check: Check = field(default_factory=Check)
    usage: Usage = field(default_factory=Usage)
    no_kmsg: str = ""
    """Why ``dmesg`` follows the kernel log."""
    node_xids: set[int] = field(default_factory=set)
    """That the node's condition has named."""
    node_since_ns: int = 0

    @property
    def is_whole(self) -> bool:
        """The machine's GPUs are this host's alone, but for other agents of the run."""
        return self.own is None or self.own >= self.gpus.keys()


@dataclass
class Memory:
    next_s: float = 0.0
    trouble: str = ""


@dataclass(kw_only=True)
class HostState:
    identity: HostIdentity
    spec: RunSpec
    writer: str
    """What names this host's event files."""
    newest_attempt: int = 0
    """That a supervisor named: a flush is committed in its name."""
    is_ready: bool = False
    warm_by_s: float | None = None
    """When a host that joins a run is ready, warm or not; None: it is not yet warming up."""
    ranks: Ranks = field(default_factory=Ranks)
    fork_server: ForkServer = field(default_factory=ForkServer)
    link: Link = field(default_factory=Link)
    leaving: Leaving = field(default_factory=Leaving)
    preparation: Preparation = field(default_factory=Preparation)
    reset: GpuReset = field(default_factory=GpuReset)
    trackers: Trackers = field(default_factory=Trackers)
    replicator: Replicator = field(default_factory=Replicator)
    hardware: Hardware = field(default_factory=Hardware)
    memory: Memory = field(default_factory=Memory)
    gathering: Gathering | None = None

    @property
    def host(self) -> str:
        return self.identity.host

    @property
    def is_supervised(self) -> bool:
        return self.link.peer is not None

    @property
    def ranks_per_host(self) -> int:
        return self.spec.resources.ranks_per_host or 1

    @property
    def takes_snapshots(self) -> bool:
        return bool(self.spec.checkpoint.snapshot_every_steps)

    @property
    def memory_address(self) -> Address | None:
        """Where other hosts fetch this one's snapshots; None where it holds none."""
        return self.replicator.address if self.takes_snapshots else None

    @property
    def fence(self) -> int:
        """The newest attempt that this host knows of."""
        return max(self.newest_attempt, self.ranks.attempt)

    @property
    def is_joining(self) -> bool:
        """The run began without this host."""
        return self.newest_attempt > 0 and self.ranks.attempt == 0

    def reaps(self, parent: int) -> bool:
        """The connected fork server is ``parent``: it reports its children's exit codes, and that one is stopped."""
        return self.fork_server.peer is not None and parent == self.fork_server.pid


@dataclass
class HostContext:
    """One event's judgement: the state, the time, and what is to be done."""

    state: HostState
    now_s: float
    wall_ns: int
    actions: list[Action] = field(default_factory=list)
    flushed: list[tuple[FlushAnswer, FlushOrder]] = field(default_factory=list)
    """What the replicator has answered, or what was answered in its place."""

    @property
    def mono_ns(self) -> int:
        return int(self.now_s * 1e9)

    def do(self, *actions: Action) -> None:
        self.actions += actions

    def report(self, message: FromAgent) -> None:
        """To a connected supervisor."""
        if (peer := self.state.link.peer) is not None:
            self.do(SendTo(peer, message))

    def log(self, kind: str, detail: Mapping[str, Any], *, rank: int | None = None) -> None:
        self.do(Log(kind, detail, rank))

    def note(self, text: str) -> None:
        """An informational message of the run's log."""
        self.log("run.message", {"text": text})

    def tell(self, kind: str, detail: JsonObject, *, attempt: int, step: int | None = None) -> None:
        """Log an event of this host, and have it shown where the run is watched."""
        self.do(
            LogRankEvent(
                RankEvent(
                    kind=kind, attempt=attempt, step=step, mono_ns=self.mono_ns, wall_ns=self.wall_ns, detail=detail
                )
            )
        )

    def keep_failure(self, what: str, failure: StartFailed | None) -> None:
        """What this host cannot start: for the supervisor, and for each one that connects later. None: it can again."""
        self.state.link.kept.pop(what, None)
        if failure is not None:
            self.state.link.kept[what] = failure
            self.report(failure)

    def exit(self, reason: str, *, code: int = 0, error: str = "") -> None:
        """Exit once the messages at hand are answered. ``error`` is printed."""
        leaving = self.state.leaving
        if leaving.reason is None:
            leaving.reason, leaving.code, leaving.error = reason, code, error
