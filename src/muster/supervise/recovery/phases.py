"""Where a run is: one value for each phase, with what has a meaning only there.

Only ``SupervisorContext.enter`` changes the phase. ``docs/explanation/recovery.md`` has the table of all transitions.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

from muster.protocol.held_snapshots import Choice
from muster.protocol.to_agent import EndAttempt, FlushedFile
from muster.protocol.to_supervisor import EvidenceReady, RankHang
from muster.supervise.recovery.inputs import FromHost, StopRequest


@dataclass(kw_only=True)
class Phase:
    """Base of the phases."""

    name: ClassVar[str]
    """In ``muster status``."""
    deadline_ns: int | None = None
    """When ``Tick`` is due; what it means is the phase's."""


@dataclass(kw_only=True)
class Starting(Phase):
    """Hosts are joining; no attempt is running or will be taken over."""

    name = "starting"


@dataclass(kw_only=True)
class RunEnd:
    """How a run ends."""

    outcome: str
    exit_code: int
    reason: str


@dataclass(kw_only=True)
class Adopting(Phase):
    """A new supervisor waits for the hosts of the attempt that it found in the log."""

    name = "adopt"
    found: Phase = field(default_factory=lambda: Running())
    """Where the log says that the run is."""
    alone: bool = False
    """No host has answered in time: the first one has longer, as at a run's start."""
    asked: StopRequest | None = None
    """A stop from before the hosts have answered."""
    asked_before: StopRequest | None = None
    """The same, of an earlier supervisor."""
    deferred: list[FromHost] = field(default_factory=list)
    """Reports that are judged once it is known whether the attempt continues."""


@dataclass(frozen=True, kw_only=True)
class Resize:
    """The ranks were asked to exit after their step, for an attempt on more hosts."""

    hosts: list[str]
    until_ns: int
    """Ranks that continue meanwhile, because a save is running, may do so until then."""


@dataclass(kw_only=True)
class Gathering:
    """What hosts capture of their ranks, begun by the first report of a hang; others that follow are the same hang."""

    host: str
    report: RankHang
    begun_ns: int
    waiting: set[str]
    """Hosts that have not answered."""
    answers: dict[str, EvidenceReady] = field(default_factory=dict)

    def add(self, host: str, answer: EvidenceReady) -> bool:
        """Whether it was the last that is awaited."""
        if host in self.waiting and answer.attempt == self.report.attempt:
            self.waiting.discard(host)
            self.answers[host] = answer
        return not self.waiting


@dataclass(kw_only=True)
class Running(Phase):
    """Ranks are starting or stepping. The deadline is that of the first step, or of a resize."""

    name = "run"
    resize: Resize | None = None
    gathering: Gathering | None = None
    """A rank hangs, and what all do is being captured."""


@dataclass(kw_only=True)
class NextHosts:
    """The attempt to come."""

    hosts: list[str]
    needed: int = 0
    """With fewer hosts it is not started; 0: the run's minimum."""
    waiting_since_ns: int | None = None


@dataclass(frozen=True, kw_only=True)
class EndOrder:
    """What a host was sent to end its ranks; sent again to an agent that restarts before it has answered."""

    message: EndAttempt
    answer_by_ns: int
    """Without an answer by then the host counts as lost."""


@dataclass(kw_only=True)
class Draining(Phase):
    """Ranks are being ended; hosts report what they hold. The deadline is that of the next answer."""

    name = "draining"
    next: NextHosts
    waiting: dict[str, EndOrder] = field(default_factory=dict)
    """Hosts that have not reported the end of their ranks yet."""

    def await_next(self) -> None:
        """Set the deadline to the first host's time limit."""
        self.deadline_ns = min((order.answer_by_ns for order in self.waiting.values()), default=None)


@dataclass(kw_only=True)
class Waiting(Phase):
    """Too few hosts. After the deadline the policy is asked again."""

    name = "wait"
    next: NextHosts


@dataclass(kw_only=True)
class Stopping(Phase):
    """Ranks were asked to save and exit, or do so by themselves."""

    name = "stopping"
    outcome: str
    exit_code: int
    source: str = ""
    """What requested it."""
    saves: bool = True
    by_user: bool = False
    """A user or scheduler requested it; a second request does not wait. (A notice to the hosts does not count.)"""


@dataclass(kw_only=True)
class Flushing(Phase):
    """The run ends: hosts write what only their memory holds (``final_flush``)."""

    name = "flush"
    end: RunEnd
    until_ns: int
    by_user: bool = False
    waiting: dict[str, int] = field(default_factory=dict)
    """Host -> answers still due; only the last one counts."""
    answered: set[str] = field(default_factory=set, init=False)
    """Hosts that have listed their snapshots."""
    choice: Choice | None = field(default=None, init=False)
    """The version being written; None: the hosts' lists are awaited."""
    files: list[FlushedFile] = field(default_factory=list, init=False)
    """What was written, as the hosts report it."""
    writers: list[str] = field(default_factory=list, init=False)
    committing: bool = field(default=False, init=False)
    newest: int = field(default=0, init=False)
    """Newest step that was to be written."""
    given_up: set[tuple[int, int]] = field(default_factory=set, init=False)
    """(step, attempt) of versions that could not be written."""
    retrying: bool = field(default=False, init=False)
    """The version could not be written (a full disk), and is written again at the phase's deadline."""
    problem: str = field(default="", init=False)
    """What last went wrong with it."""


@dataclass(kw_only=True)
class Held(Phase):
    """Failed by the user's own error; hosts stay warm for a corrected run file until the deadline."""

    name = "hold"
    exit_code: int
    reason: str


@dataclass(kw_only=True)
class Ended(Phase):
    """Over: nothing is done any more."""

    name = "ended"


def ends_for_good(phase: Stopping | Flushing, exit_code: int) -> bool:
    """Whether a stop with this code is a person's, of a run that saves because a scheduler will start it again (75): it
    then ends as stopped, which is not started again."""
    end = phase.end if isinstance(phase, Flushing) else phase
    if end.exit_code != 75 or exit_code == 75:
        return False
    end.outcome, end.exit_code, phase.by_user = "stopped", exit_code, True
    return True
