"""Incident kinds: what can go wrong in a run, and how each kind is treated.

Another package adds a kind of its own by an entry point, whose name is the kind::

    [project.entry-points."muster.incident_kinds"]
    fan_failure = "my_package.incidents:FAN_FAILURE"

A detector then reports it for a host (docs/explanation/recovery.md); the shipped policies treat it by its traits.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from muster.core.registry import Registry
from muster.core.typed_json import Json


class Treatment(StrEnum):
    """What the shipped policies do first; budgets and repeats decide what follows."""

    RESTART = "restart"  # the ranks, in place; a host that fails again and again is replaced
    REPLAY = "replay"  # take the step once more; then stop, or leave the step out
    REPLACE = "replace"  # reset the host, swap it for a spare, or continue without it
    WAIT = "wait"  # for capacity
    GROW = "grow"  # use the host
    IGNORE = "ignore"


class Repeats(StrEnum):
    """How two incidents of one kind at the same step are recognised as the same error."""

    NEVER = "never"
    BY_STEP = "by_step"  # the step alone
    BY_SIGNATURE = "by_signature"  # the last words of a rank, where there are any
    BY_ERROR = "by_error"  # the signature, else the evidence


@dataclass(frozen=True, kw_only=True)
class IncidentTraits:
    """One kind of incident."""

    kind: str
    meaning: str
    blames_host: bool
    """It counts as a failure of its host; with several, the host is replaced."""
    may_be_ignored: bool
    """Training can continue without an action. False: ranks are gone, so a decision to ignore it is refused."""
    treatment: Treatment
    user_error: bool = False
    """The user's program or run file may be the cause: hosts are held after the failure, for a corrected run."""
    fails_alike: bool = False
    """The same error again, or one before the first step, would come back after every restart: the run stops."""
    retry_on_other_host: bool = False
    """Before it stops for ``fails_alike``, a spare host gets one try."""
    repeats: Repeats = Repeats.NEVER
    announced: bool = False
    """The host still works and leaves within its grace time; it may come back."""
    quarantine_expires: bool = False
    """The host may be used again once the window in which failures count has passed."""
    simulated_as: str | None = None
    """Fault of the simulator's mix that such recoveries measure (``process``, ``hang``, ``host``, ...)."""


RANK_EXIT = IncidentTraits(
    kind="rank_exit", meaning="a rank's process ended without an error of its own",
    blames_host=True, may_be_ignored=False, treatment=Treatment.RESTART, simulated_as="process",
)  # fmt: skip
RANK_EXCEPTION = IncidentTraits(
    kind="rank_exception", meaning="a rank raised a Python exception",
    blames_host=True, may_be_ignored=False, treatment=Treatment.RESTART, user_error=True, fails_alike=True,
    retry_on_other_host=True, repeats=Repeats.BY_ERROR, simulated_as="process",
)  # fmt: skip
RANK_HANG = IncidentTraits(
    kind="rank_hang", meaning="a rank makes no progress",
    blames_host=True, may_be_ignored=True, treatment=Treatment.RESTART, simulated_as="hang",
)  # fmt: skip
RANK_OOM = IncidentTraits(
    kind="rank_oom", meaning="a rank ran out of memory",
    blames_host=False, may_be_ignored=False, treatment=Treatment.RESTART, user_error=True, fails_alike=True,
    repeats=Repeats.BY_ERROR, simulated_as="process",
)  # fmt: skip
GPU_PROGRAM_ERROR = IncidentTraits(
    kind="gpu_program_error", meaning="the program made an error on a GPU that the driver names (Xid 13, 31, ...)",
    blames_host=False, may_be_ignored=False, treatment=Treatment.RESTART, user_error=True, fails_alike=True,
    repeats=Repeats.BY_ERROR, simulated_as="process",
)  # fmt: skip
HOST_LOST = IncidentTraits(
    kind="host_lost", meaning="a host no longer answers",
    blames_host=True, may_be_ignored=False, treatment=Treatment.REPLACE, simulated_as="host",
)  # fmt: skip
HOST_UNHEALTHY = IncidentTraits(
    kind="host_unhealthy", meaning="a health check or a rank's last words report a broken device or network",
    blames_host=True, may_be_ignored=True, treatment=Treatment.REPLACE, repeats=Repeats.BY_SIGNATURE,
    simulated_as="host",
)  # fmt: skip
NOT_FINITE = IncidentTraits(
    kind="not_finite", meaning="a step's loss or gradient is not finite; its update was not applied",
    blames_host=False, may_be_ignored=False, treatment=Treatment.REPLAY, user_error=True, repeats=Repeats.BY_STEP,
)  # fmt: skip
PREEMPTION_NOTICE = IncidentTraits(
    kind="preemption_notice", meaning="a host will be taken away",
    blames_host=False, may_be_ignored=True, treatment=Treatment.REPLACE, announced=True,
)  # fmt: skip
CAPACITY = IncidentTraits(
    kind="capacity",
    meaning="too few hosts",
    blames_host=True,
    may_be_ignored=False,
    treatment=Treatment.WAIT,
)
START_UP = IncidentTraits(
    kind="start_up", meaning="a host could not prepare: bad data, a missing library, no memory",
    blames_host=True, may_be_ignored=False, treatment=Treatment.RESTART, user_error=True, fails_alike=True,
    repeats=Repeats.BY_ERROR,
)  # fmt: skip
HOST_RETURNED = IncidentTraits(
    kind="host_returned",
    meaning="a host outside a run that is too small became ready",
    blames_host=False,
    may_be_ignored=True,
    treatment=Treatment.GROW,
)

STRAGGLER = IncidentTraits(
    kind="straggler",
    meaning="one rank makes all others wait, step after step",
    blames_host=False,
    may_be_ignored=True,
    treatment=Treatment.IGNORE,
)

_SHIPPED = (
    RANK_EXIT, RANK_EXCEPTION, RANK_HANG, RANK_OOM, GPU_PROGRAM_ERROR, HOST_LOST, HOST_UNHEALTHY, NOT_FINITE,
    PREEMPTION_NOTICE, CAPACITY, START_UP, HOST_RETURNED, STRAGGLER,
)  # fmt: skip
KINDS: Registry[IncidentTraits] = Registry(
    family="incident kind",
    group="muster.incident_kinds",
    shipped={traits.kind: f"{__name__}:{traits.kind.upper()}" for traits in _SHIPPED},
)


#: What holds a run up and would do so on any host (``health.hang``).
OWN_CAUSES = frozenset({"stopped", "gil", "code", "mismatch", "loader"})

#: What holds a run up and would not on another host.
HARDWARE_CAUSES = frozenset({"gpu", "link"})


def counts_against_host(traits: IncidentTraits, culprit: Json) -> bool:
    """Whether an incident is a failure of its host. ``culprit``: what evidence says that keeps the rank; None: none."""
    return traits.blames_host and culprit not in OWN_CAUSES


def traits_of(kind: str) -> IncidentTraits:
    """The row of the table. Raises UsageError on a kind that is not in it."""
    return KINDS.get(kind)
