"""Details of attempts and their ranks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, ClassVar

from muster.core.batch_schedule import BatchSegment
from muster.core.event_detail import Detail


@dataclass(frozen=True, kw_only=True)
class AttemptStarted(Detail):
    kind: ClassVar = "attempt.started"
    doc: ClassVar = "A world of ranks is formed. `attempt` is the fence from here on."
    world_size: Annotated[int, "ranks"]
    layout: Annotated[Mapping[str, int], "axis -> size"]
    hosts: Annotated[Mapping[str, tuple[int, ...]], "host -> its ranks"]
    resume_step: Annotated[int | None, "last applied step it starts from, -1: none"] = None
    tier: Annotated[str | None, "where from"] = None
    resume_attempt: Annotated[int | None, "the attempt that took the snapshots"] = None
    cause: Annotated[str | None, "incident id"] = None
    kept: Annotated[tuple[int, ...], "ranks whose processes continue from the previous attempt"] = ()
    copies: Annotated[
        Mapping[str, str], "host -> the host that holds its snapshots' copies; absent: the one half way round"
    ] = field(default_factory=dict)
    skip_steps: Annotated[tuple[int, ...], "steps whose update is left out: their batch is never finite"] = ()
    batch_schedule: Annotated[
        tuple[BatchSegment, ...], "changes of batch and learning rate since step 1, by the policy"
    ] = ()

    @property
    def resumed(self) -> tuple[int, int] | None:
        """(step, attempt) of the snapshots it starts from; None: from none."""
        step, attempt = self.resume_step, self.resume_attempt
        return None if step is None or attempt is None else (step, attempt)


@dataclass(frozen=True, kw_only=True)
class AttemptAdopted(Detail):
    kind: ClassVar = "attempt.adopted"
    doc: ClassVar = "All its ranks are alive: it continues under a new supervisor."


@dataclass(frozen=True, kw_only=True)
class AttemptAbandoned(Detail):
    kind: ClassVar = "attempt.abandoned"
    doc: ClassVar = "A new supervisor found none of its ranks: the run starts again."
    reason: Annotated[str, "what was found, one sentence"]


@dataclass(frozen=True, kw_only=True)
class AttemptResizing(Detail):
    kind: ClassVar = "attempt.resizing"
    doc: ClassVar = "Ranks are asked to exit after the current step, to continue on other hosts."
    hosts: Annotated[tuple[str, ...], "of the next attempt"]


@dataclass(frozen=True, kw_only=True)
class AttemptEnded(Detail):
    kind: ClassVar = "attempt.ended"
    doc: ClassVar = "Its ranks have exited, or were ordered to stop."
    reason: Annotated[str, "why"]
    next_hosts: Annotated[tuple[str, ...] | None, "chosen for the next attempt"] = None
    needed_hosts: Annotated[int | None, "with so many hosts the next attempt starts"] = None


@dataclass(frozen=True, kw_only=True)
class RankStarted(Detail):
    kind: ClassVar = "rank.started"
    doc: ClassVar = "A rank's process exists, or continues in a new attempt."
    pid: Annotated[int, "process id"]
    standby: Annotated[bool, "was warm"] = False
    kept: Annotated[bool, "it ran in the attempt before"] = False


@dataclass(frozen=True, kw_only=True)
class RankExited(Detail):
    kind: ClassVar = "rank.exited"
    doc: ClassVar = "A rank's process is gone."
    exit_code: Annotated[int, "negative: the signal"]
    reason: Annotated[str | None, "last words"] = None
    exception: Annotated[str | None, "class name"] = None
    traceback: Annotated[str | None, "last lines"] = None


@dataclass(frozen=True, kw_only=True)
class PhaseChanged(Detail):
    kind: ClassVar = "phase.changed"
    doc: ClassVar = "From here on this rank (or host) is in `phase`."
    reason: Annotated[str | None, "why"] = None


DETAILS: tuple[type[Detail], ...] = (
    AttemptStarted, AttemptAdopted, AttemptAbandoned, AttemptResizing, AttemptEnded, RankStarted, RankExited,
    PhaseChanged,
)  # fmt: skip
