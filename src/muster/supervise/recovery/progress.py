"""Progress of hosts and ranks: preparation, steps, saves, stragglers; the end of an incident."""

from __future__ import annotations

from muster.core.event_details import training
from muster.core.incidents import STRAGGLER
from muster.core.typed_json import Json, JsonObject, Unreadable
from muster.health.stragglers import NOT_ASSESSED, NotAssessed, find_straggler, usd_per_day
from muster.protocol.to_supervisor import RanksProgress
from muster.protocol.values import RankEvent
from muster.supervise.recovery.attempts import patience_s, unready_host
from muster.supervise.recovery.context import SupervisorContext
from muster.supervise.recovery.hosts import consider_growth
from muster.supervise.recovery.incidents import extend_resize_deadline, report_incident
from muster.supervise.recovery.phases import Running, Starting, Waiting
from muster.supervise.recovery.state import Host


def on_preparing(ctx: SupervisorContext, host: Host) -> None:
    """A host still downloads what a start needs: its time limit begins again. Weights take longer than a start."""
    phase = ctx.state.phase
    if host.readiness.start_failed:
        return
    if isinstance(phase, Starting) and len(ctx.usable()) < ctx.settings.min_hosts:
        ctx.deadline(ctx.settings.spec.recovery.start_timeout_s)
    elif isinstance(phase, Waiting) and unready_host(ctx, phase.next) is not None:
        ctx.deadline(patience_s(ctx, phase.next))


def on_progress(ctx: SupervisorContext, message: RanksProgress) -> None:
    """Ranks before their first step report that a long start is alive: ``start_timeout_s`` begins again."""
    state = ctx.state
    if message.attempt == state.attempt and isinstance(state.phase, Running) and not state.progress.stepped:
        ctx.deadline(ctx.settings.spec.recovery.start_timeout_s)  # a script that reports progress uses muster.run


def on_rank_event(ctx: SupervisorContext, event: RankEvent) -> None:
    """A rank's step or save."""
    state = ctx.state
    if event.kind == "checkpoint.committed":
        state.saves.add_checkpoint(event.step, event.detail)
    elif event.kind == "checkpoint.failed":
        state.saves.failed = str(event.detail.get("reason", ""))
    elif event.kind == "step" and event.attempt == state.attempt and event.step is not None:
        _step(ctx, event.step, event.detail)
    elif event.kind == "checkpoint.restored" and event.attempt == state.attempt and event.step is not None:
        state.advance(event.step)  # the step's own event may be in an earlier attempt's log, or lost


def _step(ctx: SupervisorContext, step: int, detail: JsonObject) -> None:
    state, phase = ctx.state, ctx.state.phase
    before = state.last_applied_step
    first = state.add_step(step, detail)
    if isinstance(phase, Running) and phase.resize is None:
        phase.deadline_ns = None
    elif isinstance(phase, Running) and phase.resize is not None:
        extend_resize_deadline(ctx, phase.resize)
    if step > before:
        _resolve(ctx, step)
    if first and isinstance(phase, Running):
        consider_growth(ctx, phase)
    if detail.get("pace") and isinstance(phase, Running):
        _pace(ctx, step, detail)


def _pace(ctx: SupervisorContext, step: int, detail: JsonObject) -> None:
    """One rank keeps coming last: whether it is a straggler, and why. Uneven work is no incident."""
    try:
        paces = training.Step.of(detail, skip_unknown=True).pace
    except Unreadable:  # no rank of Muster's own: training goes on
        return
    state, found = ctx.state, find_straggler(paces)
    if isinstance(found, NotAssessed):
        if (None, NOT_ASSESSED) not in state.progress.stragglers:  # once
            ctx.log("run.message", {"text": found.reason}, step=step)
        state.progress.stragglers.add((None, NOT_ASSESSED))
        return
    if found is None or (found.rank, found.cause.value) in state.progress.stragglers:
        return
    state.progress.stragglers.add((found.rank, found.cause.value))
    host = state.ranks.get(found.rank) if found.cause.blames_host else None
    price = ctx.settings.usd_per_host_hour
    usd = usd_per_day(found.lag_us, found.step_us, hosts=len(state.active), usd_per_host_hour=price)
    details: dict[str, Json] = {"cause": found.cause.value, "evidence": found.evidence, "last": found.last}
    details |= {"steps": found.steps, "lag_ns": int(found.lag_us * 1000), "step_ns": int(found.step_us * 1000)}
    if usd is not None:
        details["usd_per_day"] = round(usd, 2)
    ctx.log("straggler.named", details, host=host, rank=found.rank, step=step)
    if host is not None:
        report_incident(ctx, STRAGGLER, host=host, evidence=f"{host}: {found.evidence}", step=step)


def _resolve(ctx: SupervisorContext, step: int) -> None:
    """A step beyond all that were applied before: the open incident is resolved."""
    state, incident = ctx.state, ctx.state.open
    if incident is None:
        return
    if "started" in incident.stages_ns and isinstance(state.phase, Running):
        redone_from = incident.last_applied_step
        lost_ns = incident.stages_ns["first_step"] = ctx.now_ns - incident.detected_ns
        resumed = incident.stages_ns.pop("resume_step", redone_from)
        cost: JsonObject = {"lost_ns": lost_ns, "redone_steps": max(0, redone_from - resumed)}
        detail = {"incident_id": incident.incident_id, **cost, "stages_ns": dict(incident.stages_ns)}
        ctx.log("incident.resolved", detail, step=step)
        state.open = None
