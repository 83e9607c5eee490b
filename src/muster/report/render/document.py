"""The report as one document; ``docs/report.schema.json`` describes its JSON."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime

from muster.core.event_details.run import Outcome, RunSubmitted
from muster.core.event_details.training import Eval, ModelReady
from muster.core.event_log import Damage, Verdict
from muster.core.typed_json import JsonObject
from muster.report.ledger import figures
from muster.report.ledger.file_log import known
from muster.report.ledger.fold import Ledger
from muster.report.ledger.step_budget import StepBudget, step_budget
from muster.report.render.sentences import IncidentRow, incidents

SCHEMA = 1
MOST_NEXT = 3
_WASTE = 0.1
"""A share of the host time that is worth a line."""
_ADVICE = {
    "start": "a longer run pays for its start; prepared data is used again",
    "eval": "a larger evaluation.every_steps, or fewer evaluation.num_questions",
    "checkpoint": "a larger checkpoint.every_steps",
    "data_wait": "more data workers, or rows that are prepared beforehand",
    "redone": "a smaller checkpoint.every_steps, or snapshots in memory",
    "wait": "a spare host (resources.spare_hosts), or recovery with fewer hosts (resources.min_hosts)",
    "spare": "fewer spare hosts (resources.spare_hosts)",
    "hold": "a shorter recovery.keep_hosts_after_failure_s",
    "idle": "ranks ended at different times: muster why names the last",
}


@dataclass(frozen=True, kw_only=True)
class HostRow:
    role: str
    gpus: int
    machine: str | None
    location: str | None
    usd_per_hour: float | None
    held_s: float
    purchase_logged: bool
    categories_s: Mapping[str, float]


@dataclass(frozen=True, kw_only=True)
class HostTime:
    purchased_host_s: float
    purchased_host_ns: int
    identity_error: float
    queue_s: float
    hosts: Mapping[str, HostRow]


@dataclass(frozen=True, kw_only=True)
class AttemptRow:
    attempt: int
    start_s: float
    end_s: float | None
    world_size: int
    layout: Mapping[str, int]
    hosts: Mapping[str, Sequence[int]]
    cause: str | None
    tier: str | None
    steps: int
    steps_kept: int


@dataclass(frozen=True, kw_only=True)
class FileRow:
    events: int
    torn_bytes: int
    problem: str | None


@dataclass(frozen=True, kw_only=True)
class LogCheck:
    """What the check of the log's chains found."""

    verified: bool
    problems: Sequence[str]
    files: Mapping[str, FileRow]
    clock_error_s: Mapping[str, float | None]
    fenced_steps: int


@dataclass(frozen=True, kw_only=True)
class Document:
    """Everything a reader may want. None means unknown; nothing unknown is zero. In the order of the JSON."""

    schema: int = SCHEMA
    kind: str = "muster.report"
    run_id: str
    name: str | None
    outcome: Outcome | None
    exit_code: int | None
    reason: str | None
    backend: str | None
    version: str | None
    spec_digest: str | None
    started: str | None
    newest_event: str | None
    wall_s: float
    execution_accuracy: float | None
    execution_accuracy_before: float | None
    baseline_accuracy: float | None
    query_match: float | None
    final_loss: float | None
    heldout_loss: float | None
    steps: int
    final_step: int | None
    tokens: int
    tokens_per_s: float | None
    mfu: float | None
    goodput: figures.Goodput
    cost: figures.Cost
    categories: Mapping[str, figures.CategoryTime]
    host_time: HostTime
    token_counts: figures.TokenCounts
    speed: figures.Speed
    step_budget: StepBudget | None
    interruptions: int
    incidents: Sequence[IncidentRow]
    incident_kinds: Mapping[str, figures.KindFigures]
    checkpoint_exposure: Mapping[str, figures.Ages]
    evals: Sequence[JsonObject]
    attempts: Sequence[AttemptRow]
    model: JsonObject | None
    log: LogCheck
    damaged: Sequence[Damage]
    notes: Sequence[str]

    def to_json(self) -> JsonObject:
        return asdict(self)


