"""A host program's state, the events it gets, its actions: frozen values, times in seconds of the monotonic clock."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from signal import Signals
from typing import Literal, TypeAlias

AGENT, SUPERVISOR = "agent", "supervisor"
RESUME, STOPPED = 75, 130
"""Exit codes: saved and asks to be continued; stopped by a person or a limit."""
CONFIG_ERRORS = (2, 3)
"""Exit codes of a run file or plan that cannot be used: another attempt, or another host, cannot help."""
NEVER = math.inf

Scope: TypeAlias = Literal["run", "host"]
"""What a notice announces: all hosts of the run go, or this one."""


class Outcome(Enum):
    """Why a host program ends; its ``Place`` makes an exit code of it."""

    RUN_ENDED = "the run has ended"
    END_UNWRITTEN = "the run has ended, and its home does not say so"
    GIVEN_UP = "the supervisor cannot run here"
    EVICTED = "this host goes; another one may take its place"
    REQUEUED = "the run asked to be continued"


# ---------------------------------------------------------------- rules


LeaveSteps: TypeAlias = tuple[tuple[Signals | None, float], ...]
"""A signal for every program that is left, and how long to wait after it."""
LEAVE: LeaveSteps = ((None, 30.0), (Signals.SIGTERM, 10.0), (Signals.SIGKILL, 10.0))
"""An agent leaves by itself at the run's end; one that never heard of it is asked, then killed."""


@dataclass(frozen=True, kw_only=True)
class Rules:
    """How a back end differs; everything else is the same on every host."""

    rank: int | None = None
    """Whose turn it is to start the supervisor: 0 at once, others later; None: never here."""
    reads_end: bool = True
    """The run's home says how the run ended."""
    continues: Literal["ends", "waits", "here", "requeue"] = "ends"
    """What 75 in the home means: the end here; a job that may be taken away; go on at once; queue the rest."""
    requeue_after_s: float = 0.0
    """For how long the host whose supervisor saved may queue the rest before this one does."""
    notice_scope: Scope | None = "host"
    """None: the Place is asked."""
    insists: bool = False
    """A notice is passed on until the supervisor answers, and stops nothing here."""
    everyone_is_notified: bool = False
    """The host that supervises passes a notice on; others ignore it."""
    leaves_on_notice: bool = False
    moves: bool = False
    """A failed agent, or a supervisor that crashed after a minute, gets another host."""
    released_host_ends: bool = False
    """An agent that ends with 0 has been released."""
    saves_by_signal: bool = False
    """The supervisor here saves on SIGTERM; else it is asked by its socket."""
    longest_look_s: float = 3.0
    """At most so long after one look at a held lease comes the next: one of 10 s is renewed every 3 s."""
    grace_s: float = NEVER
    """From a notice to the end of this host."""
    most_starts: int | None = None
    """Of each program; None: without limit."""
    leave: LeaveSteps = LEAVE


# ---------------------------------------------------------------- state


@dataclass(frozen=True, kw_only=True)
class Child:
    running: bool = False
    shipping: bool = False
    """What it left is being uploaded: until then nothing else may write its stream."""
    began_s: float = 0.0
    lived_s: float = 0.0
    not_before_s: float = 0.0
    pause_s: float = 1.0
    starts: int = 0
    refusals: int = 0
    """Ends in a row with code 2."""


@dataclass(frozen=True, kw_only=True)
class Notice:
    since_s: float
    scope: Literal["run", "host", "asked", "unknown"]
    delivered: bool = False
    """The supervisor knows."""


@dataclass(frozen=True, kw_only=True)
class Requeue:
    """The rest of the run is being queued."""

    since_s: float
    next_s: float
    pause_s: float = 1.0


@dataclass(frozen=True, kw_only=True)
class Leaving:
    outcome: Outcome
    code: int
    until_s: float
    """Of the present step."""
    steps: LeaveSteps
    """Those still to come."""
    done: bool = False


