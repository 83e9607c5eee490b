"""What the supervisor knows in every phase; ``replay.rebuild_state`` rebuilds it from a log."""

from __future__ import annotations

import enum
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from muster.core.batch_schedule import BatchSegment
from muster.core.incidents import IncidentTraits
from muster.core.layout import Layout
from muster.core.snapshots import SnapshotCopy
from muster.core.typed_json import JsonObject
from muster.core.types import Topology
from muster.protocol.values import Address
from muster.supervise.recovery.inputs import SECOND_NS
from muster.supervise.recovery.phases import (
    Adopting,
    Draining,
    Flushing,
    Held,
    Phase,
    Running,
    Starting,
    Stopping,
    Waiting,
)

#: Step times that are remembered: the time a rank gets to pause follows from the longest of them.
RECENT_STEPS = 8


@dataclass(frozen=True, kw_only=True)
class Attempt:
    """The world of ranks that was started last; kept after its end, since the next one takes over what it can."""

    hosts: tuple[str, ...] = ()
    """In the order of their ranks."""
    ranks: Mapping[int, str] = field(default_factory=dict)
    """Rank -> host."""
    layout: Layout = field(default_factory=Layout)
    resumed: tuple[int, int] | None = None
    """(step, attempt) of the version in memory that it started from."""
    holders: tuple[int, ...] = ()
    """For each of ``hosts``, by index, the one that holds copies of its snapshots (``policy.snapshot_holders``)."""


@dataclass(kw_only=True)
class Progress:
    """How far the attempt has come, and which of its ranks are gone."""

    stepped: bool = False
    exited: dict[int, int] = field(default_factory=dict)
    """Rank -> exit code."""
    blamed: set[int] = field(default_factory=set)
    """Ranks that an incident names."""
    stragglers: set[tuple[int | None, str]] = field(default_factory=set)
    """Rank and cause of the ones that were named; each is once an attempt."""


@dataclass(frozen=True, kw_only=True)
class Fault:
    """A report on a host's health that is not judged yet."""

    traits: IncidentTraits
    evidence: str
    resettable: tuple[int, ...] = ()
    detail: JsonObject = field(default_factory=dict)

    @property
    def gravity(self) -> int:
        """A reset may heal it; it asks to leave once there is a spare; it is to be replaced."""
        return 0 if self.resettable else 1 if self.detail.get("class") == "drain" else 2


class Link(enum.Enum):
    """A host's connection."""

    AWAY = 0
    CONNECTED = 1
    LATE = 2
    """Timed out while stopping its ranks; treated as lost, but a late reply is still accepted."""


@dataclass(kw_only=True)
class Readiness:
    """Whether a host could start ranks."""

    ready: bool = False
    start_failed: bool = False
    """Its agent could not prepare; a later ``ready`` clears it."""
    asked_about: bool = False
    """Since it became ready, the policy was asked whether to grow by it."""


@dataclass(kw_only=True)
class HostRanks:
    """What a host's agent last reported of its ranks."""

    attempt: int = 0
    alive: Mapping[int, int] = field(default_factory=dict)
    """Ranks running there (from its hello) -> pid."""
    exited: tuple[int, ...] = ()
    """Ranks of its attempt that have exited; their exit codes follow in messages."""
    retained: Mapping[int, int] = field(default_factory=dict)
    """Paused ranks of the attempt that was ended -> the step they are paused after."""
    snapshots: tuple[SnapshotCopy, ...] = ()


@dataclass(kw_only=True)
class Machine:
    """Where a host is, and where it listens."""

    place: Topology = field(default_factory=Topology)
    store: Address | None = None
    """Of its rendezvous store."""
    memory: Address | None = None
    """Where its snapshots can be fetched."""
    allocated: bool = False


@dataclass(frozen=True, kw_only=True)
class Quarantine:
    """A host is out of the run: for good, unless one of these is set."""

    for_s: float = 0.0
    until_return: bool = False
    """After a preemption notice, until the host has left and rejoined."""
    error: str | None = None
    """The error (``incidents.error_key``) that it is quarantined for; it is readmitted if that recurs elsewhere."""


@dataclass(kw_only=True)
class PreemptionNotice:
    """A host is to be taken away."""

    grace_s: float | None = None
    """Time until then; None: there is no notice."""
    lost_since: bool = False
    """The host was lost, since its last notice."""


@dataclass(kw_only=True)
class HostHealth:
    """What was reported on a host's hardware."""

    resettable: tuple[int, ...] = ()
    """GPUs that a reset may heal, by the health report."""
    fault: Fault | None = None
    """The gravest report that came while no attempt ran: judged before the next one starts."""
    reported: tuple[int, str] | None = None
    """The last report of its own look at its hardware (time, sentence): an agent repeats it when it connects."""
    resetting: bool = False
    """A reset was decided; it is tried once for each health report."""

    def keep(self, fault: Fault) -> None:
        """Judge it later, unless a graver one waits."""
        if self.fault is None or fault.gravity >= self.fault.gravity:
            self.fault = fault

    def take_fault(self) -> Fault | None:
        """The report that waits; it is judged now."""
        fault, self.fault = self.fault, None
        if fault is not None:
            self.resettable = fault.resettable
        return fault


