"""Hosts that connect, are lost and rejoin; the takeover of a running attempt."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from muster.core.incidents import HOST_LOST, HOST_RETURNED, RANK_EXIT
from muster.supervise.recovery import final_flush
from muster.supervise.recovery.attempts import (
    SPARE,
    check_ranks_exited,
    has_rendezvous_store,
    resend_end,
    start_attempt,
    start_when_drained,
)
from muster.supervise.recovery.context import SupervisorContext
from muster.supervise.recovery.final_flush import finish
from muster.supervise.recovery.incidents import report_incident
from muster.supervise.recovery.state import SECOND_NS, Host, HostDown, HostUp, Phase


def host_up(ctx: SupervisorContext, given: HostUp) -> None:
    host = ctx.state.hosts.setdefault(given.host, Host(name=given.host))
    hello = given.hello
    if not host.connected and (host.has_connected or not hello.get("attempt")):
        clear_notice(host)
    host.has_connected = True
    host.connected, host.store, host.retained, host.drain_timed_out = True, None, {}, False
    host.alive = {int(rank): pid for rank, pid in hello.get("alive", {}).items()}
    host.exited = {int(rank) for rank in hello.get("exited", ())}
    host.attempt = int(hello.get("attempt", 0))
    host.snapshots = list(hello.get("snapshots", []))
    if int(hello.get("step", 0)) > ctx.state.last_applied_step:  # taken while there was no supervisor
        ctx.state.last_applied_step = int(hello["step"])
        ctx.state.restarts_without_progress = 0
    ctx.state.attempt = max(ctx.state.attempt, host.attempt if ctx.state.phase is Phase.ADOPT else 0)
    ctx.send(given.host, {"t": "welcome", "attempt": ctx.state.attempt})
    if not host.allocated:
        host.allocated = True
        price = ctx.settings.usd_per_host_hour
        priced = {"usd_per_hour": price} if price is not None else {}
        ctx.log("host.allocated", {"gpus": ctx.settings.ranks_per_host, "role": "active", **priced}, host=given.host)
    if host.attempt < ctx.state.attempt and host.alive:
        ctx.send(given.host, {"t": "end", "attempt": ctx.state.attempt - 1, "why": "of an older attempt"})
    before = ctx.state.phase
    if hello.get("ready"):
        host_ready(ctx, host, hello)
    if before is Phase.ADOPT:
        try_adopt(ctx)
    elif before is Phase.FLUSH:
        final_flush.on_host_returned(ctx, given.host)
    elif before is Phase.DRAINING:
        resend_end(ctx, given.host)
    elif before is Phase.RUN and given.host in ctx.state.active:
        check_returned_agent(ctx, host, {int(rank) for rank in hello.get("exited", ())})


def clear_notice(host: Host) -> None:
    """It has left and rejoined: an earlier preemption notice no longer applies."""
    host.preemption_grace_s = None
    if host.until_return:
        host.quarantined = host.until_return = False


def rejoin_after_timeout(ctx: SupervisorContext, host: Host, message: Mapping[str, Any]) -> None:
    """A host that timed out while stopping its ranks has stopped them after all."""
    host.drain_timed_out, host.connected = False, True
    host.snapshots, host.alive, host.retained = list(message["snapshots"]), {}, {}
    ctx.log("run.message", {"text": f"{host.name} has ended its ranks after all and can be used again"}, host=host.name)
    host_ready(ctx, host, {})


def end_quarantine(ctx: SupervisorContext, name: str) -> None:
    """The time of a quarantine that expires is over; or failures that kept a host from being used have expired."""
    host = ctx.state.hosts[name]
    if host.quarantined and not host.hold_off_s:
        return  # meanwhile it was quarantined for good
    was_out, host.quarantined, host.hold_off_s, host.asked_about = host.quarantined, False, 0.0, False
    if was_out:
        ctx.log("host.readmitted", {"reason": "its quarantine has expired"}, host=name)
    if host.connected and host.ready:
        host_ready(ctx, host, {})


def check_returned_agent(ctx: SupervisorContext, host: Host, exited: set[int]) -> None:
    """An agent reconnected while its host's ranks belong to the running attempt: are they all alive?

    Ranks in ``exited`` are reported one by one, with their codes, in the messages that follow.
    """
    gone = set(ctx.state.exited) | exited
    expected = set(ctx.ranks_on(host.name)) - gone
    if host.attempt == ctx.state.attempt and expected <= set(host.alive):
        return
    evidence = f"the agent on {host.name} came back without ranks {sorted(expected - set(host.alive))}"
    report_incident(ctx, RANK_EXIT, host=host.name, evidence=evidence)


def host_ready(ctx: SupervisorContext, host: Host, message: Mapping[str, Any]) -> None:
    host.ready, host.start_failed, host.asked_about = True, False, False
    host.store = (message["store"][0], int(message["store"][1])) if message.get("store") else host.store
    host.memory = (message["memory"][0], int(message["memory"][1])) if message.get("memory") else host.memory
    phase = ctx.state.phase
    if phase is Phase.STARTING:
        if len(ctx.usable()) >= ctx.settings.wanted_hosts:
            ctx.state.target = ctx.usable()[: ctx.settings.wanted_hosts]
            start_attempt(ctx)
    elif phase is Phase.WAIT:
        use_new_capacity(ctx, host)
    elif phase is Phase.RUN and host.name not in ctx.state.active and not host.quarantined:  # noqa: SIM102 (the condition acts)
        if not consider_growth(ctx):
            ctx.log("phase.changed", {"reason": SPARE}, host=host.name, phase="spare")


def consider_growth(ctx: SupervisorContext) -> bool:
    """Ask the policy, once for each host, whether idle hosts should join a run that has too few. True: it was asked."""
    state = ctx.state
    if state.resizing or len(state.active) >= ctx.settings.wanted_hosts:
        return False
    idle = [name for name in ctx.usable() if name not in state.active]
    new = [name for name in idle if not state.hosts[name].asked_about]
    room = ctx.settings.wanted_hosts - len(state.active)
    layout = ctx.largest_layout(len(state.active) + min(len(idle), room))
    if not new or layout is None or layout.world_size <= state.layout.world_size:
        return False  # half a sharded group is of no use: it waits for its other half
    for name in new:
        state.hosts[name].asked_about = True
    evidence = f"{new[0]} is ready" if len(new) == 1 else f"{len(new)} hosts are ready: {', '.join(new[:4])}"
    report_incident(ctx, HOST_RETURNED, host=new[0], evidence=evidence)
    for name in new if state.phase is Phase.RUN and not state.resizing else ():
        failures = state.hosts[name].failures_ns
        if failures:  # perhaps refused because of them: once they have expired, the policy is asked again
            oldest_s = (ctx.now_ns - min(failures)) / SECOND_NS
            ctx.alarm(f"back:{name}", max(0.0, ctx.settings.host_failure_window_s - oldest_s) + 1.0)
    return True


def set_aside(ctx: SupervisorContext, name: str, reason: str) -> bool:
    """Mark a host that cannot start; whether the run can continue without it for now (a bad spare)."""
    host, phase = ctx.state.hosts[name], ctx.state.phase
    host.start_failed = True
    if phase is Phase.STARTING:
        candidates = [host for host in ctx.state.hosts.values() if host.connected and not host.start_failed]
        needed = len(candidates) < ctx.settings.wanted_hosts
    elif phase in (Phase.RUN, Phase.DRAINING, Phase.WAIT):
        needed = name in (ctx.state.active if phase is Phase.RUN else ctx.state.target)
    else:
        return False
    if not needed:
        ctx.log("run.message", {"text": f"{name} cannot start and is set aside: {reason}"}, host=name)
    return not needed


def use_new_capacity(ctx: SupervisorContext, host: Host) -> None:
    if host.name not in ctx.state.target and not host.quarantined:
        ctx.state.target.append(host.name)
    usable = [name for name in ctx.state.target if ctx.state.hosts[name].ready and ctx.state.hosts[name].connected]
    if len(usable) >= ctx.needed() and has_rendezvous_store(ctx, usable):
        ctx.state.target = usable[: ctx.settings.wanted_hosts]
        start_attempt(ctx)


def host_down(ctx: SupervisorContext, given: HostDown) -> None:
    host = ctx.state.hosts.get(given.host)
    if host is None:
        return
    if not host.connected:
        host.drain_timed_out = False
        return
    host.connected = host.ready = False
    host.snapshots, host.retained = [], {}
    ctx.log("host.lost", {"evidence": given.reason}, host=given.host)
    phase = ctx.state.phase
    if phase is Phase.STOPPING:
        for rank in ctx.ranks_on(given.host):
            ctx.state.exited.setdefault(rank, -9)
        check_ranks_exited(ctx)
    elif phase is Phase.FLUSH:
        final_flush.on_host_lost(ctx, given.host)
    elif phase in (Phase.RUN, Phase.DRAINING, Phase.WAIT) and given.host in (
        ctx.state.active if phase is Phase.RUN else ctx.state.target
    ):
        evidence = f"{given.host}: {given.reason}"
        report_incident(ctx, HOST_LOST, host=given.host, evidence=evidence, silent_s=given.silent_s)
    if phase is Phase.DRAINING and ctx.state.phase is Phase.DRAINING:
        ctx.state.draining.discard(given.host)
        start_when_drained(ctx)


def try_adopt(ctx: SupervisorContext) -> None:
    """After the loss of a supervisor: are all ranks of the logged attempt alive and of that attempt?"""
    state = ctx.state
    if not all(name in state.hosts and state.hosts[name].connected for name in state.active):
        return
    members = [state.hosts[name] for name in state.active]
    fresh = not any(host.attempt or host.snapshots for host in members)
    if state.ending is not None and not fresh:  # it was ending when its supervisor was lost
        final_flush.begin_flush(ctx)
        return
    alive = {rank for host in members for rank in (*host.alive, *host.exited)}
    if set(state.ranks) <= alive and all(host.attempt == state.attempt for host in members):
        state.phase, state.adopted, state.deadline_ns = Phase.RUN, state.attempt, None
        if not state.stepped:
            ctx.await_first_step()
        state.asked = state.asked or state.stop_before  # the ranks may not have received it, and may hang in their save
        ctx.log("run.message", {"text": f"attempt {state.attempt} continues under a new supervisor"})
        return
    if not alive and all(host.attempt == 0 for host in members):
        # New agents: every process of the run was lost (a reboot, a kill of everything), and it is started again.
        text = f"no rank of attempt {state.attempt} survived: resuming from the newest checkpoint"
        ctx.log("run.message", {"text": text})
        state.phase, state.active, state.ranks, state.ending = Phase.STARTING, [], {}, None
        ctx.deadline(ctx.settings.spec.recovery.start_timeout_s)
    elif all(host.ready for host in members):
        adopt_failed(ctx)


def adopt_failed(ctx: SupervisorContext) -> None:
    state = ctx.state
    if state.ending is not None:
        final_flush.begin_flush(ctx)
        return
    lost = [name for name in state.active if name not in state.hosts or not state.hosts[name].connected]
    for name in lost:
        state.hosts.setdefault(name, Host(name=name))
    if not any(host.connected for host in state.hosts.values()):
        finish(ctx, "failed", 6, "no host answers a new supervisor; start the run again to resume from its checkpoint")
        return
    state.phase = Phase.RUN
    if lost:
        report_incident(ctx, HOST_LOST, host=lost[0], evidence=f"{lost[0]} did not answer a new supervisor")
        state.target = [name for name in state.target if name not in lost]
        start_when_drained(ctx)
    else:
        report_incident(ctx, RANK_EXIT, evidence="ranks were missing when a new supervisor took over")
