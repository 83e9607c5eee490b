"""Hosts that connect, are lost and rejoin."""

from __future__ import annotations

from muster.core.incidents import HOST_LOST, HOST_RETURNED, HOST_UNHEALTHY, RANK_EXIT, START_UP
from muster.core.typed_json import JsonObject
from muster.protocol.hello import AgentHello
from muster.protocol.to_agent import EndAttempt, Welcome
from muster.protocol.to_supervisor import HostReady, RanksEnded, StartFailed, StoreLost
from muster.protocol.values import StoreAddress
from muster.protocol.version import MINE
from muster.supervise.recovery import final_flush
from muster.supervise.recovery.adoption import try_adopt
from muster.supervise.recovery.attempts import (
    SPARE,
    check_ranks_exited,
    has_rendezvous_store,
    log_waiting,
    ready_hosts,
    resend_end,
    start_attempt,
)
from muster.supervise.recovery.context import SupervisorContext
from muster.supervise.recovery.incidents import end_of_held, judge_fault, report_incident, start_unless_faulty
from muster.supervise.recovery.inputs import SECOND_NS, HostDown, HostUp
from muster.supervise.recovery.phases import (
    Adopting,
    Draining,
    Flushing,
    Held,
    NextHosts,
    Running,
    Starting,
    Stopping,
    Waiting,
)
from muster.supervise.recovery.state import Host, HostRanks, Link, Quarantine, Readiness


def host_up(ctx: SupervisorContext, given: HostUp) -> None:
    host = ctx.state.hosts.setdefault(given.host, Host(name=given.host))
    hello = given.hello
    if not host.connected and (host.notice.lost_since or not hello.attempt) and clear_notice(host):
        detail: JsonObject = {"reason": "it has left and rejoined", "cause": "returned"}
        ctx.log("host.readmitted", detail, host=host.name)
    host.link, host.machine.store = Link.CONNECTED, None
    host.ranks = HostRanks(attempt=hello.attempt, alive=hello.alive, exited=hello.exited, snapshots=hello.snapshots)
    ctx.state.advance(hello.step)  # perhaps taken while there was no supervisor
    before = ctx.state.phase
    ctx.state.attempt = max(ctx.state.attempt, host.ranks.attempt if isinstance(before, Adopting) else 0)
    ctx.send(given.host, Welcome(version=MINE, attempt=ctx.state.attempt))
    if not host.machine.allocated:
        host.machine.allocated = True
        price = ctx.settings.usd_per_host_hour
        priced = {"usd_per_hour": price} if price is not None else {}
        ctx.log("host.allocated", {"gpus": ctx.settings.ranks_per_host, "role": "active", **priced}, host=given.host)
    if hello.place != host.machine.place:
        host.machine.place = hello.place
        ctx.log("host.placed", {"place": vars(host.machine.place)}, host=host.name)
    if host.ranks.attempt < ctx.state.attempt and host.ranks.alive:
        ctx.send(given.host, EndAttempt(attempt=ctx.state.attempt - 1, why="of an older attempt"))
    if hello.ready:
        host_ready(ctx, host, hello)
    if isinstance(before, Adopting):
        try_adopt(ctx, before)
    elif isinstance(before, Flushing):
        final_flush.on_host_returned(ctx, before, given.host)
    elif isinstance(before, Draining):
        resend_end(ctx, before, given.host)
    elif isinstance(before, Held) and host.ranks.alive:
        ctx.send(given.host, end_of_held(ctx))  # it may not have heard of it
    elif isinstance(before, Running) and given.host in ctx.state.active:
        check_returned_agent(ctx, host)


def clear_notice(host: Host) -> bool:
    """It has left and rejoined: an earlier preemption notice no longer applies. False: there was none."""
    was_quarantined = host.quarantine is not None and host.quarantine.until_return
    had_notice = host.notice.grace_s is not None or was_quarantined
    host.notice.grace_s = None
    if was_quarantined:
        host.quarantine = None
    return had_notice


def rejoin_after_timeout(ctx: SupervisorContext, host: Host, message: RanksEnded) -> None:
    """A host that timed out while stopping its ranks has stopped them after all."""
    host.link = Link.CONNECTED
    host.ranks.snapshots, host.ranks.alive, host.ranks.retained = message.snapshots, {}, {}
    ctx.log("run.message", {"text": f"{host.name} has ended its ranks after all and can be used again"}, host=host.name)
    host_ready(ctx, host, HostReady())