@dataclass(kw_only=True)
class Host:
    """One host as the supervisor knows it."""

    name: str
    link: Link = Link.AWAY
    readiness: Readiness = field(default_factory=Readiness)
    ranks: HostRanks = field(default_factory=HostRanks)
    machine: Machine = field(default_factory=Machine)
    quarantine: Quarantine | None = None
    notice: PreemptionNotice = field(default_factory=PreemptionNotice)
    health: HostHealth = field(default_factory=HostHealth)
    failures_ns: list[int] = field(default_factory=list)

    @property
    def connected(self) -> bool:
        return self.link is Link.CONNECTED

    @property
    def quarantined(self) -> bool:
        return self.quarantine is not None


@dataclass(kw_only=True)
class OpenIncident:
    """An incident from its detection to the first new step."""

    incident_id: str
    kind: str
    detected_ns: int
    last_applied_step: int
    secondary: bool = False
    """The report was a consequence (a lost peer); its cause may follow."""
    host: str | None = None
    """Where it was reported."""
    counts: bool = True
    """The attempt after it counts as one without progress. Not where a snapshot was rejected: the next one has fewer
    to choose from, so that ends."""
    stages_ns: dict[str, int] = field(default_factory=dict)


@dataclass(kw_only=True)
class Steps:
    """Steps of the run, over all attempts."""

    last_applied: int = 0
    recent_s: deque[float] = field(default_factory=lambda: deque(maxlen=RECENT_STEPS))
    """Times of the last steps."""
    skipped: set[int] = field(default_factory=set)
    """Steps whose update is left out."""
    batch_schedule: tuple[BatchSegment, ...] = ()
    """Changes of batch and rate so far (``core.batch_schedule``)."""


@dataclass(kw_only=True)
class Saves:
    """What of the training state is saved, and which copies of it are not to be trusted."""

    committed_step: int = 0
    """Newest step whose checkpoint on disk or in the bucket has its marker; 0: none."""
    failed: str | None = None
    """Why the ranks' last save failed; None: it succeeded, or there was none."""
    distrusted: dict[int, int] = field(default_factory=dict)
    """Attempt -> its last step before an error of memory: no later snapshot that it took is restored."""
    rejected: set[SnapshotCopy] = field(default_factory=set)
    """Copies in memory that are not intact: none is chosen again."""

    def distrust(self, attempt: int | None, after: int | None) -> None:
        """Memory failed in this attempt; ``after``: the last step that cannot have suffered. None: it did not."""
        if attempt and after is not None:
            self.distrusted[attempt] = min(after, self.distrusted.get(attempt, after))

    def add_checkpoint(self, step: int | None, detail: JsonObject) -> None:
        """From a ``checkpoint.committed`` event."""
        if detail.get("tier") in ("disk", "bucket"):
            self.committed_step = max(self.committed_step, step or 0)
            self.failed = None


@dataclass(kw_only=True)
class Failures:
    """Attempts that incidents made necessary."""

    without_progress: int = 0
    """Since the last step that was new."""
    count: int = 0
    """Since ``watched_from_ns``; the ranks' interval of saves follows from it."""
    watched_from_ns: int | None = None


@dataclass(kw_only=True)
class Errors:
    """Errors that may recur, by ``incidents.error_key``."""

    counts: dict[str, int] = field(default_factory=dict)
    hosts: dict[str, list[str]] = field(default_factory=dict)
    """Where each occurred."""


