"""The supervisor's state, its inputs and its effects: plain values that the machine folds."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from muster.config.spec import RunSpec
from muster.core.layout import Layout
from muster.policy.cluster_state import Policy
from muster.supervise.recovery.layout import Choice

SECOND_NS = 1_000_000_000
#: Steps whose times are remembered: what a rank is given to stand still rests on the longest of them.
RECENT_STEPS = 8


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What the machine needs of a run file."""

    spec: RunSpec
    run_id: str
    run_dir: str
    ranks_per_host: int
    usd_per_host_hour: float | None = None
    """None: unknown."""
    drain_timeout_s: float = 7.0
    """A host ends its ranks and says what it holds within this time; one whose ranks are kept has longer where steps
    take long (``survivors.pause_s``)."""
    adopt_timeout_s: float = 5.0
    host_failure_window_s: float = 3600.0
    """A host's failures count for so long; one that is held off (a flapping link) is looked at again after it."""
    gather_notices_s: float = 0.5
    """Preemption notices that come within this time are answered as one; ranks step on meanwhile."""

    @property
    def wanted_hosts(self) -> int:
        return self.spec.resources.hosts

    @property
    def min_hosts(self) -> int:
        return self.spec.resources.min_hosts or self.spec.resources.hosts


class Phase(StrEnum):
    """Where the run is, from the supervisor's chair."""

    STARTING = "starting"  # hosts are joining
    ADOPT = "adopt"  # a new supervisor waits for the hosts of the attempt it found in the log
    RUN = "run"  # ranks are starting or stepping
    DRAINING = "draining"  # ranks were ended; hosts report what they hold
    WAIT = "wait"  # too few hosts
    STOPPING = "stopping"  # ranks were asked to save and leave
    FLUSH = "flush"  # the run ends: hosts write what only their memory holds
    HELD_AFTER_FAILURE = "hold"  # failed by the user's own error; hosts stay warm
    ENDED = "ended"


@dataclass(kw_only=True)
class Host:
    """One host as the supervisor knows it."""

    name: str
    connected: bool = False
    has_connected: bool = False
    """It has spoken to this supervisor; one that has not may have been here all the time."""
    ready: bool = False
    quarantined: bool = False
    hold_off_s: float = 0.0
    """It is quarantined for so long; 0: for good, or ``until_return``."""
    until_return: bool = False
    """It is quarantined until it went and came back (it was told to go)."""
    quarantined_for_error: str | None = None
    """The error (``repeats.key_of``) because of which it was taken out; if that comes again elsewhere, it is sound."""
    preemption_grace_s: float | None = None
    """It was told to go, with so much time to leave."""
    drain_timed_out: bool = False
    """It did not end its ranks in time and counts as lost, though it may answer yet."""
    store: tuple[str, int] | None = None
    """Where its rendezvous store listens."""
    memory: tuple[str, int] | None = None
    """Where its snapshots can be fetched."""
    snapshots: list[dict[str, Any]] = field(default_factory=list)
    failures_ns: list[int] = field(default_factory=list)
    allocated: bool = False
    asked_about: bool = False
    """The policy was asked whether the world should grow by it, since it came."""
    start_failed: bool = False
    """It said so; a later ``ready`` takes it back."""
    alive: dict[int, int] = field(default_factory=dict)
    """Ranks running there (from its hello) -> pid."""
    exited: set[int] = field(default_factory=set)
    """Ranks of its attempt that have left; their codes follow in messages."""
    attempt: int = 0
    resettable: tuple[int, ...] = ()
    """GPUs that the health verdict thinks a reset may heal."""
    resetting: bool = False
    """They are being reset; asked once, and then no more for this verdict."""
    retained: dict[int, int] = field(default_factory=dict)
    """Ranks of the attempt that was ended which stand still there -> the step they stand after."""
    end_order: Mapping[str, Any] = field(default_factory=dict)
    """How it was told to end its ranks; told again to an agent that begins anew before it has answered."""
    answer_by_ns: int = 0
    """Without an answer to it by then the host counts as lost."""


@dataclass(kw_only=True)
class OpenIncident:
    """An incident from its detection to the first new step."""

    incident_id: str
    kind: str
    detected_ns: int
    last_applied_step: int
    secondary: bool = False
    """A consequence (a peer was lost) was heard first; its cause may follow."""
    stages_ns: dict[str, int] = field(default_factory=dict)


