"""What the state machine is given and what it answers: its settings, its inputs and its effects."""

from __future__ import annotations

from dataclasses import dataclass, field

from muster.config.spec import RunSpec
from muster.core.typed_json import JsonObject
from muster.policy.cluster_state import Policy
from muster.protocol.client import HealthReport
from muster.protocol.hello import AgentHello
from muster.protocol.to_agent import ToAgent
from muster.protocol.to_supervisor import FromAgent
from muster.storage import uris

SECOND_NS = 1_000_000_000


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
    host_failure_window_s: float = 3600.0
    """How long a host's failures count, and how long a quarantine that expires lasts."""
    gather_notices_s: float = 0.5
    """Preemption notices within this time are answered together; ranks continue meanwhile."""
    gather_evidence_s: float = 0.0
    """How long a hang's incident waits for what hosts capture of their ranks; 0: nothing is captured."""

    @property
    def wanted_hosts(self) -> int:
        return self.spec.resources.hosts

    @property
    def adopt_timeout_s(self) -> float:
        """Time for the hosts to connect to a new supervisor."""
        return self.spec.recovery.timing.adoption_s(in_bucket=not uris.is_local(self.spec.run_dir or ""))

    @property
    def min_hosts(self) -> int:
        return self.spec.resources.min_hosts or self.spec.resources.hosts


# ---------------------------------------------------------------- inputs


@dataclass(frozen=True, kw_only=True)
class HostUp:
    host: str
    hello: AgentHello


@dataclass(frozen=True, kw_only=True)
class HostDown:
    host: str
    reason: str
    silent_s: float = 0.0
    """Since its last heartbeat: the greatest age of the fault."""


@dataclass(frozen=True, kw_only=True)
class FromHost:
    """What a host's agent reports, or a detector reports for it."""

    host: str
    message: FromAgent | HealthReport


@dataclass(frozen=True, kw_only=True)
class StopRequest:
    """Ctrl-C (130), SIGTERM (75), ``muster stop`` (130). ``force``: do not wait for a save."""

    source: str
    exit_code: int
    save: bool = True
    force: bool = False

    @property
    def outcome(self) -> str:
        """How a run ends that it stops."""
        return "preempted" if self.exit_code == 75 else "stopped"


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
    detail: JsonObject = field(default_factory=dict)
    host: str | None = None
    rank: int | None = None
    step: int | None = None
    phase: str | None = None
    sync: bool = False


@dataclass(frozen=True, kw_only=True)
class Send:
    host: str
    message: ToAgent


@dataclass(frozen=True, kw_only=True)
class End:
    """The run is over; ``outcome`` succeeded, failed, stopped or preempted."""

    exit_code: int
    outcome: str
    reason: str


Effect = Log | Send | End
