"""A rank of this host as a state machine. Pure: what the agent knows of the process, not the process."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

from muster.agent.values.events import PeerId
from muster.health.hang.evidence import RankEvidence
from muster.protocol.rank_agent import RankCaptured
from muster.protocol.values import LastWords


class RankState(enum.Enum):
    """An exit is learned from two sources in either order: the process's descriptor, and its parent."""

    RUNNING = "its process exists, and no end is known"
    PAUSING = "asked to pause, to continue in the next attempt"
    PAUSED = "waits for its place in the next attempt"
    EXITING = "a signal ends it: its code is known and reported, its process still exists"
    MEMORY_ONLY = "no thread of it runs; only its memory is being freed, and nothing waits for that"
    GONE = "its process is gone, and its exit code not known yet"
    REAPED = "its exit code is known from its parent, and its process's end not seen yet"
    REPORTED = "logged, and reported or withheld; no longer in the table"


_S = RankState
LIVING = frozenset({_S.RUNNING, _S.PAUSING, _S.PAUSED, _S.EXITING})
#: Whose end is not known in any way.
UNENDED = frozenset({_S.RUNNING, _S.PAUSING, _S.PAUSED})


@dataclass
class Steps:
    step: int = -1
    micro: int = 0
    first: int | None = None
    """Of the attempt."""
    stepped: bool = False
    """It has taken a step in this attempt."""

    def beat(self, step: int, micro: int) -> tuple[bool, bool]:
        """(progress was made, a snapshot is ready): of a new step, or of the attempt's beginning."""
        if (step, micro) == (self.step, self.micro):
            return False, False
        is_new, self.step, self.micro = step != self.step, step, micro
        if not is_new:
            return True, False
        if self.first is None:
            self.first = step
            return True, True
        self.stepped = self.stepped or step > self.first
        return True, step > self.first


@dataclass
class Watch:
    """What the search for hangs knows of a rank. Times are monotonic."""

    progress_s: float
    """Of the last step or micro-batch."""
    seen_s: float
    """Of the last message."""
    looked_s: float = 0.0
    """When its process was last looked at, in silence."""
    stop_reported: bool = False
    """Its parent has reported a stop, or a look has shown one, and no look since has found it running."""
    stopped_s: float | None = None
    """Since when it has been seen stopped; None: it was not, or it has sent something since."""
    hang_reported: bool = False

    def heard(self, now_s: float) -> None:
        self.seen_s, self.stopped_s = now_s, None


@dataclass
class Rank:
    pid: int
    rank: int
    attempt: int
    watch: Watch
    peer: PeerId | None = None
    parent: int = 0
    """The fork server that forked it: only its parent learns the exit code."""
    state: RankState = RankState.RUNNING
    killed: bool = False
    """This agent sent SIGKILL, and it was not exiting by then."""
    code: int | None = None
    code_is_guess: bool = False
    """Its parent died first."""
    words: LastWords | None = None
    """Why it ends, as it says itself."""
    paused_step: int | None = None
    steps: Steps = field(default_factory=Steps)

    @property
    def is_living(self) -> bool:
        """Its process exists, as far as is known, and is not just memory."""
        return self.state in LIVING

    @property
    def blocks_drain(self) -> bool:
        """The drain of its attempt waits for it. One that had paused and then died blocks nothing."""
        return self.paused_step is None and self.state not in (_S.PAUSED, _S.MEMORY_ONLY, _S.REPORTED)

    def keep(self) -> None:
        """It is to pause and continue; a paused one is asked again."""
        self.state, self.paused_step = RankState.PAUSING, None

    def leave_out(self) -> None:
        """It does not continue in the next attempt."""
        if self.state in UNENDED:
            self.state = RankState.RUNNING
        self.paused_step = None

    def begin(self, rank: int, attempt: int, now_s: float) -> None:
        """A paused one becomes ``rank`` of ``attempt``."""
        self.rank, self.attempt, self.state = rank, attempt, RankState.RUNNING
        self.paused_step = self.words = self.steps.first = None
        self.steps.stepped = self.watch.hang_reported = False
        self.watch.progress_s = now_s
        self.watch.heard(now_s)

    def assume_killed(self) -> None:
        """No one can say its exit code."""
        if self.code is None:
            self.code, self.code_is_guess = -9, True


@dataclass
class Gathering:
    """What the ranks do while the run hangs, or when another one has exited."""

    attempt: int
    limit_s: float
    until_s: float
    ranks: list[Rank]
    captured: dict[int, RankCaptured] = field(default_factory=dict)
    """By pid, as are ``spies``."""
    spies: dict[int, bytes | None] = field(default_factory=dict)
    """What py-spy has written of a rank; None: it has not ended."""
    has_spy: bool = False
    ras: tuple[str, str] | None = None
    """NCCL's report, and what is missing of it."""
    asks_ras: bool = False
    exited: RankEvidence | None = None
    """The rank whose exit is the occasion; None: the run hangs."""
