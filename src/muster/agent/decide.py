"""What an agent does about each event: one deterministic function without clock and I/O.

``state`` is changed in place and left consistent; what the edge is to do is returned in its order.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Mapping
from typing import Any

from muster.agent import link, unsupervised
from muster.agent.evidence import gathering
from muster.agent.hardware import host_check, kernel_lines, usage
from muster.agent.programs import fork_server, preparation, replicator_child, trackers
from muster.agent.ranks import attempts, exits, hangs, standbys
from muster.agent.values import actions as do
from muster.agent.values import events as ev
from muster.agent.values.state import NEVER, FlushAnswer, HostContext, HostState
from muster.core.typed_json import JsonObject
from muster.protocol import to_agent
from muster.protocol.fork_server import ChildExited, ChildStopped, ForkServerHello
from muster.protocol.hello import Refused
from muster.protocol.rank_agent import RankHello, StandbyHello, StandbyUnfit, StandbyWarm
from muster.protocol.replicator_orders import FlushOrder
from muster.protocol.to_supervisor import FlushCommitted, HostReady, Pong, SnapshotsFlushed
from muster.protocol.values import CommandRanks, StoreAddress
from muster.storage import uris

#: A host that joins a run under way is ready when its standbys are warm, or after this long.
WARM_S = 10.0
#: How often the host's folder in memory is looked at, at most.
MEMORY_EVERY_S = 1.0


def decide(state: HostState, event: ev.Event, *, now_s: float, wall_ns: int) -> list[do.Action]:
    """``now_s``: monotonic."""
    ctx = HostContext(state, now_s, wall_ns)
    HANDLERS[type(event)](ctx, event)
    while ctx.flushed:
        _on_flush(ctx, *ctx.flushed.pop(0))
    return ctx.actions


def due_s(state: HostState) -> float:
    """When the loop has to wake up, if nothing happens until then."""
    warm_s = NEVER
    if state.warm_by_s is not None and _has_all(state) and state.hardware.check.ready_by_s <= state.warm_by_s:
        warm_s = state.warm_by_s
    return min(
        state.memory.next_s + MEMORY_EVERY_S / 2,
        warm_s,
        link.due_s(state),
        unsupervised.due_s(state),
        preparation.due_s(state),
        replicator_child.due_s(state),
        fork_server.due_s(state),
        hangs.due_s(state),
        gathering.due_s(state),
        host_check.due_s(state),
        state.trackers.retry_s,
    )


def _begin(ctx: HostContext, _event: ev.Started) -> None:
    ctx.state.link.contact_after_s = ctx.state.leaving.alone_s = ctx.now_s
    ctx.do(do.ListHardware())
    preparation.begin(ctx)
    replicator_child.begin(ctx)


def _tick(ctx: HostContext, _event: ev.Tick) -> None:
    """What is due, or may be served early because the agent is awake anyway."""
    if ctx.now_s >= ctx.state.memory.next_s:
        ctx.state.memory.next_s = ctx.now_s + MEMORY_EVERY_S
        ctx.do(do.CheckMemory())
    link.tick(ctx)
    unsupervised.tick(ctx)
    preparation.tick(ctx)
    trackers.tick(ctx)
    hangs.tick(ctx)
    gathering.tick(ctx)
    replicator_child.tick(ctx)
    if host_check.tick(ctx):
        _on_checked(ctx)
    fork_server.tick(ctx)
    usage.tick(ctx)
    if ctx.state.warm_by_s is not None and ctx.now_s >= ctx.state.warm_by_s:
        _check_ready(ctx)


# ---------------------------------------------------------------- supervisor


def _on_supervisor(ctx: HostContext, event: ev.SupervisorMessage) -> None:
    state, message = ctx.state, event.message
    if isinstance(message, to_agent.Welcome | to_agent.StartAttempt | to_agent.EndAttempt):
        state.newest_attempt = max(state.newest_attempt, message.attempt)
    match message:
        case to_agent.StartAttempt():
            ctx.do(do.CheckMemory())  # first: its state may be fetched into that folder
            preparation.on_start(ctx)
            attempts.begin(ctx, message)
        case to_agent.EndAttempt():
            usage.release(ctx)
            attempts.end(ctx, message)
        case CommandRanks():
            attempts.command(ctx, message)
        case to_agent.PeerMoved():
            replicator_child.on_peer_moved(ctx, message.peer)
        case to_agent.FlushSnapshots() | to_agent.CommitFlushed():
            replicator_child.flush(ctx, message, fence=state.newest_attempt)
        case to_agent.Ping():
            ctx.report(Pong(number=message.number, mono_ns=ctx.mono_ns))
        case to_agent.Reload():
            state.preparation.prepared = False  # before the new file is there
            ctx.do(do.FetchRunFile())
        case to_agent.DropCopies():
            ctx.do(do.DropCopies(message.copies))
        case to_agent.GatherEvidence():
            gathering.begin(ctx, message)
        case to_agent.TraceRanks():
            gathering.trace(ctx, message)
        case to_agent.LookAtHost():
            host_check.ask(ctx, message)
        case to_agent.Shutdown():
            ctx.exit(message.reason)
        case Refused():
            ctx.do(do.ListSnapshots(message.reason))


def _on_run_file(ctx: HostContext, event: ev.RunFileRead) -> None:
    """It changed. Fork server and standbys stay: a model that one built is used for the same config."""
    ctx.state.spec = event.spec
    kernel_lines.on_spec(ctx.state)
    ctx.state.link.kept.clear()  # earlier failures say nothing
    preparation.prepare(ctx)


def _on_noted(ctx: HostContext, event: ev.Noted) -> None:
    ctx.note(event.text)


def _on_snapshots(ctx: HostContext, event: ev.SnapshotsListed) -> None:
    if event.refusal:
        link.on_refused(ctx, event.refusal, has_snapshots=bool(event.held))
    else:
        unsupervised.save(ctx, event.held)


def _on_watchdog_gone(ctx: HostContext, _event: ev.WatchdogGone) -> None:
    ctx.exit("the watchdog is gone")


def _on_flush(ctx: HostContext, answer: FlushAnswer, order: FlushOrder) -> None:
    """Forward the replicator's answer to where the order came from; an event once a checkpoint is committed."""
    if isinstance(answer, FlushCommitted) and answer.failure is None:
        tier = "disk" if uris.is_local(order.flush.uri) else "bucket"
        detail: JsonObject = {"tier": tier, "uri": answer.uri, "bytes": answer.bytes}
        ctx.tell("checkpoint.committed", detail, attempt=ctx.state.fence, step=answer.step)
    elif isinstance(answer, SnapshotsFlushed):
        ctx.do(do.DropCopies(answer.rejected))
    if order.alone:
        unsupervised.on_flush(ctx, answer)
    else:
        ctx.report(answer)


