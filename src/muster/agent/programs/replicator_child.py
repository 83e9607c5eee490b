"""The replicator: given orders, sent again those that it has not answered, restarted when it dies.

Where copies go, and the port, are also in the host's memory folder: a restarted agent starts a replicator too, while
the ranks train on, and the supervisor does not repeat it.
"""

from __future__ import annotations

from dataclasses import replace

from muster.agent.values import actions as do
from muster.agent.values import events as ev
from muster.agent.values.state import NEVER, FlushAnswer, HostContext, HostState
from muster.core.heartbeat_timing import CONFIRM_SHARE, LOOK_SHARE
from muster.core.typed_json import Unreadable
from muster.protocol.codec import reader_of
from muster.protocol.replicator_orders import (
    FROM_REPLICATOR,
    CopyNext,
    CopyTo,
    FlushOrder,
    ListenAddress,
    LogNote,
    ReplicatorRecord,
    ToReplicator,
)
from muster.protocol.to_agent import CommitFlushed, FlushSnapshots
from muster.protocol.to_supervisor import FlushCommitted, ReplicatorAddress, SnapshotsFlushed, SnapshotsRejected
from muster.protocol.values import Address

NAME = "replicator"
#: The agent's first message to the supervisor names the replicator's address: it waits this long for it, once.
FIRST_WAIT_S = 20.0
#: A replicator that died this early this often will die again: the host continues without (no copies, ranks write
#: checkpoints themselves).
YOUNG_S, YOUNG_DEATHS = 10.0, 5
#: One that could not be started (no memory, no processes left) is tried again after this time.
AGAIN_S = 1.0
_read = reader_of(FROM_REPLICATOR)


def begin(ctx: HostContext) -> None:
    ctx.state.replicator.first_by_s = ctx.now_s + FIRST_WAIT_S
    _start(ctx)


def _start(ctx: HostContext) -> None:
    identity, replicator = ctx.state.identity, ctx.state.replicator
    replicator.again_s, replicator.listening, replicator.is_replaced, replicator.stopped_s = NEVER, False, False, None
    argv = (
        "muster.agent.replicator.main", "--run-dir", str(identity.run_dir), "--memory", str(identity.memory.folder),
        "--bind", identity.bind, "--port", str(replicator.port),
    )  # fmt: skip
    ctx.do(do.StartProgram(do.Program(NAME, argv, reads="lines", writes=True)))


def on_started(ctx: HostContext, pid: int) -> None:
    ctx.state.replicator.pid, ctx.state.replicator.started_s = pid, ctx.now_s


def restart(ctx: HostContext) -> None:
    """Its socket file is gone, or the whole memory folder: a successor listens there again."""
    replicator = ctx.state.replicator
    if replicator.pid is not None and replicator.listening:
        replicator.is_replaced, replicator.listening = True, False
        ctx.do(do.StopProgram(NAME))


def on_ended(ctx: HostContext, event: ev.ProgramEnded) -> None:
    """Start the next one; training continued meanwhile."""
    state, replicator = ctx.state, ctx.state.replicator
    if event.failure is not None:
        replicator.again_s = ctx.now_s + AGAIN_S
        return
    replicator.pid = None
    if state.leaving.reason is not None:
        return
    if replicator.is_replaced:
        _start(ctx)
        return
    is_young = ctx.now_s - replicator.started_s < YOUNG_S
    replicator.young_deaths = replicator.young_deaths + 1 if is_young else 1
    restarts = replicator.young_deaths < YOUNG_DEATHS
    text = f"the replicator on {state.host} died with code {event.code}"
    text += " and was restarted" if restarts else f" {YOUNG_DEATHS} times: no more copies to other hosts"
    ctx.note(text)
    if restarts:
        _start(ctx)
    else:
        _fail_flushes(ctx, text)


# ---------------------------------------------------------------- orders


def begin_attempt(ctx: HostContext, prepared: ev.StatePrepared) -> None:
    """The attempt's ranks' snapshots are copied to its peer; earlier fetches are forgotten."""
    replicator = ctx.state.replicator
    if prepared.copies is not None:
        replicator.fetches = []
        _set_copies(ctx, prepared.copies)
    replicator.fetches += prepared.fetches
    for fetch in prepared.fetches:
        _send(ctx, fetch)


def on_peer_moved(ctx: HostContext, peer: Address) -> None:
    """The peer's replicator was restarted at another address."""
    copies = ctx.state.replicator.copies
    if copies is not None and copies.peer != peer:
        _set_copies(ctx, replace(copies, peer=peer))


def copy_next(ctx: HostContext) -> None:
    """A snapshot is ready. Omitted where the replicator does not keep up: the next one comes soon."""
    copies = ctx.state.replicator.copies
    if copies is not None and copies.peer is not None:
        _send(ctx, CopyNext(), droppable=True)


