"""The supervisor's state, its inputs and its effects: plain values that the state machine folds."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from muster.config.spec import RunSpec
from muster.core.layout import Layout
from muster.policy.cluster_state import Policy
from muster.protocol.held_snapshots import Choice

SECOND_NS = 1_000_000_000
#: Step times that are remembered: the time a rank gets to pause follows from the longest of them.
RECENT_STEPS = 8


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What the state machine needs of a run file."""

    spec: RunSpec
    run_id: str
    run_dir: str
    ranks_per_host: int
    usd_per_host_hour: float | None = None
    """None: unknown."""
    drain_timeout_s: float = 7.0
    """Time for a host to end its ranks and list its snapshots; one that retains ranks has longer where steps are long
    (``retained_ranks.pause_s``)."""
    adopt_timeout_s: float = 5.0
    host_failure_window_s: float = 3600.0
    """How long a host's failures count, and how long a quarantine that expires lasts."""
    gather_notices_s: float = 0.5
    """Preemption notices within this time are answered together; ranks continue meanwhile."""

    @property
    def wanted_hosts(self) -> int:
        return self.spec.resources.hosts

    @property
    def min_hosts(self) -> int:
        return self.spec.resources.min_hosts or self.spec.resources.hosts


class Phase(StrEnum):
    """Where the run is."""

    STARTING = "starting"  # hosts are joining
    ADOPT = "adopt"  # a new supervisor waits for the hosts of the attempt it found in the log
    RUN = "run"  # ranks are starting or stepping
    DRAINING = "draining"  # ranks were ended; hosts report what they hold
    WAIT = "wait"  # too few hosts
    STOPPING = "stopping"  # ranks were asked to save and exit
    FLUSH = "flush"  # the run ends: hosts write what only their memory holds
    HELD_AFTER_FAILURE = "hold"  # failed by the user's own error; hosts stay warm
    ENDED = "ended"


@dataclass(kw_only=True)
class Host:
    """One host as the supervisor knows it."""

    name: str
    connected: bool = False
    has_connected: bool = False
    """Since this supervisor started; a host that has not may have been up all the time."""
    ready: bool = False
    quarantined: bool = False
    hold_off_s: float = 0.0
    """How long it is quarantined; 0: for good, or ``until_return``."""
    until_return: bool = False
    """Quarantined after a preemption notice until the host has left and rejoined."""
    quarantined_for_error: str | None = None
    """The error (``error_history.key_of``) it is quarantined for; it is readmitted if the error recurs elsewhere."""
    preemption_grace_s: float | None = None
    """Time until it is taken away, from a preemption notice."""
    drain_timed_out: bool = False
    """Timed out while stopping its ranks; treated as lost, but a late reply is still accepted."""
    store: tuple[str, int] | None = None
    """Where its rendezvous store listens."""
    memory: tuple[str, int] | None = None
    """Where its snapshots can be fetched."""
    snapshots: list[dict[str, Any]] = field(default_factory=list)
    failures_ns: list[int] = field(default_factory=list)
    allocated: bool = False
    asked_about: bool = False
    """Since it became ready, the policy was asked whether to grow by it."""
    start_failed: bool = False
    """Its agent could not prepare; a later ``ready`` clears it."""
    alive: dict[int, int] = field(default_factory=dict)
    """Ranks running there (from its hello) -> pid."""
    exited: set[int] = field(default_factory=set)
    """Ranks of its attempt that have exited; their exit codes follow in messages."""
    attempt: int = 0
    resettable: tuple[int, ...] = ()
    """GPUs that a reset may heal, by the health report."""
    resetting: bool = False
    """A reset was decided; it is tried once for each health report."""
    retained: dict[int, int] = field(default_factory=dict)
    """Paused ranks of the attempt that was ended -> the step they are paused after."""
    end_message: Mapping[str, Any] = field(default_factory=dict)
    """The message that ends its ranks; sent again to an agent that restarts before it has answered."""
    answer_by_ns: int = 0
    """Without an answer to ``end_message`` by then the host counts as lost."""


@dataclass(kw_only=True)
class OpenIncident:
    """An incident from its detection to the first new step."""

    incident_id: str
    kind: str
    detected_ns: int
    last_applied_step: int
    secondary: bool = False
    """The report was a consequence (a lost peer); its cause may follow."""
    stages_ns: dict[str, int] = field(default_factory=dict)


@dataclass(kw_only=True)
class Ending:
    """How the run will end, once what only memory holds is written (``final_flush``)."""

    outcome: str
    exit_code: int
    reason: str
    until_ns: int = 0
    waiting: dict[str, int] = field(default_factory=dict)
    """Host -> answers still due; only the last one counts."""
    answered: set[str] = field(default_factory=set)
    """Hosts that have listed their snapshots."""
    choice: Choice | None = None
    """The version being written; None: the hosts' lists are awaited."""
    files: list[Mapping[str, Any]] = field(default_factory=list)
    """What was written, as the hosts report it."""
    writers: list[str] = field(default_factory=list)
    committing: bool = False
    given_up: set[tuple[int, int]] = field(default_factory=set)
    """(step, attempt) of versions that could not be written."""
    problem: str = ""
    """What last went wrong with it."""


