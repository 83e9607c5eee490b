"""The end of a run. What only memory holds is written before the hosts go.

::

    flush_and_finish -> begin_flush -> write -> commit -> finish     what memory holds is newer than what is committed
    flush_and_finish -> finish                                       it is not, or no host is connected

The ranks have exited or hang by then: the hosts write their snapshots themselves, one of them puts the marker. All
of it has ``grace_s``; the run's final reason names what could not be written in that time.
"""

from __future__ import annotations

from muster.core.typed_json import JsonObject
from muster.protocol.held_snapshots import Choice
from muster.protocol.to_agent import CommitFlushed, EndAttempt, FlushSnapshots, Shutdown
from muster.protocol.to_supervisor import FlushCommitted, SnapshotsFlushed
from muster.supervise.recovery.context import SupervisorContext
from muster.supervise.recovery.inputs import SECOND_NS, End
from muster.supervise.recovery.phases import Ended, Flushing, RunEnd, Running, Stopping

#: Between two attempts to write a version on a disk that does not take it.
RETRY_S = 1.0


def finish(ctx: SupervisorContext, outcome: str, code: int, reason: str) -> None:
    """End the run, once: log it, release the hosts."""
    ctx.enter(Ended())
    ctx.state.alarms = {}
    ctx.log(
        "run.finished",
        {"outcome": outcome, "exit_code": code, "reason": reason, "final_step": ctx.state.last_applied_step},
        sync=True,
    )
    for name, host in ctx.state.hosts.items():
        if host.connected:
            ctx.send(name, Shutdown(reason=outcome))
        if host.machine.allocated:
            ctx.log("host.released", {"reason": outcome}, host=name)
    ctx.effects.append(End(exit_code=code, outcome=outcome, reason=reason))


def finish_training(ctx: SupervisorContext) -> None:
    """Every rank has exited with code 0: after the last step, or the run has failed. Where the save failed (a full
    disk), the hosts write it again."""
    state, spec = ctx.state, ctx.settings.spec
    wanted = spec.training.steps if spec.command is None else None  # what a loop of the user's own ends with is its say
    if wanted is not None and state.last_applied_step < wanted:
        flush_and_finish(ctx, "failed", 1, f"ranks ended at step {state.last_applied_step} of {wanted}")
        return
    reason = f"done after step {state.last_applied_step}"
    if state.saves.failed is None or state.saves.committed_step >= state.last_applied_step:
        finish(ctx, "succeeded", 0, reason)
    elif not spec.checkpoint.snapshot_every_steps or not _connected(ctx):
        unsaved = f"{reason}, which could not be saved ({state.saves.failed})"
        finish(ctx, "failed", 1, f"{unsaved}: {_newest_checkpoint(ctx)}")
    else:
        flush_and_finish(ctx, "succeeded", 0, reason)


def flush_and_finish(ctx: SupervisorContext, outcome: str, code: int, reason: str, *, by_user: bool = False) -> None:
    """End the run without a save by its ranks: first the hosts write what only their memory holds."""
    state = ctx.state
    nothing_newer = not state.attempt or state.last_applied_step <= state.saves.committed_step
    if nothing_newer or not ctx.settings.spec.checkpoint.snapshot_every_steps or not _connected(ctx):
        finish(ctx, outcome, code, reason)
        return
    end: JsonObject = {"outcome": outcome, "exit_code": code, "reason": reason, "by_user": by_user}
    ctx.log("run.ending", end, sync=True)
    if isinstance(state.phase, Running | Stopping):
        ctx.log("attempt.ended", {"reason": reason})
    begin_flush(ctx, RunEnd(outcome=outcome, exit_code=code, reason=reason), by_user=by_user)