@dataclass(kw_only=True)
class Ending:
    """How the run will end, once what only memory holds is written (``supervise.flush``)."""

    outcome: str
    exit_code: int
    reason: str
    until_ns: int = 0
    waiting: dict[str, int] = field(default_factory=dict)
    """Host -> answers that it owes; only the last of them counts."""
    answered: set[str] = field(default_factory=set)
    """Hosts that have said what they hold."""
    choice: Choice | None = None
    """The version that is being written; None: the hosts are being asked what they hold."""
    files: list[Mapping[str, Any]] = field(default_factory=list)
    """What was written, in the hosts' own words."""
    writers: list[str] = field(default_factory=list)
    committing: bool = False
    given_up: set[tuple[int, int]] = field(default_factory=set)
    """(step, attempt) of versions that could not be written."""
    why: str = ""
    """What last went wrong with it."""


@dataclass(kw_only=True)
class State:
    """Everything the machine remembers; ``fold.recover`` rebuilds it from a log."""

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
    """What the last steps took."""
    committed_step: int = 0
    save_failed: str | None = None
    """Why the ranks' last save came to nothing; None: it stands, or none was tried."""
    """Newest step whose checkpoint on disk or in the bucket has its marker; 0: none."""
    stepped: bool = False
    """This attempt has taken a step."""
    restarts_without_progress: int = 0
    failures: int = 0
    """Attempts that an incident made necessary, since ``watched_from_ns``: what the ranks' interval of saves rests
    on. A supervisor that takes over counts anew."""
    watched_from_ns: int | None = None
    error_counts: dict[str, int] = field(default_factory=dict)
    """Error at a step (``repeats.key_of``) -> how often."""
    error_hosts: dict[str, list[str]] = field(default_factory=dict)
    """The same -> the hosts it stood on."""
    resumed: tuple[int, int] | None = None
    """(step, attempt) of the version in memory that the current attempt began with."""
    alarms: dict[str, int] = field(default_factory=dict)
    """Besides ``deadline_ns``: what is to be looked at -> when."""
    skip_steps: set[int] = field(default_factory=set)
    """Steps whose update is left out."""
    next_incident: int = 1
    batch_schedule: list[dict[str, Any]] = field(default_factory=list)
    """Changes of batch and rate on the way (``core.course``)."""
    open: OpenIncident | None = None
    target: list[str] = field(default_factory=list)
    """Hosts of the attempt to come, while collecting or waiting."""
    draining: set[str] = field(default_factory=set)
    needed_hosts: int = 0
    """With fewer the next attempt is not begun; 0: the run's minimum."""
    waiting_since_ns: int | None = None
    deadline_ns: int | None = None
    stop: tuple[str, int] | None = None
    """(outcome, exit code) once the run has been asked to end."""
    stop_source: str = ""
    """By whom or what."""
    stop_asked: bool = False
    """Somebody asked for it: whoever asks again does not wait. (A notice to the hosts is nobody's asking.)"""
    stop_saves: bool = True
    """The stop asked for a save."""
    stop_before: StopRequest | None = None
    """What an earlier supervisor was asked and had not done: found in the log."""
    resizing: bool = False
    """The ranks were asked to leave after their step so that the world can grow."""
    resize_deadline_ns: int = 0
    """Ranks that step on meanwhile, since a save is under way, are let to until then."""
    final_result: tuple[int, str] | None = None
    ending: Ending | None = None
    unreadable_snapshots: set[tuple[int, int]] = field(default_factory=set)
    """(step, attempt) of versions in memory that turned out to be unreadable."""
    asked: StopRequest | None = None
    """A stop that came before the hosts had answered this supervisor."""
    deferred: list[FromHost] = field(default_factory=list)
    """What hosts reported before all of them had answered: judged once it is known whether the attempt goes on."""
    adopted: int = 0
    """The attempt that an earlier supervisor started and this one took over; 0: none."""

    def took(self, detail: Mapping[str, Any], *, first: bool = False) -> None:
        """The detail of a ``step`` event. An attempt's ``first`` one warms up: it counts where no other is known."""
        step_ns = detail.get("step_ns")
        if isinstance(step_ns, int) and not (first and self.recent_step_s):
            self.recent_step_s.append(step_ns / SECOND_NS)

    def committed(self, event: Mapping[str, Any]) -> None:
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
    why: str
    silent_s: float = 0.0
    """Since it was last heard: the fault can be so old."""


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