@dataclass(kw_only=True)
class State:
    """Everything the state machine remembers; ``replay.rebuild_state`` rebuilds it from a log."""

    phase: Phase = Phase.STARTING
    attempt: int = 0
    hosts: dict[str, Host] = field(default_factory=dict)
    active: list[str] = field(default_factory=list)
    ranks: dict[int, str] = field(default_factory=dict)
    """Rank -> host, of the current attempt."""
    layout: Layout = field(default_factory=Layout)
    exited: dict[int, int] = field(default_factory=dict)
    """Rank -> exit code, of the current attempt."""
    blamed: set[int] = field(default_factory=set)
    """Ranks of the current attempt that an incident names."""
    last_applied_step: int = 0
    recent_step_s: deque[float] = field(default_factory=lambda: deque(maxlen=RECENT_STEPS))
    """Times of the last steps."""
    committed_step: int = 0
    """Newest step whose checkpoint on disk or in the bucket has its marker; 0: none."""
    save_failed: str | None = None
    """Why the ranks' last save failed; None: it succeeded, or there was none."""
    stepped: bool = False
    """This attempt has taken a step."""
    restarts_without_progress: int = 0
    failures: int = 0
    """Attempts that an incident made necessary, since ``watched_from_ns``; the ranks' interval of saves follows from
    it. A supervisor that takes over counts from zero."""
    watched_from_ns: int | None = None
    error_counts: dict[str, int] = field(default_factory=dict)
    """Error at a step (``error_history.key_of``) -> how often."""
    error_hosts: dict[str, list[str]] = field(default_factory=dict)
    """The same -> the hosts it occurred on."""
    resumed: tuple[int, int] | None = None
    """(step, attempt) of the version in memory that the current attempt started from."""
    alarms: dict[str, int] = field(default_factory=dict)
    """Additional deadlines: name -> time."""
    skip_steps: set[int] = field(default_factory=set)
    """Steps whose update is left out."""
    next_incident: int = 1
    batch_schedule: list[dict[str, Any]] = field(default_factory=list)
    """Changes of batch and rate so far (``core.batch_schedule``)."""
    open: OpenIncident | None = None
    target: list[str] = field(default_factory=list)
    """Hosts of the next attempt, while draining or waiting."""
    draining: set[str] = field(default_factory=set)
    """Hosts that have not reported the end of their ranks yet."""
    needed_hosts: int = 0
    """With fewer hosts the next attempt is not started; 0: the run's minimum."""
    waiting_since_ns: int | None = None
    deadline_ns: int | None = None
    stop: tuple[str, int] | None = None
    """(outcome, exit code) once the run has been asked to end."""
    stop_source: str = ""
    """What requested it."""
    stop_asked: bool = False
    """A user or scheduler requested it; a second request does not wait. (A notice to the hosts does not count.)"""
    stop_saves: bool = True
    """The stop asked for a save."""
    stop_before: StopRequest | None = None
    """A request to an earlier supervisor that the log shows as unfinished."""
    resizing: bool = False
    """The ranks were asked to exit after their step, for an attempt on more hosts."""
    resize_deadline_ns: int = 0
    """Ranks that continue meanwhile, because a save is running, may do so until then."""
    final_result: tuple[int, str] | None = None
    """(exit code, reason) of the decision to stop."""
    ending: Ending | None = None
    unreadable_snapshots: set[tuple[int, int]] = field(default_factory=set)
    """(step, attempt) of versions in memory that turned out to be unreadable."""
    asked: StopRequest | None = None
    """A stop request that came before the hosts had answered this supervisor."""
    deferred: list[FromHost] = field(default_factory=list)
    """Reports from before all hosts had answered; handled once it is known whether the attempt continues."""
    adopted: int = 0
    """The attempt that an earlier supervisor started and this one took over; 0: none."""

    def add_step_time(self, detail: Mapping[str, Any], *, first: bool = False) -> None:
        """From a ``step`` event. An attempt's ``first`` one includes warm-up: it counts only if no other is known."""
        step_ns = detail.get("step_ns")
        if isinstance(step_ns, int) and not (first and self.recent_step_s):
            self.recent_step_s.append(step_ns / SECOND_NS)

    def add_checkpoint(self, event: Mapping[str, Any]) -> None:
        """A ``checkpoint.committed`` event, as a mapping."""
        if (event.get("detail") or {}).get("tier") in ("disk", "bucket"):
            self.committed_step = max(self.committed_step, int(event.get("step") or 0))
            self.save_failed = None


# ---------------------------------------------------------------- inputs


@dataclass(frozen=True, kw_only=True)
class HostUp:
    host: str
    hello: Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class HostDown:
    host: str
    reason: str
    silent_s: float = 0.0
    """Since its last heartbeat: the greatest age of the fault."""


@dataclass(frozen=True, kw_only=True)
class FromHost:
    host: str
    message: Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class StopRequest:
    """Ctrl-C (130), SIGTERM (75), ``muster stop`` (130). ``force``: do not wait for a save."""

    source: str
    exit_code: int
    save: bool = True
    force: bool = False


@dataclass(frozen=True, kw_only=True)
class RestartRequest:
    """``muster restart``: the run file was corrected; start again on the hosts that are held."""

    settings: Settings
    policy: Policy | None = None
    """As the corrected file names it; None: as before."""


@dataclass(frozen=True, kw_only=True)
class Tick:
    """A deadline has passed."""


Input = HostUp | HostDown | FromHost | StopRequest | RestartRequest | Tick

# ---------------------------------------------------------------- effects, carried out in order


@dataclass(frozen=True, kw_only=True)
class Log:
    """Append an event to the supervisor's log (and the disk, where ``sync``)."""

    kind: str
    detail: Mapping[str, Any] = field(default_factory=dict)
    host: str | None = None
    rank: int | None = None
    step: int | None = None
    phase: str | None = None
    sync: bool = False


@dataclass(frozen=True, kw_only=True)
class Send:
    host: str
    message: Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class End:
    """The run is over; ``outcome`` succeeded, failed, stopped or preempted."""

    exit_code: int
    outcome: str
    reason: str


Effect = Log | Send | End
