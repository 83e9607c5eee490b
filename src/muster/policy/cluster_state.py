"""What a policy may look at, and its protocol."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from muster.core.types import Decision, Incident


@dataclass(frozen=True, kw_only=True)
class ClusterState:
    """The run as the supervisor sees it at the moment of an incident."""

    active: tuple[str, ...]
    """Hosts that run ranks and are not lost."""
    spares: tuple[str, ...]
    """Hosts that could take over now."""
    wanted_hosts: int
    min_hosts: int
    last_applied_step: int
    """Highest step that every rank applied; 0: none."""
    restarts_without_progress: int
    """Attempts since the last step that was new."""
    max_restarts_without_progress: int
    same_error_repeats: int = 0
    """How often this error has occurred at this step, this time included."""
    same_error_hosts: int = 0
    """On how many hosts it occurred."""
    noticed: frozenset[str] = frozenset()
    """Hosts of ``active`` with a preemption notice."""
    on_nonfinite_step: str = "stop"
    """``recovery.on_nonfinite_step``: what a step that is never finite leads to, stop or skip."""
    skipped_steps: tuple[int, ...] = ()
    """Steps whose update is skipped already."""
    host_failures: Mapping[str, int] = field(default_factory=dict)
    """Host -> incidents it was blamed for, within the policy's window."""
    resettable: frozenset[str] = frozenset()
    """Hosts whose fault a reset may heal (from the health report)."""
    waited_s: float = 0.0
    """Time already spent waiting for capacity in this incident."""


@dataclass(frozen=True, kw_only=True)
class NextAttempt:
    """The attempt that is about to start, for a policy that adjusts batch or learning rate to it."""

    num_hosts: int
    wanted_hosts: int
    world_size: int
    data_ranks: int
    """Ranks that read different micro-batches."""
    resume_step: int
    """The last step that was applied; changes apply from the next one (replayed steps stay as they were)."""
    global_batch_size: int
    """As the run file gives it."""


#: Batch and rate from the next step on: ``global_batch_size`` and ``learning_rate_scale`` (times the schedule's rate),
#: each as the run file says where it is absent.
Adjust = Callable[[NextAttempt], Mapping[str, object] | None]


class Policy(Protocol):
    """Decides. Pure: the same situation and incident give the same decision.

    A user's policy may lack all but ``decide``; ``policy.load.complete`` adds the defaults.
    """

    @property
    def max_wait_s(self) -> float:
        """How long to wait for capacity before the policy is asked again."""
        ...

    @property
    def adjust(self) -> Adjust | None:
        """Asked before every attempt; None: batch and rate stay as they are."""
        ...

    def decide(self, situation: ClusterState, incident: Incident) -> Decision: ...
