"""An incident as sentences: what broke, how it was noticed, what was done, what it cost."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from muster.core.types import Action
from muster.report.ledger.fold import Ledger
from muster.report.ledger.incident_record import IncidentRecord
from muster.report.ledger.step_budget import Lever

_ACTIONS = {
    "restart": "the ranks were restarted",
    "reset": "the hardware was reset and the ranks restarted",
    "swap": "the host was replaced by {replacement}",
    "shrink": "training continued without the host",
    "grow": "the host was added back",
    "wait": "training waited for capacity",
    "stop": "the run was stopped",
    "ignore": "no action was needed",
}


def format_duration(value_s: float | None) -> str:
    """``0.42 s``, ``12.3 s``, ``4 min 10 s``, ``3 h 05 min``; ``unknown`` for None."""
    if value_s is None:
        return "unknown"
    if value_s < 0.0995:
        return f"{value_s * 1000:.0f} ms"
    if value_s < 9.95:
        return f"{value_s:.2f} s"
    if value_s < 59.5:
        return f"{value_s:.1f} s"
    whole = round(value_s)
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} min"


def money(usd: float | None) -> str:
    """Dollars with as many digits as matter; ``unknown`` for None."""
    if usd is None:
        return "unknown"
    return f"${usd:,.2f}" if usd >= 1 or usd == 0 else f"${usd:.4f}"


def lever_in_words(lever: Lever) -> str:
    """What to change next, what it is worth, and how."""
    day = "" if not lever.usd_per_day else f", {money(lever.usd_per_day)} a day"
    return f"next: {lever.part}, worth {lever.worth_share:.0%} of a step at most{day}: {lever.advice}"


def sentence(incident: IncidentRecord, usd: float | None, *, finished: bool) -> str:
    """Two or three sentences for a person. Unknown values are named as unknown, or left out."""
    parts = [_sentence_case(incident.evidence)]
    waited = (incident.detected_ns - incident.fault_ns) / 1e9
    if incident.stopped_training:
        parts.append(f"Noticed {'at once' if waited < 0.001 else 'after ' + format_duration(waited)}")
    if incident.action is not None:
        done = _ACTIONS.get(incident.action, incident.action).format(replacement=incident.replacement or "a spare")
        if incident.resume_step is not None:
            tier = f" from {incident.tier}" if incident.tier else ""
            done += f"{tier} at step {incident.resume_step}"
        reason = f" ({incident.reason.rstrip('.')})" if incident.reason else ""
        parts.append(_sentence_case(done) + reason)
    if incident.stopped_training and incident.action != "stop":
        parts.append(_cost_sentence(incident, usd, finished))
    return " ".join(part.rstrip(".") + "." for part in parts if part)


def _sentence_case(text: str) -> str:
    return text[:1].upper() + text[1:]


def _cost_sentence(incident: IncidentRecord, usd: float | None, finished: bool) -> str:
    if incident.lost_ns is None:
        return "Training never resumed" if finished else "Training has not resumed yet"
    count = incident.redone_steps
    redone = f", {count} step{'s' * (count != 1)} redone" if count else ", no step redone"
    money = f", ${usd:,.2f}" if usd is not None and usd > 0 else ""
    host_s = sum(incident.host_ns.values()) / 1e9
    return f"It cost {format_duration(incident.lost_ns / 1e9)}{redone}: {host_s:,.1f} host-seconds{money}"


@dataclass(frozen=True, kw_only=True)
class IncidentRow:
    """One incident in figures and words; times in seconds since the run began."""

    incident_id: str
    kind: str
    host: str | None
    rank: int | None
    step: int | None
    attempt: int
    at_s: float
    detected_s: float
    detect_s: float
    resumed_s: float | None
    action: Action | None
    reason: str | None
    replacement: str | None
    tier: str | None
    resume_step: int | None
    redone_steps: int
    stopped_training: bool
    lost_s: float | None
    lost_s_supervisor: float | None
    job_equivalent_s: float | None
    stages_s: Mapping[str, float]
    host_s: Mapping[str, float]
    usd: float | None
    sentence: str


def incidents(ledger: Ledger) -> list[IncidentRow]:
    """Every incident in time order."""
    priced = [lane.usd_per_hour for lane in ledger.lanes.values()]
    mean = sum(p for p in priced if p is not None) / len(priced) if priced and None not in priced else None
    records = sorted(ledger.incident_records.values(), key=lambda incident: incident.detected_ns)
    return [_row(ledger, incident, mean) for incident in records]


def _row(ledger: Ledger, incident: IncidentRecord, usd_per_hour: float | None) -> IncidentRow:
    host_s = sum(incident.host_ns.values()) / 1e9
    usd = None if usd_per_hour is None else host_s / 3600 * usd_per_hour
    return IncidentRow(
        incident_id=incident.incident_id,
        kind=incident.kind,
        host=incident.host,
        rank=incident.rank,
        step=incident.step,
        attempt=incident.attempt,
        at_s=(incident.fault_ns - ledger.begin_ns) / 1e9,
        detected_s=(incident.detected_ns - ledger.begin_ns) / 1e9,
        detect_s=(incident.detected_ns - incident.fault_ns) / 1e9,
        resumed_s=None if incident.resumed_ns is None else (incident.resumed_ns - ledger.begin_ns) / 1e9,
        action=incident.action,
        reason=incident.reason,
        replacement=incident.replacement,
        tier=incident.tier,
        resume_step=incident.resume_step,
        redone_steps=incident.redone_steps if incident.stopped_training else 0,
        stopped_training=incident.stopped_training,
        lost_s=None if incident.lost_ns is None else incident.lost_ns / 1e9,
        lost_s_supervisor=None if incident.reported_lost_ns is None else incident.reported_lost_ns / 1e9,
        job_equivalent_s=host_s / incident.hosts if incident.hosts else None,
        stages_s={name: ns / 1e9 for name, ns in incident.stages_ns.items()},
        host_s={name: ns / 1e9 for name, ns in incident.host_ns.items()},
        usd=usd,
        sentence=sentence(incident, usd, finished=ledger.finished is not None),
    )
