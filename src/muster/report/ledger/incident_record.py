"""Incidents: what broke, when it was noticed, what was done, and when training was past it again."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from muster.core.event_details.attempts import RankExited
from muster.core.event_details.incidents import IncidentDecided, IncidentDetected, IncidentResolved
from muster.core.types import Action
from muster.report.ledger.lineage import Attempt, Lineage
from muster.report.ledger.time_axis import Timed


@dataclass
class IncidentRecord:
    """One incident with everything that followed. Times on the axis."""

    incident_id: str
    kind: str
    host: str | None
    rank: int | None
    step: int | None
    attempt: int
    evidence: str
    fault_ns: int
    """Earliest moment it can have begun, according to the log; at the latest the detection."""
    detected_ns: int
    action: Action | None = None
    reason: str | None = None
    replacement: str | None = None
    resumed_ns: int | None = None
    """End of the first step beyond the last one applied before; None: not (yet)."""
    reported_lost_ns: int | None = None
    """L as the supervisor measured it."""
    stages_ns: dict[str, int] = field(default_factory=dict)
    tier: str | None = None
    resume_step: int | None = None
    last_step: int | None = None
    redone_steps: int = 0
    host_ns: dict[str, int] = field(default_factory=dict)
    """Category -> host-nanoseconds that this incident cost."""
    hosts: int = 0
    """Hosts that were training when it happened."""
    secondary: bool = False
    """The consequence of another rank's end, reported before it."""
    part_of: str | None = None
    """The incident that was being answered by then."""
    explains: str | None = None
    """The incident reported before this one, when training stopped: this one is its cause, or came with it."""

    @property
    def stopped_training(self) -> bool:
        return self.action not in (None, Action.IGNORE) and self.explains is None

    @property
    def lost_ns(self) -> int | None:
        """L: from the fault to the end of the next step beyond the last one applied before it."""
        return None if self.resumed_ns is None else max(0, self.resumed_ns - self.fault_ns)


def incident_records(events: Sequence[Timed], lineage: Lineage, shifts: Mapping[str, int]) -> dict[str, IncidentRecord]:
    """Fold incidents by id. ``shifts``: supervisor file -> what its monotonic times move by (``since_ns``)."""
    records: dict[str, IncidentRecord] = {}
    for timed in events:
        event = timed.event
        if event.kind == IncidentDetected.kind:
            detail = event.read(IncidentDetected)
            if detail.incident_id in records:
                continue
            fault = timed.t_ns
            if detail.since_ns is not None:
                fault = min(fault, detail.since_ns + shifts.get(timed.file, 0))
            records[detail.incident_id] = IncidentRecord(
                incident_id=detail.incident_id,
                kind=detail.incident,
                host=event.host if event.host != "supervisor" else None,
                rank=event.rank,
                step=event.step,
                attempt=event.attempt,
                evidence=detail.evidence,
                secondary=detail.secondary,
                part_of=detail.part_of,
                fault_ns=fault,
                detected_ns=timed.t_ns,
            )
        elif event.kind == IncidentDecided.kind:
            _add_decision(records, event.read(IncidentDecided))
        elif event.kind == IncidentResolved.kind:
            _add_cost(records, event.read(IncidentResolved))
    _join_causes(list(records.values()))
    _join_company(records)
    exits = [t for t in events if t.event.kind == RankExited.kind and t.event.read(RankExited).exit_code != 0]
    for incident in records.values():
        _add_surroundings(incident, exits, lineage)
    return records


def _join_causes(records: Sequence[IncidentRecord]) -> None:
    """One fault is one interruption, whose evidence names the cause, even if its consequence was reported first."""
    for consequence in records:
        for cause in records if consequence.secondary else ():
            within = cause.attempt == consequence.attempt and cause.detected_ns >= consequence.detected_ns
            if within and cause.rank is not None and not cause.secondary:
                cause.explains = consequence.incident_id
                consequence.evidence += f"; the cause: {cause.evidence}"
                consequence.kind = cause.kind
                break


def _join_company(records: Mapping[str, IncidentRecord]) -> None:
    """What came with an incident and is no cause of it is a part of its evidence."""
    for incident in records.values():
        first = records.get(incident.part_of or "")
        if first is not None and incident.explains is None:
            incident.explains = first.incident_id
            first.evidence += f"; also: {incident.evidence}"


def _add_decision(records: Mapping[str, IncidentRecord], detail: IncidentDecided) -> None:
    incident = records.get(detail.incident_id)
    if incident is not None:
        incident.action, incident.reason, incident.replacement = detail.action, detail.reason, detail.replacement


def _add_cost(records: Mapping[str, IncidentRecord], detail: IncidentResolved) -> None:
    incident = records.get(detail.incident_id)
    if incident is not None:
        incident.reported_lost_ns = detail.lost_ns
        incident.stages_ns = {key: ns for key, ns in detail.stages_ns.items() if key != "resume_step"}


def _add_surroundings(incident: IncidentRecord, exits: Sequence[Timed], lineage: Lineage) -> None:
    """Fill in what the attempts and steps around it show."""
    attempt = attempt_at(lineage.attempts, incident.detected_ns)
    if attempt is not None:
        incident.hosts = len(attempt.hosts)
        if incident.stopped_training:
            own = lineage.steps.end_ns[lineage.steps.attempt == attempt.number]
            floor = int(own.max(initial=attempt.start_ns))
            died = [t.t_ns for t in exits if floor <= t.t_ns <= incident.detected_ns]
            incident.fault_ns = min([incident.fault_ns, *died])
            incident.fault_ns = min(max(incident.fault_ns, attempt.start_ns), incident.detected_ns)
    if not incident.stopped_training:
        return
    steps = lineage.steps
    before = steps.end_ns <= incident.detected_ns
    incident.last_step = int(steps.step[before].max(initial=0))
    following = next((a for a in lineage.attempts if a.cause == incident.incident_id), None)
    if following is not None:
        incident.tier = following.tier
        incident.resume_step = next(
            (resumed.resume_step for resumed in lineage.resumed_ranges if resumed.attempt == following.number), None
        )
        if incident.resume_step is not None:
            # As the supervisor counts: all that earlier attempts applied, even if reported later.
            applied = max((step for attempt, step in lineage.reached.items() if attempt < following.number), default=0)
            incident.redone_steps = max(0, applied - incident.resume_step)
    later = np.flatnonzero(~before & (steps.step > incident.last_step))
    incident.resumed_ns = int(steps.end_ns[later[0]]) if len(later) else None


def attempt_at(attempts: Sequence[Attempt], t_ns: int) -> Attempt | None:
    """The newest attempt that had started by then."""
    position = bisect_right([attempt.start_ns for attempt in attempts], t_ns) - 1
    return attempts[position] if position >= 0 else None


def ended_by(
    attempt: Attempt, following: Attempt | None, records: Mapping[str, IncidentRecord]
) -> IncidentRecord | None:
    """The incident that ended this attempt; None: it ended by itself or still runs."""
    for name in (attempt.end_reason, following.cause if following else None):
        if name is not None and name in records:
            return records[name]
    stopping = (
        record for record in records.values() if record.stopped_training and record.detected_ns >= attempt.start_ns
    )
    inside = (record for record in stopping if following is None or record.detected_ns < following.start_ns)
    return min(inside, key=lambda incident: incident.detected_ns, default=None)
