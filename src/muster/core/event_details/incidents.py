"""Details of incidents."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, ClassVar

from muster.core.event_detail import Detail, OpenDetail
from muster.core.types import Action


@dataclass(frozen=True, kw_only=True)
class IncidentDetected(OpenDetail):
    kind: ClassVar = "incident.detected"
    doc: ClassVar = "Something went wrong."
    incident_id: Annotated[str, "unique in the run"]
    incident: Annotated[str, "kind: a row of muster.core.incidents"]
    evidence: Annotated[str, "one sentence with values"]
    since_ns: Annotated[int | None, "earliest moment (supervisor's mono_ns) it can have begun"] = None
    secondary: Annotated[bool, "the consequence of another rank's end"] = False
    part_of: Annotated[
        str | None,
        "the incident that was being answered by then: this is its cause, where that is secondary, else what came with "
        "it; it is decided on only as a cause, and only where that changes what is done",
    ] = None
    signature: Annotated[str | None, "a rank's last words, numbers left out: the same error has the same"] = None
    exception: Annotated[str | None, "class name"] = None
    message: Annotated[str | None, "a rank's last words"] = None
    hint: Annotated[str | None, "what may help"] = None
    exit_code: Annotated[int | None, "that the error asks for"] = None
    signal: Annotated[int | None, "that ended the process"] = None
    sound_step: Annotated[int | None, "of an error of memory: no snapshot of a later step is restored"] = None
    culprit: Annotated[str | None, "of a hang, what keeps the rank named here: a kind of evidence.gathered"] = None


@dataclass(frozen=True, kw_only=True)
class EvidenceGathered(Detail):
    kind: ClassVar = "evidence.gathered"
    doc: ClassVar = (
        "What the ranks did when the run stood still, captured before they were ended; or, after its incident, what "
        "was captured at a rank's exit."
    )
    incident_id: Annotated[str, "which incident follows from it"]
    summary: Annotated[str, "which rank holds the others up and why, or why none can be named"]
    culprit: Annotated[
        str | None, "stopped, dead, gil, code, mismatch, loader, gpu, link or unknown; None: no culprit is named"
    ] = None
    confidence: Annotated[str | None, "high, medium or low"] = None
    place: Annotated[str | None, "file:line where the culprit is"] = None
    other_place: Annotated[str | None, "of a mismatch: where the others are"] = None
    group: Annotated[str | None, "of ranks, in which the others wait"] = None
    operation: Annotated[str | None, "in which they wait"] = None
    victims: Annotated[int, "ranks that wait"] = 0
    took_ns: Annotated[int, "from the report of the hang to the last answer that was awaited; 0: taken at an exit"] = 0
    ranks: Annotated[tuple[str, ...], "a line for each rank, the first 64"] = ()
    missing: Annotated[tuple[str, ...], "what could not be captured, the first 16"] = ()


@dataclass(frozen=True, kw_only=True)
class IncidentDecided(OpenDetail):
    kind: ClassVar = "incident.decided"
    doc: ClassVar = "What will be done; written before it is."
    incident_id: Annotated[str, "which"]
    action: Annotated[Action, "ignore, restart, reset, swap, shrink, grow, wait or stop"]
    reason: Annotated[str, "one sentence"]
    replacement: Annotated[str | None, "of a swap: the host that takes the place"] = None
    hosts: Annotated[tuple[str, ...] | None, "of the next attempt"] = None
    wait_for: Annotated[int | None, "of a wait: number of hosts"] = None
    skip_steps: Annotated[tuple[int, ...], "steps whose update will be left out"] = ()


@dataclass(frozen=True, kw_only=True)
class IncidentResolved(Detail):
    kind: ClassVar = "incident.resolved"
    doc: ClassVar = "The first step beyond the last applied one before the incident."
    incident_id: Annotated[str, "which"]
    lost_ns: Annotated[int, "L: from the fault's detection to this step's end"]
    redone_steps: Annotated[int | None, "applied steps taken again"] = None
    stages_ns: Annotated[Mapping[str, int], "stage -> time"] = field(default_factory=dict)


DETAILS: tuple[type[Detail], ...] = (EvidenceGathered, IncidentDetected, IncidentDecided, IncidentResolved)
