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
    signature: Annotated[str | None, "a rank's last words, numbers left out: the same error has the same"] = None
    exception: Annotated[str | None, "class name"] = None
    message: Annotated[str | None, "a rank's last words"] = None
    hint: Annotated[str | None, "what may help"] = None
    exit_code: Annotated[int | None, "that the error asks for"] = None
    signal: Annotated[int | None, "that ended the process"] = None


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


DETAILS: tuple[type[Detail], ...] = (IncidentDetected, IncidentDecided, IncidentResolved)
