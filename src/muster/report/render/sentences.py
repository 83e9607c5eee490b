"""An incident as sentences: what broke, how it was noticed, what was done, what it cost."""

from __future__ import annotations

from typing import Any

from muster.report.ledger.fold import Ledger
from muster.report.ledger.incident_record import Trouble

_DONE = {
    "restart": "the ranks were restarted",
    "reset": "the hardware was reset and the ranks restarted",
    "swap": "the host was swapped for {replacement}",
    "shrink": "training went on without the host",
    "grow": "the host was taken back in",
    "wait": "training waited for capacity",
    "stop": "the run was stopped",
    "ignore": "nothing needed doing",
}


def span(value_s: float | None) -> str:
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


def sentence(trouble: Trouble, usd: float | None, *, finished: bool) -> str:
    """Two or three sentences for a person. Unknown things are said to be unknown, or left out."""
    parts = [_sentence_case(trouble.evidence)]
    waited = (trouble.detected_ns - trouble.fault_ns) / 1e9
    if trouble.stopped_training:
        parts.append(f"Noticed {'at once' if waited < 0.001 else 'after ' + span(waited)}")
    if trouble.action is not None:
        done = _DONE.get(trouble.action, trouble.action).format(replacement=trouble.replacement or "a spare")
        if trouble.resume_step is not None:
            tier = f" from {trouble.tier}" if trouble.tier else ""
            done += f"{tier} at step {trouble.resume_step}"
        reason = f" ({trouble.reason.rstrip('.')})" if trouble.reason else ""
        parts.append(_sentence_case(done) + reason)
    if trouble.stopped_training and trouble.action != "stop":
        parts.append(_price(trouble, usd, finished))
    return " ".join(part.rstrip(".") + "." for part in parts if part)


def _sentence_case(text: str) -> str:
    return text[:1].upper() + text[1:]


def _price(trouble: Trouble, usd: float | None, finished: bool) -> str:
    if trouble.lost_ns is None:
        return "Training never got beyond it" if finished else "Training is not beyond it yet"
    count = trouble.redone_steps
    redone = f", {count} step{'s' * (count != 1)} redone" if count else ", no step redone"
    money = f", ${usd:,.2f}" if usd is not None and usd > 0 else ""
    host_s = sum(trouble.host_ns.values()) / 1e9
    return f"It cost {span(trouble.lost_ns / 1e9)}{redone}: {host_s:,.1f} host-seconds{money}"


def incidents(ledger: Ledger) -> list[dict[str, Any]]:
    """Every incident in time order, in figures and words."""
    priced = [lane.usd_per_hour for lane in ledger.lanes.values()]
    mean = sum(p for p in priced if p is not None) / len(priced) if priced and None not in priced else None
    found = []
    for trouble in sorted(ledger.troubles.values(), key=lambda trouble: trouble.detected_ns):
        host_s = sum(trouble.host_ns.values()) / 1e9
        usd = None if mean is None else host_s / 3600 * mean
        found.append(
            {
                "incident_id": trouble.incident_id,
                "kind": trouble.kind,
                "host": trouble.host,
                "rank": trouble.rank,
                "step": trouble.step,
                "attempt": trouble.attempt,
                "at_s": (trouble.fault_ns - ledger.begin_ns) / 1e9,
                "detected_s": (trouble.detected_ns - ledger.begin_ns) / 1e9,
                "detect_s": (trouble.detected_ns - trouble.fault_ns) / 1e9,
                "resumed_s": None if trouble.resumed_ns is None else (trouble.resumed_ns - ledger.begin_ns) / 1e9,
                "action": trouble.action,
                "reason": trouble.reason,
                "replacement": trouble.replacement,
                "tier": trouble.tier,
                "resume_step": trouble.resume_step,
                "redone_steps": trouble.redone_steps if trouble.stopped_training else 0,
                "stopped_training": trouble.stopped_training,
                "lost_s": None if trouble.lost_ns is None else trouble.lost_ns / 1e9,
                "lost_s_supervisor": None if trouble.reported_lost_ns is None else trouble.reported_lost_ns / 1e9,
                "job_equivalent_s": host_s / trouble.hosts if trouble.hosts else None,
                "stages_s": {name: ns / 1e9 for name, ns in trouble.stages_ns.items()},
                "host_s": {name: ns / 1e9 for name, ns in trouble.host_ns.items()},
                "usd": usd,
                "sentence": sentence(trouble, usd, finished=ledger.finished is not None),
            }
        )
    return found