def begin_flush(ctx: SupervisorContext, end: RunEnd, *, by_user: bool = False) -> None:
    """Ask every host to end its ranks and list its snapshots. A takeover of a run that was ending begins here."""
    connected, grace_s = _connected(ctx), ctx.settings.spec.recovery.grace_s
    if not connected:
        _finish(ctx, end, "; no host is left that could write its memory")
        return
    ctx.state.open = None
    until_ns = ctx.now_ns + int(grace_s * SECOND_NS)
    ctx.enter(Flushing(end=end, until_ns=until_ns, by_user=by_user, waiting=dict.fromkeys(connected, 1)))
    ctx.deadline(min(ctx.settings.drain_timeout_s, grace_s))
    for name in connected:
        ctx.send(name, _end_of_run(ctx))


def on_drained(ctx: SupervisorContext, flushing: Flushing, name: str) -> None:
    """A host has ended its ranks and listed its snapshots; after the last one the newest version is written."""
    if flushing.choice is not None or name not in flushing.waiting:
        return
    del flushing.waiting[name]
    flushing.answered.add(name)
    if not flushing.waiting:
        _write(ctx, flushing)


def _end_of_run(ctx: SupervisorContext) -> EndAttempt:
    return EndAttempt(attempt=ctx.state.attempt, why="the run ends")


def on_answer(ctx: SupervisorContext, name: str, message: SnapshotsFlushed | FlushCommitted) -> None:
    """A host has written its share of the version, or made a checkpoint of all shares; or could not."""
    flushing = ctx.state.phase
    if not isinstance(flushing, Flushing) or flushing.choice is None or name not in flushing.waiting:
        return
    flushing.waiting[name] -= 1
    if flushing.waiting[name] > 0:  # the answer to a request that the loss of another host has replaced
        return
    if flushing.committing != isinstance(message, FlushCommitted):
        return
    del flushing.waiting[name]
    if flushing.retrying:  # another host could not write its share
        return
    if message.failure is not None:
        _give_up(ctx, flushing, flushing.choice, f"{name}: {message.failure}", message)
    elif isinstance(message, SnapshotsFlushed):
        flushing.files += message.files
        flushing.writers.append(name)
        if not flushing.waiting:
            _commit(ctx, flushing, flushing.choice)
    else:
        step = flushing.choice.step
        ctx.state.saves.committed_step = max(ctx.state.saves.committed_step, step)
        addition = f"; step {step} was written from memory at the end"
        if flushing.newest > step:
            addition += f", and step {flushing.newest} could not be ({flushing.problem})"
        _finish(ctx, flushing.end, addition)


def _give_up(
    ctx: SupervisorContext, flushing: Flushing, choice: Choice, problem: str, answer: SnapshotsFlushed | FlushCommitted
) -> None:
    """Without the copies that are not intact; where that is not what is wrong (a disk that is full for a while), the
    same version again until half of ``grace_s`` is over, and then the next older one."""
    first = problem != flushing.problem
    flushing.problem = problem
    if isinstance(answer, SnapshotsFlushed) and answer.rejected:
        ctx.reject(answer.rejected, problem)
    elif ctx.now_ns + int((RETRY_S + ctx.settings.spec.recovery.grace_s / 2) * SECOND_NS) < flushing.until_ns:
        if first:
            text = f"step {choice.step} of attempt {choice.attempt} cannot be written from memory yet: {problem}"
            ctx.log("run.message", {"text": text}, step=choice.step)
        flushing.retrying = True
        ctx.deadline(RETRY_S)
        return
    else:
        flushing.given_up.add((choice.step, choice.attempt))
        text = f"step {choice.step} of attempt {choice.attempt} cannot be written from memory: {problem}"
        ctx.log("run.message", {"text": text}, step=choice.step)
    _write(ctx, flushing)


def on_host_lost(ctx: SupervisorContext, flushing: Flushing, name: str) -> None:
    """A host was lost, or its agent restarted and does not know the request: continue with what there is."""
    awaited = flushing.waiting.pop(name, None) is not None
    if not ctx.state.hosts[name].connected:
        flushing.answered.discard(name)
    if not awaited:
        return
    if flushing.choice is None:
        if not flushing.waiting:
            _write(ctx, flushing)
    elif flushing.committing:
        _commit(ctx, flushing, flushing.choice)
    else:
        flushing.problem = f"{name} was lost"
        _write(ctx, flushing)


