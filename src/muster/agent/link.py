"""The supervisor that holds the lease: found, greeted, left when another one holds it."""

from __future__ import annotations

from muster.agent import unsupervised
from muster.agent.ranks import hangs
from muster.agent.values.actions import Connect, Disconnect, ListSnapshots, ReadLease, ReportSnapshots
from muster.agent.values.events import EventLogged, LeaseRead, SupervisorConnected, SupervisorUnreachable
from muster.agent.values.state import NEVER, HostContext, HostState
from muster.protocol.hello import AgentHello
from muster.protocol.version import MINE, OtherVersion

#: A restarted agent listens for this long to its predecessor's ranks before it answers a supervisor (they try to
#: reconnect every 0.1 s), and while some that live are missing, which a busy host delays, for so much longer at most.
ADOPTION_S, MISSING_S = 0.5, 3.0
SEARCH_S = 0.1  # how often a supervisor is looked for while none is connected
#: How often the lease is read while a supervisor is connected.
LEASE_CHECK_S = 1.0


def due_s(state: HostState) -> float:
    """When the lease is read, at the latest: an agent that is awake earlier does so then."""
    link = state.link
    if state.is_supervised:
        return link.lease_check_s + LEASE_CHECK_S / 2
    return NEVER if link.connecting else max(link.search_s, _contact_s(state))


def tick(ctx: HostContext) -> None:
    link, state = ctx.state.link, ctx.state
    if state.is_supervised:
        if ctx.now_s >= link.lease_check_s:
            link.lease_check_s = ctx.now_s + LEASE_CHECK_S
            ctx.do(ReadLease())
    elif not link.connecting and ctx.now_s >= max(link.search_s, _contact_s(state)):
        link.search_s = ctx.now_s + SEARCH_S
        ctx.do(ReadLease())


def _contact_s(state: HostState) -> float:
    """No supervisor is greeted before a predecessor's ranks are back, and the replicator's address is known."""
    is_missing = bool(state.ranks.silent) or state.fork_server.awaited
    contact_s = state.link.contact_after_s + (MISSING_S if is_missing else 0.0)
    replicator = state.replicator
    return contact_s if replicator.address is not None else max(contact_s, replicator.first_by_s)


def on_lease(ctx: HostContext, lease: LeaseRead) -> None:
    """A holder that is silent (its node lost power) keeps a connection open: the lease decides which one counts."""
    link = ctx.state.link
    link.is_released = lease.is_released
    if lease.refusal:
        ctx.do(ListSnapshots(lease.refusal))
    elif ctx.state.is_supervised:
        if lease.is_changed and lease.address is not None and lease.address != link.address:
            ctx.do(Disconnect())
    elif lease.address is not None:
        link.address, link.connecting = lease.address, True
        ctx.do(Connect(lease.address))
    if not ctx.state.is_supervised and not link.connecting:
        unsupervised.watch(ctx)


def on_unreachable(ctx: HostContext, _event: SupervisorUnreachable) -> None:
    ctx.state.link.connecting = False
    unsupervised.watch(ctx)


def on_connected(ctx: HostContext, event: SupervisorConnected) -> None:
    """Greet it, and repeat what it may not have heard of."""
    state, link = ctx.state, ctx.state.link
    link.peer, link.connecting = event.peer, False
    greet(ctx)
    for failure in link.kept.values():
        ctx.report(failure)
    if link.committed is not None:
        ctx.report(link.committed)
        link.committed = None
    if state.hardware.faults.standing is not None:
        ctx.report(state.hardware.faults.standing)
    hangs.on_reconnect(state)
    for report in state.ranks.exits.values():
        ctx.report(report)


def greet(ctx: HostContext) -> None:
    """Tell everything that a supervisor needs to know about this host, again where it has changed."""
    state = ctx.state
    if not state.is_supervised:
        return
    ctx.do(
        ReportSnapshots(
            AgentHello(
                version=MINE,
                host=state.host,
                pid=state.identity.pid,
                attempt=state.ranks.attempt,
                alive={rank.rank: rank.pid for rank in state.ranks.living()},
                step=state.ranks.newest_step,
                exited=tuple(sorted(state.ranks.exits)),
                ready=state.is_ready,
                store=state.fork_server.store,
                memory=state.memory_address,
                place=state.identity.place,
            )
        )
    )


def on_event(ctx: HostContext, logged: EventLogged) -> None:
    if ctx.state.is_supervised:
        ctx.report(logged.event)
    elif logged.event.kind == "checkpoint.committed":
        ctx.state.link.committed = logged.event


def on_refused(ctx: HostContext, reason: str, *, has_snapshots: bool) -> None:
    """The supervisor is of another version: this host has none. Without ranks and snapshots it exits at once."""
    link = ctx.state.link
    if ctx.state.ranks.table or has_snapshots:
        if reason != link.refusal:
            ctx.note(reason)
    else:
        ctx.exit(reason, code=OtherVersion.exit_code, error=reason)
    link.refusal = reason


def on_lost(state: HostState) -> None:
    state.link.peer, state.link.search_s, state.fork_server.may_miss_start = None, 0.0, True