def flush(ctx: HostContext, order: FlushSnapshots | CommitFlushed, *, fence: int, alone: bool = False) -> None:
    """Have a version written, or committed: one answer follows to each, always."""
    replicator = ctx.state.replicator
    replicator.flushes.append(FlushOrder(flush=order, run_id=ctx.state.identity.run_id, fence=fence, alone=alone))
    if replicator.pid is None and replicator.again_s == NEVER:
        _fail_flushes(ctx, "no replicator runs on this host")
    else:
        _send(ctx, replicator.flushes[-1])


def _set_copies(ctx: HostContext, order: CopyTo) -> None:
    ctx.state.replicator.copies = order
    _save_record(ctx)
    _send(ctx, order)


def _send(ctx: HostContext, order: ToReplicator, *, droppable: bool = False) -> None:
    if ctx.state.replicator.pid is not None:
        ctx.do(do.WriteProgram(NAME, order, droppable))


def _save_record(ctx: HostContext) -> None:
    replicator = ctx.state.replicator
    ctx.do(do.WriteReplicatorRecord(ReplicatorRecord(port=replicator.port, peers=replicator.copies)))


# ---------------------------------------------------------------- answers


def on_line(ctx: HostContext, line: bytes) -> None:
    try:
        message = _read(line)
    except Unreadable as error:
        ctx.note(f"the replicator on {ctx.state.host} said what cannot be read: {error}")
        return
    match message:
        case ListenAddress():
            _on_address(ctx, message.address)
        case LogNote():
            ctx.note(message.text)
        case SnapshotsRejected():
            copies = tuple(replace(copy, host=ctx.state.host) for copy in message.copies)
            ctx.do(do.DropCopies(copies))
            ctx.report(replace(message, copies=copies))
        case _:
            _on_answer(ctx, message)


def _on_address(ctx: HostContext, address: Address) -> None:
    """A successor gets its orders only now, and of the fetches those whose target is missing."""
    replicator = ctx.state.replicator
    is_restart = replicator.port != 0
    replicator.address, replicator.port, replicator.listening = address, address[1], True
    _save_record(ctx)
    if not is_restart:
        return
    if replicator.copies is not None:
        _send(ctx, replicator.copies)
    ctx.do(*(do.WriteProgram(NAME, fetch, unless=fetch.target) for fetch in replicator.fetches))
    for order in replicator.flushes:
        _send(ctx, order)
    if ctx.state.takes_snapshots:
        ctx.report(ReplicatorAddress(memory=address))


def _on_answer(ctx: HostContext, answer: FlushAnswer) -> None:
    flushes = ctx.state.replicator.flushes
    order = next((order for order in flushes if is_answer(answer, order.flush)), None)
    if order is not None:
        flushes.remove(order)
        ctx.flushed.append((answer, order))


def _fail_flushes(ctx: HostContext, reason: str) -> None:
    for order in list(ctx.state.replicator.flushes):
        kind = SnapshotsFlushed if isinstance(order.flush, FlushSnapshots) else FlushCommitted
        _on_answer(ctx, kind(step=order.flush.step, attempt=order.flush.attempt, failure=reason))


def is_answer(answer: FlushAnswer, flush: FlushSnapshots | CommitFlushed) -> bool:
    of_same_kind = isinstance(answer, SnapshotsFlushed) == isinstance(flush, FlushSnapshots)
    return of_same_kind and (answer.step, answer.attempt) == (flush.step, flush.attempt)


# ---------------------------------------------------------------- looks


def due_s(state: HostState) -> float:
    """When it is to be looked at, at the latest."""
    replicator = state.replicator
    if replicator.pid is None:
        return replicator.again_s
    share = LOOK_SHARE if replicator.stopped_s is None else CONFIRM_SHARE
    return replicator.looked_s + share * state.spec.recovery.timing.replicator_stopped_after_s


def tick(ctx: HostContext) -> None:
    replicator = ctx.state.replicator
    if ctx.now_s >= replicator.again_s:
        _start(ctx)
    limit_s = ctx.state.spec.recovery.timing.replicator_stopped_after_s
    if replicator.pid is not None and ctx.now_s - replicator.looked_s >= CONFIRM_SHARE * limit_s:
        replicator.looked_s = ctx.now_s
        ctx.do(do.Look(replicator.pid))


def on_looked(ctx: HostContext, *, is_stopped: bool) -> None:
    """Kill one that stays stopped: its successor continues."""
    replicator = ctx.state.replicator
    if not is_stopped:
        replicator.stopped_s = None
    elif replicator.stopped_s is None:
        replicator.stopped_s = ctx.now_s
    else:
        ctx.do(do.StopProgram(NAME))