def on_host_returned(ctx: SupervisorContext, flushing: Flushing, name: str) -> None:
    """Its agent restarted and may not know what it was asked."""
    if flushing.choice is None and name in flushing.waiting:
        ctx.send(name, _end_of_run(ctx))
    else:
        on_host_lost(ctx, flushing, name)


def on_deadline(ctx: SupervisorContext, flushing: Flushing) -> None:
    """The deadline has passed: continue without the hosts that have not answered."""
    if flushing.retrying or (flushing.choice is None and ctx.now_ns < flushing.until_ns):
        if not flushing.retrying:
            flushing.waiting = {}
        _write(ctx, flushing)
    else:
        finish_unsaved(ctx, flushing, f"not within grace_s={ctx.settings.spec.recovery.grace_s:g} s")


def _write(ctx: SupervisorContext, flushing: Flushing) -> None:
    """Have the newest version that is left written; without one the run ends."""
    state = ctx.state
    flushing.files, flushing.writers, flushing.committing, flushing.retrying = [], [], False, False
    choice = ctx.newest_held(hosts=flushing.answered, without=flushing.given_up)
    if choice is None or choice.step <= state.saves.committed_step:
        finish_unsaved(ctx, flushing, flushing.problem)
        return
    flushing.choice, flushing.deadline_ns = choice, flushing.until_ns
    flushing.newest = max(flushing.newest, choice.step)
    due = flushing.waiting
    flushing.waiting = {}
    for name in sorted({held.host for held in choice.shards.values()}):
        flushing.waiting[name] = due.get(name, 0) + 1
        ranks = choice.flush_shards(name)
        ctx.send(
            name,
            FlushSnapshots(
                step=choice.step, attempt=choice.attempt, layout=choice.layout.key, uri=_directory(ctx), ranks=ranks
            ),
        )


def _commit(ctx: SupervisorContext, flushing: Flushing, choice: Choice) -> None:
    """Every shard is written: one of the hosts that wrote puts the marker."""
    writer = next((name for name in flushing.writers if ctx.state.hosts[name].connected), None)
    if writer is None:
        finish_unsaved(ctx, flushing, "the hosts that wrote it were lost")
        return
    flushing.writers.remove(writer)  # asked once: if it is lost, another one is asked
    flushing.committing, flushing.waiting = True, {writer: 1}
    files = tuple(flushing.files)
    ctx.send(
        writer,
        CommitFlushed(
            step=choice.step, attempt=choice.attempt, layout=choice.layout.key, uri=_directory(ctx), files=files
        ),
    )


def _directory(ctx: SupervisorContext) -> str:
    return ctx.settings.spec.checkpoint_uri(ctx.settings.run_dir)


def finish_unsaved(ctx: SupervisorContext, flushing: Flushing, problem: str) -> None:
    """End without the flush; the reason names what is lost, and why."""
    addition = ""
    if problem or flushing.choice is not None:
        step = flushing.newest if flushing.choice is not None else ctx.state.last_applied_step
        problem = problem or "no complete version is left"
        addition = f"; step {step} was only in memory and was not written ({problem}): {_newest_checkpoint(ctx)}"
    _finish(ctx, flushing.end, addition)


def _newest_checkpoint(ctx: SupervisorContext) -> str:
    step = ctx.state.saves.committed_step
    return f"the checkpoint of step {step} remains" if step else "there is no checkpoint"


def _finish(ctx: SupervisorContext, end: RunEnd, addition: str) -> None:
    """A run whose last step is saved nowhere has not succeeded: `muster recover` redoes it."""
    lost = end.outcome == "succeeded" and ctx.state.saves.committed_step < ctx.state.last_applied_step
    finish(ctx, "failed" if lost else end.outcome, 1 if lost else end.exit_code, end.reason + addition)


def _connected(ctx: SupervisorContext) -> list[str]:
    return sorted(name for name, host in ctx.state.hosts.items() if host.connected)
