"""A host without a supervisor whose ranks have ended: it waits with its snapshots, then saves them, then exits.

A supervisor that connects during the wait finds all of them in memory. What would be lost when this host exits is saved
by its replicator as a checkpoint, where it is the whole state; a partial state is held for as long, then reported lost.
A notice that this host is being removed is answered here too: without a supervisor the run is saved and ends.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from muster.agent.programs import replicator_child
from muster.agent.ranks import attempts
from muster.agent.values.actions import ListSnapshots
from muster.agent.values.events import Noticed
from muster.agent.values.state import NEVER, FlushAnswer, HostContext, HostState
from muster.core.layout import Layout
from muster.core.snapshots import SnapshotCopy
from muster.protocol.exit_codes import UNSUPERVISED
from muster.protocol.held_snapshots import newest_complete
from muster.protocol.to_agent import CommitFlushed, FlushSnapshots
from muster.protocol.to_supervisor import HostNotice, SnapshotsFlushed
from muster.protocol.values import CommandRanks

#: Without a supervisor and without work an agent waits this long, or ``recovery.keep_hosts_after_failure_s`` where that
#: is longer.
GRACE_PERIOD_S = 120.0
#: After the end of the run: its supervisor gave the lease back, and could not tell this host (its agent was just
#: starting). A supervisor that was started at once for the same run connects within it.
RELEASED_S = 15.0
REASON = "no supervisor and no work"
"""Why it exited, in its last event (a back end may look for it)."""
#: Share of the grace time in which a host of several waits for a new supervisor, which can replace it. In the rest the
#: ranks save, as they do where there is no one to ask.
WAIT_SHARE = 0.5


def begin(ctx: HostContext) -> None:
    """The supervisor was lost just now, or the host works: it waits from here."""
    leaving = ctx.state.leaving
    leaving.alone_s, leaving.saving, leaving.was_held = ctx.now_s, None, True


def watch(ctx: HostContext) -> None:
    """No supervisor answers: when the wait is over have the newest version saved, and exit.

    Before a run's next supervisor starts, the lease is what the last one left: only one that was held during this
    agent's life and is released now tells that the run has ended.
    """
    leaving, is_released = ctx.state.leaving, ctx.state.link.is_released
    leaving.was_held = leaving.was_held or not is_released
    if ctx.state.ranks.living():
        begin(ctx)
    elif leaving.saving is not None:
        if ctx.now_s > leaving.save_by_s:
            _exit(ctx, f"step {leaving.saving.step} was not saved within {_grace_period_s(ctx.state):g} s")
    elif ctx.now_s - leaving.alone_s > _grace_period_s(
        ctx.state, RELEASED_S if leaving.was_held and is_released else GRACE_PERIOD_S
    ):
        ctx.do(ListSnapshots())


def save(ctx: HostContext, held: Sequence[SnapshotCopy]) -> None:
    """The wait is over, and these snapshots are here."""
    state, leaving = ctx.state, ctx.state.leaving
    intact = [snapshot for snapshot in held if (snapshot.step, snapshot.attempt) not in leaving.failed]
    version = newest_complete(intact)
    if version is None:
        _exit(ctx, _partial_state(held))
        return
    is_first = any(snapshot.rank == 0 and snapshot.tier == "memory" for snapshot in held)
    wait_s = _grace_period_s(state) + state.spec.recovery.grace_s
    if not is_first and ctx.now_s - leaving.alone_s < wait_s:
        return  # the host of rank 0 may hold it too, and two must not write the same files
    leaving.saving, leaving.save_by_s = version, ctx.now_s + _grace_period_s(state)
    order = FlushSnapshots(
        step=version.step, attempt=version.attempt, layout=version.layout.key, uri=_directory(state),
        ranks=version.flush_shards(state.host),
    )  # fmt: skip
    replicator_child.flush(ctx, order, fence=state.fence, alone=True)


def on_flush(ctx: HostContext, answer: FlushAnswer) -> None:
    """The replicator's answer to what ``save`` ordered."""
    state, leaving, version = ctx.state, ctx.state.leaving, ctx.state.leaving.saving
    if version is None or (version.step, version.attempt) != (answer.step, answer.attempt):
        return  # a supervisor came back meanwhile
    if answer.failure is not None:
        ctx.note(f"step {version.step} was not saved: {answer.failure}")
        leaving.failed.add((version.step, version.attempt))
        leaving.saving = None  # an older version may be intact
    elif isinstance(answer, SnapshotsFlushed) and answer.files:
        order = CommitFlushed(
            step=version.step, attempt=version.attempt, layout=version.layout.key, uri=_directory(state),
            files=answer.files,
        )  # fmt: skip
        replicator_child.flush(ctx, order, fence=state.fence, alone=True)
    else:  # committed, now or earlier
        _exit(ctx, None)


