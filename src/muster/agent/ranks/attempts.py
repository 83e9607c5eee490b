"""The attempts of a host: their ranks are started, retained, ended, and reported drained once nothing is left."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import replace

from muster.agent.evidence import gathering
from muster.agent.programs import fork_server, replicator_child
from muster.agent.ranks import exits, standbys
from muster.agent.values import actions as do
from muster.agent.values import events as ev
from muster.agent.values.rank import UNENDED, Rank, RankState
from muster.agent.values.state import HostContext
from muster.protocol.rank_agent import (
    FromRank,
    Pause,
    Paused,
    RankBeat,
    RankCaptured,
    RankHello,
    RankProgress,
    TakePlace,
)
from muster.protocol.ranks import RankContext
from muster.protocol.to_agent import EndAttempt, StartAttempt
from muster.protocol.to_supervisor import RanksProgress, StartFailed
from muster.protocol.values import CommandRanks, LastWords, RankEvent

#: Progress outside of steps is forwarded this often at most.
PROGRESS_EVERY_S = 1.0


def begin(ctx: HostContext, order: StartAttempt) -> None:
    """End what does not continue, and have the state found that the attempt's ranks start from."""
    ranks = ctx.state.ranks
    if order.attempt <= ranks.attempt:
        return  # sent twice, or by a supervisor that does not know of a newer one
    kept = {context.kept_rank for context in order.contexts} - {None}
    retained = [rank for rank in ranks.living() if _is_paused(rank) and rank.rank in kept]
    _kill(ctx, order.attempt - 1, spared=retained)
    ranks.attempt, ranks.ending = order.attempt, None
    ranks.exits.clear()
    # Ranks are given to processes in answer to this, before a store is ordered: actions are done depth first.
    ctx.do(do.PrepareState(order, ctx.state.spec))
    fork_server.on_stores_given(ctx, {(context.master_addr, context.master_port) for context in order.contexts})


def place(ctx: HostContext, prepared: ev.StatePrepared) -> None:
    """The attempt's ranks, fresh or retained, with the shards they start from."""
    replicator_child.begin_attempt(ctx, prepared)
    ranks = ctx.state.ranks
    moves: list[tuple[Rank, RankContext]] = []
    for context in prepared.contexts:
        paused = (rank for rank in ranks.living() if _is_paused(rank) and rank.rank == context.kept_rank)
        rank = next(paused, None) if context.kept_rank is not None else None
        if rank is None:
            ranks.queue.append(replace(context, kept_rank=None))
        else:
            moves.append((rank, context))
    for rank, context in moves:  # only now: a rank's new number may be another's old one
        assert rank.peer is not None
        rank.begin(context.rank, context.attempt, ctx.now_s)
        ctx.do(do.SendTo(rank.peer, TakePlace(context=context)))
        ctx.do(do.WatchProcess(rank.pid, standbys.log_path(ctx.state, rank.rank, rank.attempt)))
        ctx.log("rank.started", {"pid": rank.pid, "kept": True}, rank=rank.rank)
    standbys.assign(ctx)


def cannot_start(ctx: HostContext, event: ev.StateNotPrepared) -> None:
    """The supervisor then starts another attempt; otherwise it would wait for this one's first step."""
    _drop_queue(ctx, event.attempt)
    ctx.report(StartFailed(reason=f"{ctx.state.host} cannot start attempt {event.attempt}: {event.reason}"))


def end(ctx: HostContext, order: EndAttempt) -> None:
    """End the ranks up to an attempt, then reset GPUs; those to be kept have some time to pause."""
    state, ranks = ctx.state, ctx.state.ranks
    state.reset.ordered = tuple(order.reset)
    if order.reset and standbys.opens_contexts(state):  # no GPU is reset while any process uses it
        add_unregistered(ctx, ranks.standbys)
        ranks.standbys.clear()
    if order.attempt > ranks.attempt:
        fork_server.on_missed_start(ctx)
    ranks.ending = max(order.attempt, ranks.ending or 0)
    ranks.ended = max(order.attempt, ranks.ended)
    _drop_queue(ctx, order.attempt)
    ranks.pause_by_s = ctx.now_s + order.pause_s
    kept = [rank for rank in ranks.living() if rank.attempt == order.attempt and _may_be_kept(rank, order.keep)]
    _kill(ctx, order.attempt, spared=kept)
    for rank in kept:
        assert rank.peer is not None
        rank.keep()
        ctx.do(do.SendTo(rank.peer, Pause()))
    exits.report_drained(ctx)


def end_all(ctx: HostContext) -> None:
    """The host ends."""
    _kill(ctx, ctx.state.ranks.attempt)
    ctx.do(*(do.Kill(pid) for pid in ctx.state.ranks.standbys))


