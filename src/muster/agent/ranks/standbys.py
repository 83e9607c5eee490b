"""Which process takes which rank: standbys are forked, warmed up, given a rank, replaced."""

from __future__ import annotations

from collections.abc import Iterable

from muster.agent.ranks import rank_environment
from muster.agent.values.actions import Kill, SendTo, WatchProcess
from muster.agent.values.events import PeerId
from muster.agent.values.rank import Rank, Watch
from muster.agent.values.state import HostContext, HostState, Standby
from muster.protocol.fork_server import SpawnStandbys
from muster.protocol.rank_agent import RunRank, StandbyHello, WarmUp
from muster.protocol.to_supervisor import StartFailed

#: So many standbys in a row that end before they register: it will happen again.
DEATHS = 3


def on_hello(ctx: HostContext, peer: PeerId, hello: StandbyHello) -> None:
    """One has connected."""
    state, server = ctx.state, ctx.state.fork_server
    state.ranks.standbys[hello.pid] = Standby(pid=hello.pid, peer=peer, local_rank=hello.local_rank, bound=hello.bound)
    server.spawning.discard(hello.local_rank)
    server.registered.add(hello.pid)
    server.stillborn = 0
    if state.is_joining and not state.is_ready:
        ctx.do(SendTo(peer, WarmUp()))


def on_warm(state: HostState, peer: PeerId) -> None:
    for standby in state.ranks.standbys.values():
        standby.warm = standby.warm or standby.peer == peer


def are_warm(state: HostState) -> bool:
    """A warm one waits for each rank of the host."""
    standbys = state.ranks.standbys.values()
    return len(standbys) >= state.ranks_per_host and all(standby.warm for standby in standbys)


def assign(ctx: HostContext) -> None:
    """Hand the ranks that wait to standbys, once the data is there; fork what is missing."""
    state, ranks = ctx.state, ctx.state.ranks
    if not state.preparation.prepared:
        return
    for context in list(ranks.queue):
        standby = standby_for(context.local_rank, ranks.standbys.values())
        if standby is None:
            continue
        ranks.queue.remove(context)
        del ranks.standbys[standby.pid]
        log = log_path(state, context.rank, context.attempt)
        ctx.do(SendTo(standby.peer, RunRank(context=context, log=log)))
        register(ctx, standby.pid, context.rank, context.attempt, standby.peer, was_warm=True)
    if ranks.queue:
        spawn(ctx, [context.local_rank for context in ranks.queue])


def register(ctx: HostContext, pid: int, number: int, attempt: int, peer: PeerId, *, was_warm: bool) -> None:
    """From now on ``pid`` is a rank."""
    known = ctx.state.ranks.table.get(pid)
    if known is not None:  # it has connected again
        known.peer = peer
        return
    ctx.state.ranks.table[pid] = Rank(
        pid=pid, rank=number, attempt=attempt, peer=peer, watch=Watch(progress_s=ctx.now_s, seen_s=ctx.now_s)
    )
    ctx.log("rank.started", {"pid": pid, "standby": was_warm}, rank=number)
    ctx.do(WatchProcess(pid, log_path(ctx.state, number, attempt)))


def log_path(state: HostState, rank: int, attempt: int) -> str:
    return str(state.identity.run_dir / "logs" / f"rank-{rank}.a{attempt}.log")


def standby_for(local_rank: int, standbys: Iterable[Standby]) -> Standby | None:
    """The one that was forked for this local rank, else one that fits any; None where there is neither.

    One that holds a context on another GPU would keep that memory for as long as it lives.
    """
    usable = [standby for standby in standbys if standby.local_rank == local_rank or not standby.bound]
    return min(usable, key=lambda standby: standby.local_rank != local_rank, default=None)


def opens_contexts(state: HostState) -> bool:
    """Standbys open a CUDA context while they wait."""
    return rank_environment.opens_contexts(state.spec) and not state.fork_server.contexts_fail


def spawn(ctx: HostContext, local_ranks: Iterable[int]) -> None:
    """Have a standby forked for each of these local ranks, unless one was ordered already."""
    server = ctx.state.fork_server
    missing = [local_rank for local_rank in local_ranks if local_rank not in server.spawning]
    if missing and server.peer is not None:
        server.spawning.update(missing)
        order = SpawnStandbys(local_ranks=tuple(missing), contexts=opens_contexts(ctx.state))
        ctx.do(SendTo(server.peer, order))


def replenish(ctx: HostContext) -> None:
    """Keep one standby for each rank of the host; only what is needed where the run file wants none."""
    state = ctx.state
    if state.spec.recovery.warm_standby or not state.ranks.table:
        present = {standby.local_rank for standby in state.ranks.standbys.values()}
        spawn(ctx, [local_rank for local_rank in range(state.ranks_per_host) if local_rank not in present])


def check_contexts(ctx: HostContext) -> None:
    """Have those with a context see whether it still works: what ended a rank may have been its GPU's error."""
    for standby in ctx.state.ranks.standbys.values():
        if standby.bound:
            ctx.do(SendTo(standby.peer, WarmUp()))


def on_lost(ctx: HostContext, peer: PeerId, *, unusable: bool = False) -> None:
    """One closed its connection, or could not open a context on its GPU: its CUDA state is unknown."""
    standbys = ctx.state.ranks.standbys
    lost = next((standby for standby in standbys.values() if standby.peer == peer), None)
    if lost is None:
        return
    del standbys[lost.pid]
    if unusable:
        ctx.state.fork_server.contexts_fail = True
        ctx.do(Kill(lost.pid))
        replenish(ctx)


def on_child_exited(ctx: HostContext, pid: int, code: int) -> None:
    """One that had not registered: all that are on their way are ordered again."""
    state, server = ctx.state, ctx.state.fork_server
    state.ranks.standbys.pop(pid, None)
    if pid in server.registered:
        server.registered.discard(pid)
        return
    ordered = sorted(server.spawning)
    server.spawning.clear()
    server.stillborn += 1
    if server.stillborn < DEATHS:
        spawn(ctx, ordered)
    else:
        reason = f"standbys on {state.host} end before they reach their agent, the last one with code {code}"
        ctx.keep_failure("fork server", StartFailed(reason=reason))