def document(ledger: Ledger, verdicts: Mapping[str, Verdict], damaged: Sequence[Damage] = ()) -> Document:
    """The document of one run's ledger, which was read without what is ``damaged``."""
    submissions = (t.event.read(RunSubmitted) for t in ledger.events if t.event.kind == RunSubmitted.kind)
    submitted, end = next(submissions, None), ledger.finished
    evals = _evals(ledger)
    scores = [each for _, each in evals.values()]
    steps = ledger.lineage.steps
    speed, total = figures.speed(steps), figures.tokens(ledger)
    last = steps.in_lineage[-1:]
    return Document(
        run_id=ledger.run_id,
        name=submitted.name if submitted else None,
        outcome=end.outcome if end else None,
        exit_code=end.exit_code if end else None,
        reason=end.reason if end else None,
        backend=submitted.backend if submitted else None,
        version=submitted.version if submitted else None,
        spec_digest=submitted.spec_digest if submitted else None,
        started=moment(ledger, ledger.begin_ns) if ledger.events else None,
        newest_event=moment(ledger, ledger.end_ns) if ledger.events else None,
        wall_s=(ledger.end_ns - ledger.begin_ns) / 1e9,
        execution_accuracy=_newest(each.execution_accuracy for each in scores),
        execution_accuracy_before=scores[0].execution_accuracy if len(scores) > 1 else None,
        baseline_accuracy=_newest(each.baseline_accuracy for each in scores),
        query_match=_newest(each.query_match for each in scores),
        final_loss=_newest(known(steps.numbers("loss")[last])),
        heldout_loss=scores[-1].loss if scores else None,
        steps=len(steps.in_lineage),
        final_step=int(steps.step[last[0]]) if len(last) else None,
        tokens=total.final_lineage,
        tokens_per_s=speed.tokens_per_s,
        mfu=speed.mfu,
        goodput=figures.goodput(ledger),
        cost=figures.cost(ledger),
        categories=figures.categories(ledger),
        host_time=_host_time(ledger),
        token_counts=total,
        speed=speed,
        step_budget=step_budget(ledger.events, steps, figures.usd_per_hour(ledger)),
        interruptions=sum(incident.stopped_training for incident in ledger.incident_records.values()),
        incidents=incidents(ledger),
        incident_kinds=figures.incident_kinds(ledger),
        checkpoint_exposure=figures.exposure(ledger),
        evals=[_plain({"step": step, "at_s": at_s, **vars(each), **each.more}) for step, (at_s, each) in evals.items()],
        attempts=_attempts(ledger),
        model=_model(ledger),
        log=_log(ledger, verdicts),
        damaged=list(damaged),
        notes=ledger.notes,
    )


def moment(ledger: Ledger, t_ns: int) -> str:
    """A point on the axis as ISO 8601 in UTC."""
    at = datetime.fromtimestamp((t_ns + ledger.aligned.wall_at_zero_ns) / 1e9, tz=UTC)
    return at.isoformat(timespec="milliseconds").replace("+00:00", "Z")


def _host_time(ledger: Ledger) -> HostTime:
    return HostTime(
        purchased_host_s=ledger.purchased_ns / 1e9,
        purchased_host_ns=ledger.purchased_ns,
        identity_error=ledger.identity_error,
        queue_s=ledger.queue_ns / 1e9,
        hosts={
            host: HostRow(
                role=lane.role,
                gpus=lane.gpus,
                machine=lane.machine,
                location=lane.location,
                usd_per_hour=lane.usd_per_hour,
                held_s=lane.held_ns / 1e9,
                purchase_logged=lane.purchase_logged,
                categories_s={name: ns / 1e9 for name, ns in ledger.host_ns[host].items() if ns},
            )
            for host, lane in ledger.lanes.items()
        },
    )


