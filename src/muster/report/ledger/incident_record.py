"""Incidents: what broke, when it was noticed, what was done, and when training was beyond it again."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from muster.report.ledger.lineage import Attempt, Lineage
from muster.report.ledger.time_axis import Timed

_HARMLESS = ("ignore",)


@dataclass
class Trouble:
    """One incident with everything that followed. Times on the axis."""

    incident_id: str
    kind: str
    host: str | None
    rank: int | None
    step: int | None
    attempt: int
    evidence: str
    fault_ns: int
    """Earliest moment it can have begun, as far as the log tells; at the latest the detection."""
    detected_ns: int
    action: str | None = None
    reason: str | None = None
    replacement: str | None = None
    decided_ns: int | None = None
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
    """Hosts that were training when it struck."""

    @property
    def stopped_training(self) -> bool:
        return self.action is not None and self.action not in _HARMLESS

    @property
    def lost_ns(self) -> int | None:
        """L: from the fault to the end of the next step beyond the last one applied before it."""
        return None if self.resumed_ns is None else max(0, self.resumed_ns - self.fault_ns)


def troubles(events: Sequence[Timed], lineage: Lineage, shifts: Mapping[str, int]) -> dict[str, Trouble]:
    """Fold incidents by id. ``shifts``: supervisor file -> what its monotonic times move by (``since_ns``)."""
    found: dict[str, Trouble] = {}
    for timed in events:
        event = timed.event
        if event.kind == "incident.detected":
            detail = event.detail
            if detail["incident_id"] in found:
                continue
            fault = timed.t_ns
            if detail.get("since_ns") is not None:
                fault = min(fault, int(detail["since_ns"]) + shifts.get(timed.file, 0))
            found[detail["incident_id"]] = Trouble(
                incident_id=detail["incident_id"],
                kind=str(detail["incident"]),
                host=event.host if event.host != "supervisor" else None,
                rank=event.rank,
                step=event.step,
                attempt=event.attempt,
                evidence=str(detail["evidence"]),
                fault_ns=fault,
                detected_ns=timed.t_ns,
            )
        elif event.kind in ("incident.decided", "incident.resolved"):
            _follow(found.get(str(event.detail.get("incident_id"))), timed)
    exits = [t for t in events if t.event.kind == "rank.exited" and t.event.detail.get("exit_code") not in (0, None)]
    for trouble in found.values():
        _place(trouble, exits, lineage)
    return found


def _follow(trouble: Trouble | None, timed: Timed) -> None:
    if trouble is None:
        return
    detail: Mapping[str, Any] = timed.event.detail
    if timed.event.kind == "incident.decided":
        trouble.action = str(detail["action"])
        trouble.reason = str(detail["reason"])
        trouble.replacement = detail.get("replacement")
        trouble.decided_ns = timed.t_ns
    else:
        trouble.reported_lost_ns = int(detail["lost_ns"])
        trouble.stages_ns = {
            key: int(value) for key, value in dict(detail.get("stages_ns") or {}).items() if key != "resume_step"
        }


def _place(trouble: Trouble, exits: Sequence[Timed], lineage: Lineage) -> None:
    """Fill in what the attempts and steps around it tell."""
    attempt = attempt_at(lineage.attempts, trouble.detected_ns)
    if attempt is not None:
        trouble.hosts = len(attempt.hosts)
        if trouble.stopped_training:
            floor = max(
                [attempt.start_ns, *(s.end_ns for s in lineage.steps if s.attempt == attempt.number and s.end_ns)]
            )
            died = [t.t_ns for t in exits if floor <= t.t_ns <= trouble.detected_ns]
            trouble.fault_ns = min([trouble.fault_ns, *died])
            trouble.fault_ns = min(max(trouble.fault_ns, attempt.start_ns), trouble.detected_ns)
    if not trouble.stopped_training:
        return
    before = [step.step for step in lineage.steps if step.end_ns <= trouble.detected_ns]
    trouble.last_step = max(before, default=0)
    following = next((a for a in lineage.attempts if a.cause == trouble.incident_id), None)
    if following is not None:
        trouble.tier = following.tier
        trouble.resume_step = next(
            (stint.resume_step for stint in lineage.stints if stint.attempt == following.number), None
        )
        if trouble.resume_step is not None:
            # As the supervisor counts: all that earlier attempts applied, though it was heard of later.
            applied = max((step for attempt, step in lineage.reached.items() if attempt < following.number), default=0)
            trouble.redone_steps = max(0, applied - trouble.resume_step)
    trouble.resumed_ns = next(
        (step.end_ns for step in lineage.steps if step.end_ns > trouble.detected_ns and step.step > trouble.last_step),
        None,
    )


def attempt_at(attempts: Sequence[Attempt], t_ns: int) -> Attempt | None:
    """The newest attempt that had started by then."""
    position = bisect_right([attempt.start_ns for attempt in attempts], t_ns) - 1
    return attempts[position] if position >= 0 else None


def ended_by(attempt: Attempt, following: Attempt | None, found: Mapping[str, Trouble]) -> Trouble | None:
    """The incident that ended this attempt; None: it ended by itself or still runs."""
    for name in (attempt.end_reason, following.cause if following else None):
        if name is not None and name in found:
            return found[name]
    until = following.start_ns if following else None
    inside = [
        trouble
        for trouble in found.values()
        if trouble.stopped_training
        and trouble.detected_ns >= attempt.start_ns
        and (until is None or trouble.detected_ns < until)
    ]
    return min(inside, key=lambda trouble: trouble.detected_ns, default=None)
