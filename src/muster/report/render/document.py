"""The report as one JSON document; ``docs/report.schema.json`` describes it."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

from muster.core.event_log import Verdict
from muster.core.events import Event
from muster.report.ledger import figures
from muster.report.ledger.fold import Ledger
from muster.report.render.sentences import incidents

SCHEMA = 1


def document(ledger: Ledger, verdicts: Mapping[str, Verdict]) -> dict[str, Any]:
    """Everything a reader may want, in plain JSON types. Null means unknown; nothing unknown is zero."""
    speed = figures.speed(ledger)
    total = figures.tokens(ledger)
    evals = _evals(ledger)
    last = evals[-1] if evals else {}
    final = ledger.lineage.final
    return {
        "schema": SCHEMA,
        "kind": "muster.report",
        **_run(ledger),
        "execution_accuracy": _newest(evals, "execution_accuracy"),
        "execution_accuracy_before": _newest(evals[:1], "execution_accuracy") if len(evals) > 1 else None,
        "baseline_accuracy": _newest(evals, "baseline_accuracy"),
        "query_match": _newest(evals, "query_match"),
        "final_loss": final[-1].detail.get("loss") if final else None,
        "heldout_loss": last.get("loss"),
        "steps": len(final),
        "final_step": final[-1].step if final else None,
        "tokens": total["final_lineage"],
        "tokens_per_s": speed["tokens_per_s"],
        "mfu": speed["mfu"],
        "goodput": figures.goodput(ledger),
        "cost": figures.cost(ledger),
        "categories": figures.categories(ledger),
        "host_time": _host_time(ledger),
        "token_counts": total,
        "speed": speed,
        "interruptions": sum(incident.stopped_training for incident in ledger.incident_records.values()),
        "incidents": incidents(ledger),
        "incident_kinds": figures.incident_kinds(ledger),
        "checkpoint_exposure": figures.exposure(ledger),
        "evals": evals,
        "attempts": _attempts(ledger),
        "model": _model(ledger),
        "log": _log(ledger, verdicts),
        "notes": list(ledger.notes),
    }


def moment(ledger: Ledger, t_ns: int) -> str:
    """A point on the axis as ISO 8601 in UTC."""
    at = datetime.fromtimestamp((t_ns + ledger.aligned.wall_at_zero_ns) / 1e9, tz=UTC)
    return at.isoformat(timespec="milliseconds").replace("+00:00", "Z")


def _run(ledger: Ledger) -> dict[str, Any]:
    submitted = next((t.event for t in ledger.events if t.event.kind == "run.submitted"), None)
    detail: Mapping[str, Any] = submitted.detail if submitted else {}
    end: Mapping[str, Any] = ledger.finished.detail if ledger.finished else {}
    return {
        "run_id": ledger.run_id,
        "name": detail.get("name"),
        "outcome": end.get("outcome"),
        "exit_code": end.get("exit_code"),
        "reason": end.get("reason"),
        "backend": detail.get("backend"),
        "version": detail.get("version"),
        "spec_digest": detail.get("spec_digest"),
        "started": moment(ledger, ledger.begin_ns) if ledger.events else None,
        "newest_event": moment(ledger, ledger.end_ns) if ledger.events else None,
        "wall_s": (ledger.end_ns - ledger.begin_ns) / 1e9,
    }


def _host_time(ledger: Ledger) -> dict[str, Any]:
    return {
        "purchased_host_s": ledger.purchased_ns / 1e9,
        "purchased_host_ns": ledger.purchased_ns,
        "identity_error": ledger.identity_error,
        "queue_s": ledger.queue_ns / 1e9,
        "hosts": {
            host: {
                **{key: getattr(lane, key) for key in ("role", "gpus", "machine", "location", "usd_per_hour")},
                "held_s": lane.held_ns / 1e9,
                "purchase_logged": lane.purchase_logged,
                "categories_s": {name: ns / 1e9 for name, ns in ledger.host_ns[host].items() if ns},
            }
            for host, lane in ledger.lanes.items()
        },
    }


def _newest(evals: list[dict[str, Any]], key: str) -> Any:
    return next((result[key] for result in reversed(evals) if result.get(key) is not None), None)


def _evals(ledger: Ledger) -> list[dict[str, Any]]:
    """Evaluations of the final lineage, one per step (the latest), in step order."""
    reached = {step.step for step in ledger.lineage.final} | {0}
    result: dict[int, dict[str, Any]] = {}
    for timed in ledger.events:
        event: Event = timed.event
        if event.kind == "eval" and event.step is not None and (event.step in reached or not ledger.lineage.steps):
            result[event.step] = {
                "step": event.step,
                "at_s": (timed.t_ns - ledger.begin_ns) / 1e9,
                **{key: value for key, value in event.detail.items() if isinstance(value, int | float | str | bool)},
            }
    return [result[step] for step in sorted(result)]


def _attempts(ledger: Ledger) -> list[dict[str, Any]]:
    return [
        {
            "attempt": attempt.number,
            "start_s": (attempt.start_ns - ledger.begin_ns) / 1e9,
            "end_s": (attempt.end_ns - ledger.begin_ns) / 1e9 if attempt.closed else None,
            "world_size": attempt.world_size,
            "layout": attempt.layout,
            "hosts": attempt.hosts,
            "cause": attempt.cause,
            "tier": attempt.tier,
            "steps": sum(1 for step in ledger.lineage.steps if step.attempt == attempt.number),
            "steps_kept": sum(1 for step in ledger.lineage.steps if step.attempt == attempt.number and step.final),
        }
        for attempt in ledger.lineage.attempts
    ]


def _model(ledger: Ledger) -> dict[str, Any] | None:
    event = next((t.event for t in reversed(ledger.events) if t.event.kind == "model.ready"), None)
    if event is None:
        return None
    return {key: value for key, value in event.detail.items() if isinstance(value, int | float | str | bool)}


def _log(ledger: Ledger, verdicts: Mapping[str, Verdict]) -> dict[str, Any]:
    """What the check of the log's chains found."""
    problems = [f"{name}: {verdict.problem}" for name, verdict in verdicts.items() if verdict.problem]
    return {
        "verified": bool(verdicts) and not problems,
        "problems": problems,
        "files": {
            name: {"events": verdict.events, "torn_bytes": verdict.torn_bytes, "problem": verdict.problem}
            for name, verdict in verdicts.items()
        },
        "clock_error_s": {
            name: None if error is None else error / 1e9 for name, error in ledger.aligned.clock_error_ns.items()
        },
        "fenced_steps": ledger.lineage.fenced,
    }