# ---------------------------------------------------------------- this host's processes


def _on_rank_message(ctx: HostContext, event: ev.RankMessage) -> None:
    match event.message:
        case StandbyWarm():
            standbys.on_warm(ctx.state, event.peer)
            _check_ready(ctx)
        case StandbyUnfit():
            standbys.on_lost(ctx, event.peer, unusable=True)
        case message:
            if (rank := ctx.state.ranks.of_peer(event.peer)) is not None:
                attempts.on_message(ctx, rank, message)


def _on_fork_server(ctx: HostContext, event: ev.ForkServerMessage) -> None:
    match event.message:
        case ChildExited(pid=pid, code=code):
            standbys.on_child_exited(ctx, pid, code)
            attempts.mark_registered(ctx, pid)
            exits.on_exit_code(ctx, pid, code, event.tail)
        case ChildStopped(pid=pid):
            hangs.on_stopped(ctx, pid)
        case StoreAddress() as address:
            ctx.state.fork_server.store = address.store
            ctx.report(address)


def _on_fork_server_found(ctx: HostContext, event: ev.ForkServerFound) -> None:
    fork_server.on_found(ctx, event)
    if event.follows:
        ctx.state.link.contact_after_s = ctx.now_s + link.ADOPTION_S
    if event.pid is None:
        host_check.begin(ctx)


def _on_looked(ctx: HostContext, event: ev.Looked) -> None:
    if event.pid == ctx.state.replicator.pid:
        replicator_child.on_looked(ctx, is_stopped=event.is_stopped)
    else:
        hangs.on_looked(ctx, event)