@dataclass(frozen=True, kw_only=True)
class State:
    programs: Mapping[str, Child] = field(default_factory=dict)
    crashes: tuple[float, ...] = ()
    """Of the supervisor, within ``IN_A_ROW_S``."""
    crash: int | None = None
    """The supervisor's exit code, until lease and end were read."""
    next_look_s: float = 0.0
    next_save_s: float = 0.0
    leave_at_s: float = NEVER
    """When the allocation's time is nearly up."""
    free_since_s: float | None = None
    cut_off: bool = False
    """This host reaches no other: what it starts could only hang."""
    again_since_s: float | None = None
    """When 75 was first seen in the home."""
    was_held: bool = False
    looked: bool = False
    time_was_asked: bool = False
    """The supervisor was asked to save because of ``leave_at_s``."""
    notice: Notice | None = None
    requeue: Requeue | None = None
    leaving: Leaving | None = None

    def child(self, name: str) -> Child:
        return self.programs.get(name, Child())

    @property
    def supervises(self) -> bool:
        return self.child(SUPERVISOR).running


# ---------------------------------------------------------------- events


@dataclass(frozen=True, kw_only=True)
class Lease:
    kind: Literal["free", "held", "unknown", "vacated"]
    """``held``: by another process than one of ours that has ended; ``unknown``: the home does not answer;
    ``vacated``: this host has just expired it, because its holder was silent."""
    left_s: float = 0.0
    """Not above 0: its time is over, and its holder may live."""


@dataclass(frozen=True)
class Tick:
    pass


@dataclass(frozen=True, kw_only=True)
class ChildEnded:
    name: str
    code: int
    """Of a signal: 128 and its number."""


@dataclass(frozen=True, kw_only=True)
class NotStarted:
    name: str


@dataclass(frozen=True, kw_only=True)
class Looked:
    lease: Lease
    end: int | Literal["unreadable"] | None = None
    """How the run ended; read where the lease is free."""
    cut_off: bool = False
    """This host has reached no other for so long that its ranks can only hang."""


@dataclass(frozen=True)
class Noticed:
    pass


@dataclass(frozen=True, kw_only=True)
class ScopeKnown:
    scope: Scope | None


@dataclass(frozen=True, kw_only=True)
class Saved:
    reason: SaveReason
    delivered: bool


@dataclass(frozen=True, kw_only=True)
class Shipped:
    name: str


@dataclass(frozen=True, kw_only=True)
class Requeued:
    text: str
    code: int = 0
    """The exit code, if this was the last attempt."""
    again: bool = False
    """Another attempt may succeed."""


@dataclass(frozen=True, kw_only=True)
class LeaveAt:
    """When to save because the allocation ends."""

    at_s: float


Event: TypeAlias = Tick | ChildEnded | NotStarted | Looked | Noticed | ScopeKnown | Saved | Shipped | Requeued | LeaveAt

# ---------------------------------------------------------------- actions

SaveReason: TypeAlias = Literal["notice", "time"]


@dataclass(frozen=True)
class Start:
    name: str


@dataclass(frozen=True)
class Send:
    name: str
    number: Signals


@dataclass(frozen=True)
class Look:
    pass


@dataclass(frozen=True)
class AskScope:
    pass


@dataclass(frozen=True)
class AskSave:
    reason: SaveReason


@dataclass(frozen=True)
class Ship:
    name: str


@dataclass(frozen=True)
class RequeueRest:
    pass


@dataclass(frozen=True)
class AskTime:
    """For how long the allocation lasts: the host that would have got the notice is lost."""


@dataclass(frozen=True)
class WithdrawEnd:
    pass


@dataclass(frozen=True)
class EndHere:
    """Kill every process of the run on this host."""


@dataclass(frozen=True)
class Say:
    text: str


@dataclass(frozen=True)
class Exit:
    outcome: Outcome
    code: int


Action: TypeAlias = (
    Start | Send | Look | AskScope | AskSave | AskTime | Ship | RequeueRest | WithdrawEnd | EndHere | Say | Exit
)