def command(ctx: HostContext, order: CommandRanks) -> None:
    ctx.do(*(do.SendTo(rank.peer, order) for rank in ctx.state.ranks.living() if rank.peer is not None))


# ---------------------------------------------------------------- registration


def adopt(ctx: HostContext, peer: ev.PeerId, hello: RankHello) -> None:
    """A rank of a previous agent reconnects. It is killed if its attempt was ended in the meantime."""
    ranks = ctx.state.ranks
    mark_registered(ctx, hello.pid)
    if hello.attempt <= ranks.ended or hello.attempt < ranks.attempt:
        ctx.do(do.Kill(hello.pid))
        return
    ranks.attempt = max(ranks.attempt, hello.attempt)
    ctx.do(do.OpenLog(ranks.attempt))
    standbys.register(ctx, hello.pid, hello.rank, hello.attempt, peer, was_warm=False)


def add_unregistered(ctx: HostContext, pids: Iterable[int]) -> None:
    """Living children of the fork server that have not registered with this agent."""
    ranks = ctx.state.ranks
    for pid in sorted(set(pids) - ranks.silent - ranks.ending_unregistered):
        ranks.silent.add(pid)
        ctx.do(do.WatchProcess(pid, None))


def mark_registered(ctx: HostContext, pid: int) -> None:
    """It is a standby or a rank of this agent, or it is gone."""
    ctx.state.ranks.silent.discard(pid)


# ---------------------------------------------------------------- what a rank sends


def on_message(ctx: HostContext, rank: Rank, message: FromRank) -> None:
    rank.watch.heard(ctx.now_s)
    match message:
        case RankBeat():
            _on_beat(ctx, rank, message)
        case RankProgress(attempt=rank.attempt):
            rank.watch.progress_s = ctx.now_s
            if ctx.now_s - ctx.state.ranks.progress_sent_s >= PROGRESS_EVERY_S:
                ctx.state.ranks.progress_sent_s = ctx.now_s
                ctx.report(RanksProgress(attempt=rank.attempt))
        case LastWords():
            rank.words = message
        case RankCaptured():
            gathering.on_captured(ctx, rank.pid, message)
        case Paused() if rank.state is RankState.PAUSING:
            rank.state, rank.paused_step = RankState.PAUSED, message.step
            exits.report_drained(ctx)
        case RankEvent():
            rank.watch.progress_s = ctx.now_s
            if message.kind == "step":
                ctx.state.ranks.newest_step = max(ctx.state.ranks.newest_step, message.step or 0)
            ctx.do(do.LogRankEvent(message, rank.peer))


def on_refused(ctx: HostContext, event: ev.EventRefused) -> None:
    """Another version's: like any message that cannot be read, it ends the connection."""
    if (rank := ctx.state.ranks.of_peer(event.peer)) is not None:
        ctx.note(f"rank {rank.rank} reported what is no event: {event.reason}")
        rank.peer = None


def _on_beat(ctx: HostContext, rank: Rank, beat: RankBeat) -> None:
    """The first rank's steps are the clock, and a sign that standbys may be forked undisturbed."""
    moved, has_snapshot = rank.steps.beat(beat.step, beat.micro)
    if moved:
        rank.watch.progress_s = ctx.now_s
    if not has_snapshot:
        return
    ranks = ctx.state.ranks
    if rank.steps.stepped and rank.rank == min((other.rank for other in ranks.living()), default=None):
        ranks.clock.on_step(ctx.now_s)
        standbys.replenish(ctx)
        ctx.state.replicator.fetches.clear()  # what was fetched for the start is not needed again
        ctx.do(do.StateStepped(rank.attempt))
    replicator_child.copy_next(ctx)


def _kill(ctx: HostContext, attempt: int, *, spared: Collection[Rank] = ()) -> None:
    """SIGKILL for every rank up to ``attempt``, and for every child that has not registered."""
    ranks = ctx.state.ranks
    for rank in ranks.living():
        if rank.attempt <= attempt and rank not in spared:
            exits.kill(ctx, rank)
    ctx.do(*(do.Kill(pid) for pid in sorted(ranks.silent)))
    ranks.ending_unregistered |= ranks.silent
    ranks.silent.clear()


def _may_be_kept(rank: Rank, keep: Collection[int]) -> bool:
    return rank.rank in keep and rank.peer is not None and rank.state in UNENDED and not rank.killed


def _is_paused(rank: Rank) -> bool:
    return rank.state is RankState.PAUSED and rank.peer is not None


def _drop_queue(ctx: HostContext, attempt: int) -> None:
    """Those of attempts up to this one start no more."""
    ranks = ctx.state.ranks
    ranks.queue = [context for context in ranks.queue if context.attempt > attempt]