def _on_hello(ctx: HostContext, event: ev.Greeted) -> None:
    state, peer = ctx.state, event.peer
    match event.hello:
        case ForkServerHello() as hello:
            fork_server.on_hello(ctx, peer, hello)
            known = state.ranks.standbys.keys() | state.ranks.table.keys()
            attempts.add_unregistered(ctx, set(hello.children) - known)
            _on_checked(ctx)  # a dead one's standbys may still be usable
        case RankHello() as hello:  # its former agent died
            attempts.adopt(ctx, peer, hello)
            link.greet(ctx)
        case StandbyHello() as hello:
            standbys.on_hello(ctx, peer, hello)
            attempts.mark_registered(ctx, hello.pid)
            _check_ready(ctx)


def _on_lost(ctx: HostContext, event: ev.PeerLost) -> None:
    state, peer = ctx.state, event.peer
    if peer == state.link.peer:
        link.on_lost(state)
        unsupervised.begin(ctx)
    elif peer == state.fork_server.peer:
        state.is_ready, state.warm_by_s = False, None
        fork_server.on_lost(ctx)
        exits.on_fork_server_lost(ctx)
    elif (rank := state.ranks.of_peer(peer)) is not None:  # else it may have connected again before that was seen
        rank.peer = None
    else:
        standbys.on_lost(ctx, peer)


def _on_program_started(ctx: HostContext, event: ev.ProgramStarted) -> None:
    match event.program:
        case fork_server.NAME:
            fork_server.on_started(ctx, event.pid)
        case replicator_child.NAME:
            replicator_child.on_started(ctx, event.pid)
        case program if program.startswith(gathering.SPY):
            gathering.on_spy_started(ctx.state, program)


def _on_line(ctx: HostContext, event: ev.ProgramLine) -> None:
    line = event.line
    match event.program:
        case replicator_child.NAME:
            replicator_child.on_line(ctx, line)
        case preparation.PREPARE:
            preparation.on_prepare_line(ctx, line)
        case preparation.NOTICES:
            if (source := preparation.on_notice_line(ctx, line)) is not None:
                unsupervised.on_notice(ctx, ev.Noticed(source))
        case trackers.NAME:
            trackers.on_line(ctx, line)
        case kernel_lines.DMESG:
            kernel_lines.on_line(ctx, line.decode(errors="replace"))
        case kernel_lines.NODE:
            kernel_lines.on_node_line(ctx, line)
        case usage.TOOL:
            usage.on_tool_line(ctx.state.hardware.usage, line.decode(errors="replace"))


def _on_ended(ctx: HostContext, event: ev.ProgramEnded) -> None:
    match event.program:
        case fork_server.NAME:
            fork_server.on_ended(ctx, event)
        case replicator_child.NAME:
            replicator_child.on_ended(ctx, event)
        case preparation.SETUP:
            if preparation.on_setup_ended(ctx, event):
                _on_set_up(ctx)
        case preparation.PREPARE:
            preparation.on_prepare_ended(ctx, event)
            _check_ready(ctx)
        case preparation.RESET:
            preparation.on_reset_ended(ctx, event)
            exits.report_drained(ctx)
        case trackers.NAME:
            trackers.on_ended(ctx, event)
        case kernel_lines.DMESG:
            kernel_lines.on_dmesg_lost(ctx, event)
        case kernel_lines.NODE:
            kernel_lines.on_node_ended(ctx, event)
        case usage.TOOL:
            usage.on_tool_ended(ctx.state.hardware.usage)
        case host_check.NAME:
            if host_check.on_ended(ctx, event):
                _on_checked(ctx)
        case program if program.startswith(gathering.SPY):
            gathering.on_spy_ended(ctx.state, event)


def _on_setup_found(ctx: HostContext, event: ev.SetupFound) -> None:
    if event.is_done or not event.digest:
        _on_set_up(ctx)
    else:
        preparation.start_setup(ctx, event)


def _on_set_up(ctx: HostContext) -> None:
    """What ranks import is there: the fork server starts, the first time; then the data."""
    fork_server.find(ctx)
    preparation.start_prepare(ctx)
    _check_ready(ctx)


def _on_memory(ctx: HostContext, checked: ev.MemoryChecked) -> None:
    """The host's folder in memory was looked at: what was in it is lost where it was made again. The processes go on,
    with the next tier until there are snapshots again; ranks make their rings in it by themselves."""
    state, memory = ctx.state, ctx.state.memory
    if checked.trouble:
        if checked.trouble != memory.trouble:
            ctx.note(f"the memory of {state.host} is lost and cannot be recreated: {checked.trouble}")
        memory.trouble = checked.trouble
        return
    memory.trouble = ""
    if checked.rebound and not checked.renewed:
        ctx.note(f"{checked.socket} was deleted, and is bound again")
    if checked.renewed:
        replicator_child.restart(ctx)
        fork_server.on_memory(ctx, checked)
        ctx.tell("memory.lost", {"reason": checked.renewed}, attempt=state.fence)
    elif not checked.has_replicator_socket:
        replicator_child.restart(ctx)