def end_quarantine(ctx: SupervisorContext, name: str) -> None:
    """The time of a quarantine that expires is over; or failures that kept a host from being used have expired."""
    host = ctx.state.hosts[name]
    was_out = host.quarantine
    if was_out is not None and not was_out.for_s:
        return  # meanwhile it was quarantined for good
    host.quarantine, host.readiness.asked_about = None, False
    if was_out is not None:
        ctx.log("host.readmitted", {"reason": "its quarantine has expired", "cause": "expired"}, host=name)
    if host.connected and host.readiness.ready:
        host_ready(ctx, host, HostReady())


def check_returned_agent(ctx: SupervisorContext, host: Host) -> None:
    """An agent reconnected while its host's ranks belong to the running attempt: are they all alive?

    Ranks that have exited are reported one by one, with their codes, in the messages that follow.
    """
    gone = {*ctx.state.progress.exited, *host.ranks.exited}
    expected = set(ctx.state.ranks_on(host.name)) - gone
    if host.ranks.attempt == ctx.state.attempt and expected <= set(host.ranks.alive):
        return
    evidence = f"the agent on {host.name} came back without ranks {sorted(expected - set(host.ranks.alive))}"
    report_incident(ctx, RANK_EXIT, host=host.name, evidence=evidence)


def host_ready(ctx: SupervisorContext, host: Host, message: HostReady | AgentHello) -> None:
    host.readiness = Readiness(ready=True)
    machine = host.machine
    machine.store, machine.memory = message.store or machine.store, message.memory or machine.memory
    phase = ctx.state.phase
    if isinstance(phase, Starting):
        start_if_enough(ctx)
    elif isinstance(phase, Waiting):
        use_new_capacity(ctx, phase.next, host)
    elif isinstance(phase, Running) and host.name not in ctx.state.active and not host.quarantined:  # noqa: SIM102 (the condition acts)
        if not consider_growth(ctx, phase):
            ctx.log("phase.changed", {"reason": SPARE}, host=host.name, phase="spare")


def start_if_enough(ctx: SupervisorContext) -> None:
    """Start once there are enough sound hosts. Reports on the others are judged once no host is awaited."""
    state, settings = ctx.state, ctx.settings
    sound = [name for name in ctx.usable() if state.hosts[name].health.fault is None]
    if len(sound) >= settings.wanted_hosts:
        for host in state.hosts.values():
            if host.health.fault is not None and not host.quarantined:
                set_apart(ctx, host, host.health.fault.evidence, host.health.fault.resettable)
        start_attempt(ctx, sound[: settings.wanted_hosts])
        return
    connected = [host.readiness for host in state.hosts.values() if host.connected]
    known = sum(readiness.ready or readiness.start_failed for readiness in connected)
    all_known = known >= settings.wanted_hosts + settings.spec.resources.spare_hosts
    if all_known and not judge_faulty(ctx) and len(ctx.usable()) >= settings.wanted_hosts:
        start_attempt(ctx, ctx.usable()[: settings.wanted_hosts])


def judge_faulty(ctx: SupervisorContext) -> bool:
    """Before the first attempt: have the policy judge what was reported on hosts. True: it does something about it."""
    phase = ctx.state.phase
    for name in ctx.usable():
        if ctx.state.phase is phase:
            judge_fault(ctx, name)
    return ctx.state.phase is not phase


def set_apart(ctx: SupervisorContext, host: Host, evidence: str, resettable: tuple[int, ...]) -> None:
    """It would fail the moment it is needed."""
    host.health.resettable, host.health.fault, host.quarantine = resettable, None, Quarantine()
    ctx.log("host.quarantined", {"reason": evidence}, host=host.name)


def consider_growth(ctx: SupervisorContext, running: Running) -> bool:
    """Ask the policy, once for each host, whether idle hosts should join a run that has too few. True: it was asked."""
    state = ctx.state
    if running.resize is not None or len(state.active) >= ctx.settings.wanted_hosts:
        return False
    idle = [name for name in ctx.usable() if name not in state.active]
    new = [name for name in idle if not state.hosts[name].readiness.asked_about]
    room = ctx.settings.wanted_hosts - len(state.active)
    layout = ctx.largest_layout(len(state.active) + min(len(idle), room))
    if not new or layout is None or layout.world_size <= state.layout.world_size:
        return False  # half a sharded group is of no use: it waits for its other half
    for name in new:
        state.hosts[name].readiness.asked_about = True
    evidence = f"{new[0]} is ready" if len(new) == 1 else f"{len(new)} hosts are ready: {', '.join(new[:4])}"
    report_incident(ctx, HOST_RETURNED, host=new[0], evidence=evidence)
    for name in new if state.phase is running and running.resize is None else ():
        failures = state.hosts[name].failures_ns
        if failures:  # perhaps refused because of them: once they have expired, the policy is asked again
            oldest_s = (ctx.now_ns - min(failures)) / SECOND_NS
            ctx.alarm(f"back:{name}", max(0.0, ctx.settings.host_failure_window_s - oldest_s) + 1.0)
    return True