@dataclass(kw_only=True)
class State:
    """Everything that the state machine remembers."""

    phase: Phase = field(default_factory=Starting)
    attempt: int = 0
    """The last number of an attempt; each is used once."""
    current: Attempt = field(default_factory=Attempt)
    progress: Progress = field(default_factory=Progress)
    """Of ``current``."""
    hosts: dict[str, Host] = field(default_factory=dict)
    open: OpenIncident | None = None
    next_incident: int = 1
    exits: dict[tuple[int, int], str] = field(default_factory=dict)
    """Attempt and rank of an exit -> its incident, until the evidence of it has come."""
    alarms: dict[str, int] = field(default_factory=dict)
    """Deadlines that are not a phase's: name -> time."""
    steps: Steps = field(default_factory=Steps)
    saves: Saves = field(default_factory=Saves)
    failures: Failures = field(default_factory=Failures)
    errors: Errors = field(default_factory=Errors)

    @property
    def last_applied_step(self) -> int:
        return self.steps.last_applied

    @property
    def active(self) -> tuple[str, ...]:
        return self.current.hosts

    @property
    def ranks(self) -> Mapping[int, str]:
        return self.current.ranks

    @property
    def layout(self) -> Layout:
        return self.current.layout

    @property
    def counted_on(self) -> tuple[str, ...]:
        """Hosts that run ranks, or will in the next attempt."""
        phase = self.phase
        if isinstance(phase, Draining | Waiting):
            return tuple(phase.next.hosts)
        return self.active if isinstance(phase, Running | Stopping | Flushing) else ()

    def keeps_faults_of(self, name: str) -> bool:
        """Whether what is reported on the host is for the policy: it runs ranks, or is to run the next."""
        if isinstance(self.phase, Starting):
            return True
        return name in (self.active if isinstance(self.phase, Held) else self.counted_on)

    # What follows is done by a supervisor that sees it happen, and by one that reads of it in the log.

    def begin_attempt(self, number: int, current: Attempt, now_ns: int) -> None:
        """A world of ranks is started."""
        self.attempt, self.current, self.progress = number, current, Progress()
        if self.open is not None:  # several hosts lost at once cost one attempt, not one each
            self.failures.without_progress += self.open.counts
            self.failures.count += 1
            self.open.stages_ns.setdefault("collected", now_ns - self.open.detected_ns)
            self.open.stages_ns["resume_step"] = max(current.resumed[0] if current.resumed else -1, 0)
            self.open.stages_ns["started"] = now_ns - self.open.detected_ns
        if self.failures.watched_from_ns is None:
            self.failures.watched_from_ns = now_ns

    def abandon(self) -> None:
        """Nothing of the attempt is left."""
        self.current, self.progress = Attempt(), Progress()

    def add_step(self, step: int, detail: JsonObject) -> bool:
        """The attempt has taken a step. True: its first."""
        first, self.progress.stepped = not self.progress.stepped, True
        step_ns = detail.get("step_ns")
        if isinstance(step_ns, int) and not (first and self.steps.recent_s):
            self.steps.recent_s.append(step_ns / SECOND_NS)  # the first one includes warm-up
        self.advance(step)
        return first

    def advance(self, step: int) -> None:
        """A step was applied."""
        if step > self.steps.last_applied:
            self.steps.last_applied = step
            self.failures.without_progress = 0
            if self.open is not None and "started" not in self.open.stages_ns:
                # A late report of the attempt that ends: it was applied all the same.
                self.open.last_applied_step = step

    def ranks_on(self, host: str) -> list[int]:
        """Ranks of the current attempt on ``host``."""
        return [rank for rank, name in self.ranks.items() if name == host]

    def open_incident(self, incident: OpenIncident) -> None:
        """A decision other than to ignore it: what it costs counts from here, unless an earlier one is still open."""
        if self.open is None or isinstance(self.phase, Running):
            self.open = incident

    def find_cause(self) -> bool:
        """Promote this report to the cause of the open incident, if that was only a symptom (a lost peer).

        True: it was. The failure that was charged to the symptom's host is cleared."""
        if self.open is None or not self.open.secondary:
            return False
        self.open.secondary = False
        host = self.hosts.get(self.open.host or "")
        if host is not None and self.open.detected_ns in host.failures_ns:
            host.failures_ns.remove(self.open.detected_ns)
        return True

    def reset_host(self, name: str) -> None:
        """A reset of its GPUs was decided, for when its ranks are ended."""
        if name in self.hosts:
            self.hosts[name].health.resetting = True
            self.progress.blamed |= set(self.ranks_on(name))

    def reject(self, copies: Iterable[SnapshotCopy]) -> None:
        """These are not intact."""
        self.saves.rejected |= set(copies)
        if self.open is not None:
            self.open.counts = False

    def restart(self, *, elsewhere: bool) -> None:
        """The run file was corrected: earlier failures no longer count. ``elsewhere``: it names another folder for
        checkpoints, where there are none."""
        self.errors = Errors()
        self.failures.without_progress, self.open = 0, None
        for host in self.hosts.values():
            host.readiness.start_failed = False  # the file may have been the reason
        if elsewhere:
            self.saves.committed_step = 0

    def shift(self, by_ns: int) -> None:
        """Put every time on another clock."""
        for host in self.hosts.values():
            host.failures_ns = [at_ns + by_ns for at_ns in host.failures_ns]
        self.alarms = {name: at_ns + by_ns for name, at_ns in self.alarms.items()}
        if self.open is not None:
            self.open.detected_ns += by_ns
        if self.failures.watched_from_ns is not None:
            self.failures.watched_from_ns += by_ns
        found = self.phase.found if isinstance(self.phase, Adopting) else self.phase
        if isinstance(found, Draining | Waiting) and found.next.waiting_since_ns is not None:
            found.next.waiting_since_ns += by_ns
        if found.deadline_ns is not None:
            found.deadline_ns += by_ns

    def postpone(self, by_ns: int) -> None:
        """Put off every deadline: no host received its orders during this time."""
        self.alarms = {name: at_ns + by_ns for name, at_ns in self.alarms.items()}
        for phase in (self.phase, self.phase.found) if isinstance(self.phase, Adopting) else (self.phase,):
            if phase.deadline_ns is not None:
                phase.deadline_ns += by_ns
            if isinstance(phase, Draining):
                orders = phase.waiting.items()
                phase.waiting = {
                    host: replace(order, answer_by_ns=order.answer_by_ns + by_ns) for host, order in orders
                }
            elif isinstance(phase, Flushing):
                phase.until_ns += by_ns
            elif isinstance(phase, Running) and phase.resize is not None:
                phase.resize = replace(phase.resize, until_ns=phase.resize.until_ns + by_ns)