def _newest(values: Iterable[float | None]) -> float | None:
    return next((value for value in reversed(list(values)) if value is not None), None)


def _evals(ledger: Ledger) -> dict[int, tuple[float, Eval]]:
    """Evaluations of the final lineage, in step order: step -> (seconds since the run began, the latest one's)."""
    steps = ledger.lineage.steps
    result: dict[int, tuple[float, Eval]] = {}
    for timed in ledger.events:
        event = timed.event
        if event.kind != Eval.kind or event.step is None:
            continue
        if event.step == 0 or steps.tokens_seen(event.step) is not None or not len(steps):
            result[event.step] = ((timed.t_ns - ledger.begin_ns) / 1e9, event.read(Eval))
    return dict(sorted(result.items()))


def _attempts(ledger: Ledger) -> list[AttemptRow]:
    return [
        AttemptRow(
            attempt=attempt.number,
            start_s=(attempt.start_ns - ledger.begin_ns) / 1e9,
            end_s=(attempt.end_ns - ledger.begin_ns) / 1e9 if attempt.closed else None,
            world_size=attempt.world_size,
            layout=attempt.layout,
            hosts=attempt.hosts,
            cause=attempt.cause,
            tier=attempt.tier,
            steps=ledger.coverage[attempt.number].steps,
            steps_kept=ledger.coverage[attempt.number].steps_kept,
        )
        for attempt in ledger.lineage.attempts
    ]


def _model(ledger: Ledger) -> JsonObject | None:
    event = next((t.event for t in reversed(ledger.events) if t.event.kind == ModelReady.kind), None)
    if event is None:
        return None
    detail = event.read(ModelReady)
    return _plain({**vars(detail), **detail.more})


def _plain(detail: JsonObject) -> JsonObject:
    """What of an open detail is a word or a number."""
    return {key: value for key, value in detail.items() if isinstance(value, int | float | str | bool)}


def _log(ledger: Ledger, verdicts: Mapping[str, Verdict]) -> LogCheck:
    problems = [f"{name}: {verdict.problem}" for name, verdict in verdicts.items() if verdict.problem]
    return LogCheck(
        verified=bool(verdicts) and not problems,
        problems=problems,
        files={
            name: FileRow(events=verdict.events, torn_bytes=verdict.torn_bytes, problem=verdict.problem)
            for name, verdict in verdicts.items()
        },
        clock_error_s={
            name: None if error is None else error / 1e9 for name, error in ledger.aligned.clock_error_ns.items()
        },
        fenced_steps=ledger.lineage.fenced,
    )


def next_steps(document: Document) -> list[str]:
    """What to do next, at most ``MOST_NEXT`` lines, each from a figure of the report; none while it runs."""
    lines: list[str] = []
    run_id, step = document.run_id, document.final_step
    accuracy, baseline = document.execution_accuracy, document.baseline_accuracy
    if document.outcome in ("stopped", "preempted"):
        lines.append(f"muster recover {run_id} continues it{'' if step is None else f' after step {step:,}'}")
    elif document.outcome == "failed":
        lines.append(f"muster why {run_id} says what went wrong{'' if step is None else f' after step {step:,}'}")
    elif document.outcome == "succeeded" and document.heldout_loss is not None:
        lines.append(f"muster export {run_id}: the model with a held-out loss of {document.heldout_loss:.4f}")
    if document.outcome and accuracy is not None and baseline is not None and accuracy <= baseline:
        lines.append(
            f"execution accuracy {accuracy:.1%} is not above the {baseline:.1%} of always giving the commonest answer: "
            "more training.steps, or a better start"
        )
    lost = {name: spent.share or 0.0 for name, spent in document.categories.items() if name in _ADVICE}
    most = max(lost, key=lambda name: lost[name], default=None)
    if document.outcome and most is not None and lost[most] >= _WASTE:
        lines.append(f"{lost[most]:.0%} of the host time went to {most}: {_ADVICE[most]}")
    return lines[:MOST_NEXT]
