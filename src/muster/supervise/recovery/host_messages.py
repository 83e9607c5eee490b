"""What a host's agent reports, and what follows: one function for each message."""

from __future__ import annotations

from muster.core.incidents import HOST_UNHEALTHY, RANK_HANG, START_UP, traits_of
from muster.core.typed_json import Json, JsonObject
from muster.protocol.client import HealthReport
from muster.protocol.to_supervisor import (
    FlushCommitted,
    FromAgent,
    HostFault,
    HostNotice,
    HostReady,
    RankExit,
    RankHang,
    RanksEnded,
    RanksProgress,
    ReplicatorAddress,
    SnapshotsFlushed,
    SnapshotsRejected,
    StartFailed,
    StoreLost,
)
from muster.protocol.values import RankEvent, StoreAddress
from muster.supervise.recovery import final_flush, preemption_notices
from muster.supervise.recovery.attempts import start_when_drained
from muster.supervise.recovery.context import SupervisorContext
from muster.supervise.recovery.hosts import consider_growth, host_ready, rejoin_after_timeout, set_aside
from muster.supervise.recovery.incidents import extend_resize_deadline, report_incident
from muster.supervise.recovery.phases import Draining, Flushing, Running, Starting, Waiting
from muster.supervise.recovery.rank_exits import rank_exit
from muster.supervise.recovery.start_message import on_replicator_address
from muster.supervise.recovery.state import Host


def on_message(ctx: SupervisorContext, host: Host, message: FromAgent | HealthReport) -> None:
    match message:
        case HostReady():
            host_ready(ctx, host, message)
        case ReplicatorAddress():
            on_replicator_address(ctx, host, message.memory)
        case StoreAddress():
            host.store = message.store
        case StoreLost():
            host.store = None
        case RanksProgress():
            _progress(ctx, message)
        case RankEvent():
            _event(ctx, message)
        case RankExit():
            rank_exit(ctx, host.name, message)
        case RankHang():
            _rank_hang(ctx, host, message)
        case RanksEnded():
            _ranks_ended(ctx, host, message)
        case SnapshotsFlushed() | FlushCommitted():
            final_flush.on_answer(ctx, host.name, message)
        case SnapshotsRejected():
            ctx.reject(message.copies, message.reason)
        case StartFailed():
            _start_failed(ctx, host, message)
        case HostNotice():
            preemption_notices.on_notice(ctx, host.name, message)
        case HealthReport() | HostFault():
            _health(ctx, host, message)


def _progress(ctx: SupervisorContext, message: RanksProgress) -> None:
    """Ranks before their first step report that a long start is alive: ``start_timeout_s`` begins again."""
    state = ctx.state
    if message.attempt == state.attempt and isinstance(state.phase, Running) and not state.progress.stepped:
        ctx.deadline(ctx.settings.spec.recovery.start_timeout_s)  # a script that reports progress uses muster.run


def _event(ctx: SupervisorContext, event: RankEvent) -> None:
    state = ctx.state
    if event.kind == "checkpoint.committed":
        state.add_checkpoint(event.step, event.detail)
    elif event.kind == "checkpoint.failed":
        state.save_failed = str(event.detail.get("reason", ""))
    elif event.kind == "step" and event.attempt == state.attempt and event.step is not None:
        _step(ctx, event.step, event.detail)
    elif event.kind == "checkpoint.restored" and event.attempt == state.attempt and event.step is not None:
        state.advance(event.step)  # whose own event another life of the run has, or nobody


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


def _rank_hang(ctx: SupervisorContext, host: Host, message: RankHang) -> None:
    if message.attempt == ctx.state.attempt and isinstance(ctx.state.phase, Running):
        report_incident(
            ctx, RANK_HANG, host=host.name, rank=message.rank, evidence=message.evidence, silent_s=message.silent_s
        )


def _ranks_ended(ctx: SupervisorContext, host: Host, message: RanksEnded) -> None:
    """A host has ended its ranks and lists the snapshots it holds."""
    if host.drain_timed_out and not host.connected:
        rejoin_after_timeout(ctx, host, message)
        return
    if message.attempt < ctx.state.attempt:
        return
    host.snapshots, host.retained, host.alive = message.snapshots, message.kept, {}
    if message.reset is not None and not message.reset.ok and isinstance(ctx.state.phase, Draining):
        evidence = f"{host.name}: its GPUs could not be reset: {message.reset.evidence}"
        report_incident(ctx, HOST_UNHEALTHY, host=host.name, evidence=evidence)
    phase = ctx.state.phase
    if isinstance(phase, Flushing):
        final_flush.on_drained(ctx, phase, host.name)
    elif isinstance(phase, Draining) and phase.waiting.pop(host.name, None) is not None:
        start_when_drained(ctx)


def _start_failed(ctx: SupervisorContext, host: Host, message: StartFailed) -> None:
    """An agent could not prepare: bad data, a missing library, no memory for a fork server."""
    if not set_aside(ctx, host.name, message.reason) and isinstance(ctx.state.phase, Starting | Running | Waiting):
        detail: JsonObject = {"exit_code": message.exit_code, "hint": message.hint}
        report_incident(ctx, START_UP, host=host.name, evidence=message.reason, detail=detail)


def _health(ctx: SupervisorContext, host: Host, message: HealthReport | HostFault) -> None:
    """A detector's report on a host, or its own look at its hardware: what is wrong, and what may heal it."""
    traits, evidence, detail = HOST_UNHEALTHY, message.evidence[:500], dict[str, Json]()
    health: dict[str, Json] = {"resettable": list(message.resettable)}
    if isinstance(message, HostFault):
        health["verdict"] = detail["class"] = message.verdict
    else:
        traits = traits_of(message.kind)
    ctx.log("host.health", {"incident": traits.kind, "evidence": evidence, **health}, host=host.name)
    host.resettable = message.resettable
    if isinstance(ctx.state.phase, Running) and host.name in ctx.state.active:
        report_incident(ctx, traits, host=host.name, evidence=f"{host.name}: {evidence}", detail=detail)
    elif isinstance(message, HostFault) and host.name not in ctx.state.active and not host.quarantined:
        host.quarantined = True  # a spare that would fail the moment it is needed
        ctx.log("host.quarantined", {"reason": evidence}, host=host.name)