def set_aside(ctx: SupervisorContext, name: str, reason: str) -> bool:
    """Mark a host that cannot start; whether the run can continue without it for now: a bad spare, or ranks that take
    steps there, which need nothing that it could not start."""
    host, phase = ctx.state.hosts[name], ctx.state.phase
    again, host.readiness.start_failed = host.readiness.start_failed, True
    if isinstance(phase, Starting):
        candidates = [host for host in ctx.state.hosts.values() if host.connected and not host.readiness.start_failed]
        needed = len(candidates) < ctx.settings.wanted_hosts
    elif isinstance(phase, Running | Draining | Waiting):
        needed = name in ctx.state.counted_on
    else:
        return False
    can_wait = not needed or (isinstance(phase, Running) and ctx.state.progress.stepped)
    if not (again and can_wait):  # its agent tries again now and then
        ctx.log("host.set_aside", {"reason": reason, "needed": needed}, host=name)
    return can_wait


def use_new_capacity(ctx: SupervisorContext, following: NextHosts, host: Host) -> None:
    added = host.name not in following.hosts and not host.quarantined
    if added:
        following.hosts.append(host.name)
    usable = ready_hosts(ctx, following)[: ctx.settings.wanted_hosts]
    if len(usable) >= ctx.needed(following) and has_rendezvous_store(ctx, usable):
        start_attempt(ctx, usable)
    elif added:
        log_waiting(ctx, following)


def on_store(ctx: SupervisorContext, host: Host, message: StoreAddress | StoreLost) -> None:
    """An attempt may wait for another rendezvous store, if the last one ended soon after its start."""
    host.machine.store, phase = message.store if isinstance(message, StoreAddress) else None, ctx.state.phase
    if isinstance(phase, Waiting) and host.name in phase.next.hosts:
        use_new_capacity(ctx, phase.next, host)


def host_down(ctx: SupervisorContext, given: HostDown) -> None:
    host = ctx.state.hosts.get(given.host)
    if host is None:
        return
    if not host.connected:
        host.link = Link.AWAY
        return
    host.link, host.readiness.ready, host.notice.lost_since = Link.AWAY, False, True
    host.ranks.snapshots, host.ranks.retained = (), {}
    ctx.log("host.lost", {"evidence": given.reason, "silent_s": given.silent_s}, host=given.host)
    phase = ctx.state.phase
    if isinstance(phase, Stopping):
        for rank in ctx.state.ranks_on(given.host):
            ctx.state.progress.exited.setdefault(rank, -9)
        check_ranks_exited(ctx)
    elif isinstance(phase, Flushing):
        final_flush.on_host_lost(ctx, phase, given.host)
    elif isinstance(phase, Running | Draining | Waiting) and given.host in ctx.state.counted_on:
        evidence = f"{given.host}: {given.reason}"
        report_incident(ctx, HOST_LOST, host=given.host, evidence=evidence, silent_s=given.silent_s)
    if isinstance(phase, Draining) and ctx.state.phase is phase:
        phase.waiting.pop(given.host, None)
        start_unless_faulty(ctx)


def ranks_ended(ctx: SupervisorContext, host: Host, message: RanksEnded) -> None:
    """A host has ended its ranks and lists the snapshots it holds."""
    if host.link is Link.LATE:
        rejoin_after_timeout(ctx, host, message)
        return
    if message.attempt < ctx.state.attempt:
        return
    host.ranks.snapshots, host.ranks.retained, host.ranks.alive = message.snapshots, message.kept, {}
    if message.reset is not None and not message.reset.ok and isinstance(ctx.state.phase, Draining):
        evidence = f"{host.name}: its GPUs could not be reset: {message.reset.evidence}"
        report_incident(ctx, HOST_UNHEALTHY, host=host.name, evidence=evidence)
    phase = ctx.state.phase
    if isinstance(phase, Flushing):
        final_flush.on_drained(ctx, phase, host.name)
    elif isinstance(phase, Draining) and phase.waiting.pop(host.name, None) is not None:
        start_unless_faulty(ctx)


def start_failed(ctx: SupervisorContext, host: Host, message: StartFailed) -> None:
    """An agent could not prepare: bad data, a missing library, no memory for a fork server. It tries again later.

    Ranks that take steps need none of it: they go on, and it is an incident once an attempt is to be started.
    """
    host.readiness.ready = host.readiness.ready and host.machine.store is not None
    can_wait = set_aside(ctx, host.name, message.reason)
    if not can_wait and isinstance(ctx.state.phase, Starting | Running | Waiting):
        detail: JsonObject = {"exit_code": message.exit_code, "hint": message.hint}
        report_incident(ctx, START_UP, host=host.name, evidence=message.reason, detail=detail)