def _directory(state: HostState) -> str:
    return state.spec.checkpoint_uri(state.identity.run_dir)


def _grace_period_s(state: HostState, least_s: float | None = None) -> float:
    return max(GRACE_PERIOD_S if least_s is None else least_s, state.spec.recovery.keep_hosts_after_failure_s)


def _exit(ctx: HostContext, lost: str | None) -> None:
    if lost is not None:
        ctx.note(f"{ctx.state.host} exits without a supervisor: {lost}")
    ctx.exit(REASON, code=UNSUPERVISED)


def _partial_state(held: Iterable[SnapshotCopy]) -> str | None:
    """The part of the newest version that is here; None: nothing is."""
    versions = [(snapshot.step, snapshot.attempt, snapshot.layout, snapshot.rank) for snapshot in held]
    if not versions:
        return None
    newest = max(version[:3] for version in versions)
    ranks = sorted({version[3] for version in versions if version[:3] == newest})
    size = Layout.from_key(newest[2]).world_size
    return (
        f"its memory held step {newest[0]} of {', '.join(f'rank {rank}' for rank in ranks)} "
        f"(of {size}), not the whole state, and was not saved"
    )


def on_notice(ctx: HostContext, event: Noticed) -> None:
    state, leaving, source = ctx.state, ctx.state.leaving, event.source
    leaving.gone_s = ctx.now_s + state.spec.recovery.grace_s
    if not state.ranks.table:
        ctx.exit(f"got {source}")
    elif state.spec.resources.hosts == 1:
        _save(ctx)
    elif state.is_supervised:
        _tell(ctx, source)
    else:
        leaving.unreported = source


def due_s(state: HostState) -> float:
    """When ``tick`` acts, if no supervisor comes before."""
    leaving = state.leaving
    if leaving.unreported:
        return leaving.gone_s - (1 - WAIT_SHARE) * state.spec.recovery.grace_s
    return leaving.gone_s if leaving.reported else NEVER


def tick(ctx: HostContext) -> None:
    """Act on a notice that came while there was no supervisor, and leave when the time is over: a supervisor that
    waits for the host to return would wait without end for one that never left (a machine of one's own)."""
    state, leaving = ctx.state, ctx.state.leaving
    if leaving.reported and _left_s(ctx) == 0:
        if not state.ranks.table:
            ctx.exit(f"got {leaving.reported}")
        leaving.reported = ""  # with ranks: it was not taken away
    if not leaving.unreported:
        return
    if state.is_supervised:
        _tell(ctx, leaving.unreported)
        leaving.unreported = ""
    elif _left_s(ctx) <= (1 - WAIT_SHARE) * state.spec.recovery.grace_s:
        leaving.unreported = ""
        _save(ctx)


def _tell(ctx: HostContext, source: str) -> None:
    ctx.report(HostNotice(notice="preemption", source=source, grace_s=_left_s(ctx)))
    ctx.state.leaving.reported = source


def _save(ctx: HostContext) -> None:
    attempts.command(ctx, CommandRanks(kind="stop", exit_code=75, deadline_s=_left_s(ctx)))


def _left_s(ctx: HostContext) -> float:
    return max(0.0, ctx.state.leaving.gone_s - ctx.now_s)