# ---------------------------------------------------------------- readiness


def _check_ready(ctx: HostContext) -> None:
    """Something that a start needs may have come: start what waited for it, report once when all is there.

    Ranks that take steps need not wait for the warm-up of a host that joins their run.
    """
    state = ctx.state
    standbys.assign(ctx)
    if state.is_ready or not _has_all(state) or not host_check.is_over(ctx):
        return
    if state.is_joining:
        state.warm_by_s = ctx.now_s + WARM_S if state.warm_by_s is None else state.warm_by_s
        if ctx.now_s < state.warm_by_s and not standbys.are_warm(state):
            return
    state.is_ready, state.warm_by_s = True, None
    ctx.report(HostReady(store=state.fork_server.store, memory=state.memory_address))


def _has_all(state: HostState) -> bool:
    return state.preparation.prepared and state.fork_server.peer is not None and bool(state.ranks.standbys)


def _on_checked(ctx: HostContext) -> None:
    """Standbys may open contexts, unless the GPUs are being loaded."""
    if not host_check.loads_gpus(ctx.state):
        standbys.replenish(ctx)
    _check_ready(ctx)


def end_host(state: HostState, *, now_s: float, wall_ns: int) -> list[do.Action]:
    """End everything that this agent started. Trackers last: they may take some seconds, for which GPUs and memory need
    not be held."""
    ctx = HostContext(state, now_s, wall_ns)
    usage.release(ctx)
    attempts.end_all(ctx)
    ctx.do(do.StopProgram(replicator_child.NAME, leave=True))
    kernel_lines.end(ctx)
    ctx.do(do.StopProgram(host_check.NAME, leave=True), do.StopProgram(fork_server.NAME))
    trackers.end(ctx, state.leaving.reason or "")
    ctx.do(do.StopProgram(preparation.SETUP, number=signal.SIGTERM, leave=True))
    ctx.do(do.StopProgram(preparation.PREPARE, leave=True), do.StopProgram(preparation.NOTICES, leave=True))
    ctx.log("agent.ended", {"reason": state.leaving.reason or ""})
    return ctx.actions


#: Each is given an event of its kind.
HANDLERS: Mapping[type[ev.Event], Callable[[HostContext, Any], None]] = {
    ev.Started: _begin,
    ev.Tick: _tick,
    ev.Greeted: _on_hello,
    ev.PeerLost: _on_lost,
    ev.RankMessage: _on_rank_message,
    ev.ForkServerMessage: _on_fork_server,
    ev.SupervisorMessage: _on_supervisor,
    ev.RankExiting: exits.on_exiting,
    ev.RankThreadsEnded: exits.on_threads_ended,
    ev.ProcessGone: exits.on_gone,
    ev.Killed: exits.on_killed,
    ev.RankWatched: hangs.on_watched,
    ev.Looked: _on_looked,
    ev.StatePrepared: attempts.place,
    ev.StateNotPrepared: attempts.cannot_start,
    ev.EventLogged: link.on_event,
    ev.EventRefused: attempts.on_refused,
    ev.ForkServerFound: _on_fork_server_found,
    ev.SupervisorConnected: link.on_connected,
    ev.SupervisorUnreachable: link.on_unreachable,
    ev.LeaseRead: link.on_lease,
    ev.SnapshotsListed: _on_snapshots,
    ev.RunFileRead: _on_run_file,
    ev.Noted: _on_noted,
    ev.Noticed: unsupervised.on_notice,
    ev.WatchdogGone: _on_watchdog_gone,
    ev.ProgramStarted: _on_program_started,
    ev.ProgramLine: _on_line,
    ev.ProgramEnded: _on_ended,
    ev.SetupFound: _on_setup_found,
    ev.MemoryChecked: _on_memory,
    ev.HardwareListed: kernel_lines.begin,
    ev.KernelLine: kernel_lines.on_kernel_line,
    ev.KernelLogLost: kernel_lines.on_lost,
    ev.CountersRead: usage.on_counters,
    ev.OomKills: gathering.on_oom_kills,
    ev.RasAnswered: gathering.on_ras,
}
