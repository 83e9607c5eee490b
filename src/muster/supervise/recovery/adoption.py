"""The takeover of a run: what the log says of it, and what its hosts answer."""

from __future__ import annotations

from muster.core.incidents import HOST_LOST, RANK_EXIT
from muster.supervise.recovery.attempts import ask_to_save, drain, log_end, start_attempt, start_when_drained
from muster.supervise.recovery.context import SupervisorContext
from muster.supervise.recovery.final_flush import begin_flush, finish, flush_and_finish
from muster.supervise.recovery.incidents import report_incident, request_resize
from muster.supervise.recovery.phases import Adopting, Draining, Flushing, Phase, Running, Starting, Stopping, Waiting
from muster.supervise.recovery.state import Host


def try_adopt(ctx: SupervisorContext, adopting: Adopting) -> None:
    """Continue where the log says that the run is, once every host that belongs to it has answered."""
    state, found = ctx.state, adopting.found
    if adopting.alone:  # here is the first one: from now on the others have as long as they always have
        adopting.alone = False
        ctx.deadline(ctx.settings.adopt_timeout_s)
    awaited = _awaited(ctx, adopting)
    members = [state.hosts[name] for name in awaited if name in state.hosts and state.hosts[name].connected]
    alive = {rank for host in members for rank in (*host.ranks.alive, *host.ranks.exited)}
    if len(members) < len(awaited) or (isinstance(found, Flushing) and not awaited):
        return
    if isinstance(found, Flushing) and any(host.ranks.attempt or host.ranks.snapshots for host in members):
        begin_flush(ctx, found.end, by_user=found.by_user)
    elif members and not alive and all(host.ranks.attempt == 0 for host in members):
        _abandon(ctx, adopting)  # new agents: every process of the run was lost (a reboot, a kill of everything)
    elif isinstance(found, Draining | Waiting):
        drain(ctx, found.next)
    elif set(state.ranks) <= alive and all(host.ranks.attempt == state.attempt for host in members):
        _continue(ctx, found)
    elif all(host.readiness.ready for host in members):
        adopt_failed(ctx, adopting)


def _abandon(ctx: SupervisorContext, adopting: Adopting) -> None:
    """Nothing of the attempt is left: start the run again."""
    state = ctx.state
    reason = f"no rank of attempt {state.attempt} survived: resuming from the newest checkpoint"
    ctx.log("attempt.abandoned", {"reason": reason})
    state.abandon()
    ctx.enter(Starting())
    ctx.deadline(ctx.settings.spec.recovery.start_timeout_s)
    adopting.asked_before = None  # it was stopped, and everything ended: now it is started again
    ready = ctx.usable()
    if len(ready) >= ctx.settings.wanted_hosts and adopting.asked is None:
        start_attempt(ctx, ready[: ctx.settings.wanted_hosts])


def _nobody(ctx: SupervisorContext, adopting: Adopting) -> None:
    """No host has answered. They may be slow, cut off for a while or booting, and to end the run would end what their
    ranks do meanwhile: the first one has as long as at a run's start."""
    asked, limit_s = adopting.asked, ctx.settings.spec.recovery.start_timeout_s
    if asked is not None:
        finish(ctx, asked.outcome, asked.exit_code, f"{asked.source}: no host answers; the newest checkpoint remains")
    elif adopting.alone or limit_s <= ctx.settings.adopt_timeout_s:
        finish(ctx, "failed", 6, "no host answers a new supervisor; start the run again to resume from its checkpoint")
    else:
        adopting.alone = True
        ctx.log("run.message", {"text": f"no host has answered the new supervisor yet; it waits for {limit_s:g} s"})
        ctx.deadline(limit_s - ctx.settings.adopt_timeout_s)


def _awaited(ctx: SupervisorContext, adopting: Adopting) -> tuple[str, ...]:
    found = adopting.found
    return tuple(found.next.hosts) if isinstance(found, Draining | Waiting) else ctx.state.active


def _continue(ctx: SupervisorContext, found: Phase) -> None:
    """All its ranks are there, or their exits will be reported."""
    ctx.log("attempt.adopted", {})
    if isinstance(found, Stopping):  # the ranks may not have heard of it, or may hang in their save
        ask_to_save(ctx, found)
        return
    running = Running()
    ctx.enter(running)
    if not ctx.state.progress.stepped:
        ctx.await_first_step()
    if isinstance(found, Running) and found.resize is not None:
        request_resize(ctx, running, found.resize.hosts)


def adopt_failed(ctx: SupervisorContext, adopting: Adopting) -> None:
    """Not every host or rank is there: an incident like any other."""
    state, found = ctx.state, adopting.found
    if isinstance(found, Flushing):
        begin_flush(ctx, found.end, by_user=found.by_user)
        return
    awaited = _awaited(ctx, adopting)
    for name in awaited:
        state.hosts.setdefault(name, Host(name=name))
    lost = [name for name in awaited if not state.hosts[name].connected]
    if not any(host.connected for host in state.hosts.values()) and not isinstance(found, Waiting):
        _nobody(ctx, adopting)
        return
    if isinstance(found, Stopping):
        end = flush_and_finish if found.saves else finish
        end(ctx, found.outcome, found.exit_code, f"{found.source}: ranks were lost while they left")
        return
    replaced = isinstance(found, Draining | Waiting)
    ctx.enter(Draining(next=found.next) if isinstance(found, Draining | Waiting) else Running())
    if lost:
        report_incident(ctx, HOST_LOST, host=lost[0], evidence=f"{lost[0]} did not answer a new supervisor")
    elif not replaced:
        report_incident(ctx, RANK_EXIT, evidence="ranks were missing when a new supervisor took over")
    if isinstance(state.phase, Draining):
        following = state.phase.next
        following.hosts = [name for name in following.hosts if name not in lost]
        if replaced:
            drain(ctx, following)
        else:
            if len(lost) > 1:
                log_end(ctx, following)  # the decision left out the first one alone
            start_when_drained(ctx)
