"""What a host's agent reports, and what follows: one function for each kind of message."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from muster.core.errors import UsageError
from muster.core.incidents import HOST_UNHEALTHY, RANK_HANG, START_UP, traits_of
from muster.supervise.recovery import final_flush, preemption_notices
from muster.supervise.recovery.attempts import start_when_drained
from muster.supervise.recovery.context import SupervisorContext
from muster.supervise.recovery.hosts import consider_growth, host_ready, rejoin_after_timeout, set_aside
from muster.supervise.recovery.incidents import extend_resize_deadline, report_incident
from muster.supervise.recovery.rank_exits import rank_exit
from muster.supervise.recovery.start_message import on_replicator_address
from muster.supervise.recovery.state import Host, Phase

Handler = Callable[[SupervisorContext, Host, Mapping[str, Any]], None]


def _memory(ctx: SupervisorContext, host: Host, message: Mapping[str, Any]) -> None:
    on_replicator_address(ctx, host, (str(message["memory"][0]), int(message["memory"][1])))


def _store(ctx: SupervisorContext, host: Host, message: Mapping[str, Any]) -> None:
    host.store = (str(message["store"][0]), int(message["store"][1]))


def _store_lost(ctx: SupervisorContext, host: Host, message: Mapping[str, Any]) -> None:
    host.store = None


def _progress(ctx: SupervisorContext, host: Host, message: Mapping[str, Any]) -> None:
    """Ranks before their first step report that a long start is alive: ``start_timeout_s`` begins again."""
    state = ctx.state
    if message["attempt"] == state.attempt and state.phase is Phase.RUN and not state.stepped:
        ctx.deadline(ctx.settings.spec.recovery.start_timeout_s)  # a script that reports progress uses muster.run


def _event(ctx: SupervisorContext, host: Host, message: Mapping[str, Any]) -> None:
    event, state = message["event"], ctx.state
    if event.get("kind") == "checkpoint.committed":
        state.add_checkpoint(event)
    elif event.get("kind") == "checkpoint.failed":
        state.save_failed = str((event.get("detail") or {}).get("reason", ""))
    elif event.get("kind") == "step" and event.get("attempt") == state.attempt:
        _step(ctx, int(event["step"]), event.get("detail") or {})


def _step(ctx: SupervisorContext, step: int, detail: Mapping[str, Any]) -> None:
    state = ctx.state
    first, state.stepped = not state.stepped, True
    state.add_step_time(detail, first=first)
    if state.phase is Phase.RUN and not state.resizing:
        state.deadline_ns = None
    elif state.phase is Phase.RUN:
        extend_resize_deadline(ctx)
    if step > state.last_applied_step:
        _advance(ctx, step)
    if first and state.phase is Phase.RUN:
        consider_growth(ctx)


def _advance(ctx: SupervisorContext, step: int) -> None:
    """A step beyond all that were applied before: the open incident is resolved."""
    state, incident = ctx.state, ctx.state.open
    redone_from = incident.last_applied_step if incident else 0
    state.last_applied_step = step
    state.restarts_without_progress = 0
    if incident is None:
        return
    if "started" not in incident.stages_ns:
        incident.last_applied_step = step  # a late report of the attempt that ends: it was applied all the same
    elif state.phase is Phase.RUN:
        lost_ns = incident.stages_ns["first_step"] = ctx.now_ns - incident.detected_ns
        resumed = incident.stages_ns.pop("resume_step", redone_from)
        cost = {"lost_ns": lost_ns, "redone_steps": max(0, redone_from - resumed)}
        detail = {"incident_id": incident.incident_id, **cost, "stages_ns": dict(incident.stages_ns)}
        ctx.log("incident.resolved", detail, step=step)
        state.open = None


def _rank_hang(ctx: SupervisorContext, host: Host, message: Mapping[str, Any]) -> None:
    if message["attempt"] == ctx.state.attempt and ctx.state.phase is Phase.RUN:
        evidence, silent_s = str(message["evidence"]), float(message.get("silent_s", 0.0))
        rank = message.get("rank")
        report_incident(ctx, RANK_HANG, host=host.name, rank=rank, evidence=evidence, silent_s=silent_s)


def _collected(ctx: SupervisorContext, host: Host, message: Mapping[str, Any]) -> None:
    """A host has ended its ranks and lists the snapshots it holds."""
    if host.drain_timed_out and not host.connected:
        rejoin_after_timeout(ctx, host, message)
        return
    if message["attempt"] < ctx.state.attempt:
        return
    host.snapshots = list(message["snapshots"])
    host.retained = {int(rank): int(step) for rank, step in message.get("kept", {}).items()}
    host.alive = {}
    reset = message.get("reset")
    if reset is not None and not reset["ok"]:
        evidence = f"{host.name}: its GPUs could not be reset: {reset['evidence']}"
        report_incident(ctx, HOST_UNHEALTHY, host=host.name, evidence=evidence)
    final_flush.on_drained(ctx, host.name)
    if host.name in ctx.state.draining:
        ctx.state.draining.discard(host.name)
        start_when_drained(ctx)


def _start_failed(ctx: SupervisorContext, host: Host, message: Mapping[str, Any]) -> None:
    """An agent could not prepare: bad data, a missing library, no memory for a fork server."""
    reason = str(message["reason"])
    if not set_aside(ctx, host.name, reason) and ctx.state.phase in (Phase.STARTING, Phase.RUN, Phase.WAIT):
        detail = {"exit_code": int(message.get("exit_code", 1)), "hint": message.get("hint")}
        report_incident(ctx, START_UP, host=host.name, evidence=reason, detail=detail)


def _health(ctx: SupervisorContext, host: Host, message: Mapping[str, Any]) -> None:
    """A detector's report on a host: what is wrong, and which GPUs a reset may heal (none: it may not)."""
    host.resettable = tuple(int(gpu) for gpu in message.get("resettable", ()))
    if ctx.state.phase is not Phase.RUN or host.name not in ctx.state.active:
        return
    try:
        traits = traits_of(str(message.get("kind", HOST_UNHEALTHY.kind)))
    except UsageError:  # of a package that only the host has
        traits = HOST_UNHEALTHY
    report_incident(ctx, traits, host=host.name, evidence=f"{host.name}: {message['evidence']}")


HANDLERS: Mapping[str, Handler] = {
    "ready": host_ready,
    "memory": _memory,
    "progress": _progress,
    "store": _store,
    "store_lost": _store_lost,
    "event": _event,
    "rank_exit": lambda ctx, host, message: rank_exit(ctx, host.name, message),
    "rank_hang": _rank_hang,
    "collected": _collected,
    "flushed": lambda ctx, host, message: final_flush.on_answer(ctx, host.name, message),
    "flush_committed": lambda ctx, host, message: final_flush.on_answer(ctx, host.name, message),
    "failed": _start_failed,
    "notice": lambda ctx, host, message: preemption_notices.on_notice(ctx, host.name, message),
    "health": _health,
}
