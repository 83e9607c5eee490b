"""Which ranks hang: judged by progress and by process state, never by a heartbeat alone.

A rank sends something with every step, and nothing wakes it or its agent in between. One that a signal stops is
reported by its parent, the fork server, which the kernel wakes for it; the agent then looks at the process until it is
sure. What no parent reports (a debugger's stop, any stop while the fork server is away, or itself stopped) it sees by
looks at the processes of ranks that are silent, at deadlines (``due_s``).
"""

from __future__ import annotations

from muster.agent.ranks import exits
from muster.agent.values.actions import Look
from muster.agent.values.events import Looked, RankWatched
from muster.agent.values.rank import Rank, RankState
from muster.agent.values.state import NEVER, HostContext, HostState
from muster.core.heartbeat_timing import CONFIRM_SHARE, EARLY_SHARE, LOOK_SHARE
from muster.protocol.to_supervisor import RankHang


def due_s(state: HostState) -> float:
    """When ``tick`` has something to do, if no rank sends anything until then."""
    times_s = []
    for rank in state.ranks.living():
        if rank.state is RankState.PAUSING:
            times_s += [state.ranks.pause_by_s, _look_s(state, rank)]
        elif _is_judged(state, rank):
            times_s += [_look_s(state, rank), _progress_by_s(state, rank)]
    return min(times_s, default=NEVER)


def tick(ctx: HostContext) -> None:
    """Report ranks that hang; kill those that should have paused and have not. An agent that is awake anyway looks
    early, so that the looks at all of its processes fall together."""
    state = ctx.state
    for rank in state.ranks.living():
        early_s = EARLY_SHARE * _silence_s(state, rank) if rank.watch.stopped_s is None else 0.0
        is_pausing = rank.state is RankState.PAUSING
        if is_pausing and ctx.now_s >= state.ranks.pause_by_s:
            exits.kill(ctx, rank)  # once: it may take long to go, or never do
        elif not (is_pausing or _is_judged(state, rank)):
            continue
        elif ctx.now_s >= _look_s(state, rank) - early_s:
            ctx.do(Look(rank.pid))
        elif not is_pausing:
            _judge_progress(ctx, rank)


def on_watched(ctx: HostContext, event: RankWatched) -> None:
    if (rank := ctx.state.ranks.table.get(event.pid)) is not None:
        rank.parent, rank.watch.stop_reported = event.parent, event.is_stopped


def on_looked(ctx: HostContext, event: Looked) -> None:
    """Two looks that find it stopped are a hang: one that is held for a moment (a profiler, a debugger that attaches)
    is not taken for it."""
    rank, is_stopped = ctx.state.ranks.table.get(event.pid), event.is_stopped
    if rank is None:
        return
    watch = rank.watch
    watch.looked_s, before, watch.stop_reported = ctx.now_s, watch.stopped_s, is_stopped
    watch.stopped_s = None if not is_stopped else ctx.now_s if before is None else before
    stays = before is not None and is_stopped
    if rank.state is RankState.PAUSING:
        if stays:
            exits.kill(ctx, rank)
    elif stays and _is_judged(ctx.state, rank):
        _report(ctx, rank, f"is stopped, silent for {ctx.now_s - watch.seen_s:.2f} s")
    else:
        _judge_progress(ctx, rank)


def on_stopped(ctx: HostContext, pid: int) -> None:
    """Its parent says so. One that is stopped for a moment is stopped right now: looks count from here."""
    rank = ctx.state.ranks.table.get(pid)
    if rank is not None:
        rank.watch.stop_reported, rank.watch.looked_s, rank.watch.stopped_s = True, ctx.now_s, None


def on_reconnect(state: HostState) -> None:
    """A newly connected supervisor has not heard of any hang."""
    for rank in state.ranks.table.values():
        rank.watch.hang_reported = False


def _judge_progress(ctx: HostContext, rank: Rank) -> None:
    by_s = _progress_by_s(ctx.state, rank)
    if _is_judged(ctx.state, rank) and ctx.now_s >= by_s:
        limit_s = by_s - rank.watch.progress_s
        silent_s = ctx.now_s - rank.watch.progress_s
        _report(ctx, rank, f"made no progress for {silent_s:.1f} s (limit {limit_s:.1f} s)")


def _report(ctx: HostContext, rank: Rank, reason: str) -> None:
    rank.watch.hang_reported = True
    evidence = f"rank {rank.rank} on {ctx.state.host} {reason} at step {rank.steps.step}"
    silent_s = ctx.now_s - rank.watch.progress_s
    ctx.report(RankHang(attempt=rank.attempt, rank=rank.rank, evidence=evidence, silent_s=silent_s))


def _is_judged(state: HostState, rank: Rank) -> bool:
    """A hang is reported once, and to a supervisor."""
    return state.is_supervised and rank.state is RankState.RUNNING and not rank.watch.hang_reported


def _silence_s(state: HostState, rank: Rank) -> float:
    """How long this one may be silent until it is found to be stopped."""
    is_reported = rank.state is RankState.RUNNING and not rank.watch.stop_reported and state.reaps(rank.parent)
    return state.spec.recovery.timing.rank_silence_s(reports_stops=is_reported)


def _look_s(state: HostState, rank: Rank) -> float:
    """When its process is to be looked at next."""
    watch, silence_s = rank.watch, _silence_s(state, rank)
    if watch.stopped_s is not None:
        return max(watch.looked_s, watch.stopped_s) + CONFIRM_SHARE * silence_s
    return max(watch.looked_s, watch.seen_s) + LOOK_SHARE * silence_s


def _progress_by_s(state: HostState, rank: Rank) -> float:
    """The longest time without a micro-batch. Before a rank's first step the supervisor watches the start; in it, or in
    one that a previous agent saw begin, it may take as long as a start."""
    given, clock = state.spec.recovery, state.ranks.clock
    step_s = clock.limit_s if given.step_timeout_s is None else given.step_timeout_s
    if rank.steps.stepped:
        return rank.watch.progress_s + step_s
    return rank.watch.progress_s + max(step_s, given.start_timeout_s) if rank.steps.first is not None else NEVER
