"""The end of a run. What only memory holds is written before the hosts go.

::

    flush_and_finish -> begin_flush -> write -> commit -> finish     what memory holds is newer than what is committed
    flush_and_finish -> finish                                       it is not, or no host is connected

The ranks have exited or hang by then: the hosts write their snapshots themselves, one of them puts the marker. All
of it has ``grace_s``; the run's final reason names what could not be written in that time.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from muster.storage import uris
from muster.supervise.recovery.context import SupervisorContext
from muster.supervise.recovery.state import SECOND_NS, End, Ending, Phase


def finish(ctx: SupervisorContext, outcome: str, code: int, reason: str) -> None:
    """End the run, once: log it, release the hosts."""
    ctx.state.phase = Phase.ENDED
    ctx.state.deadline_ns, ctx.state.alarms = None, {}
    ctx.log(
        "run.finished",
        {"outcome": outcome, "exit_code": code, "reason": reason, "final_step": ctx.state.last_applied_step},
        sync=True,
    )
    for name, host in ctx.state.hosts.items():
        if host.connected:
            ctx.send(name, {"t": "shutdown", "reason": outcome})
        if host.allocated:
            ctx.log("host.released", {"reason": outcome}, host=name)
    ctx.effects.append(End(exit_code=code, outcome=outcome, reason=reason))


def finish_training(ctx: SupervisorContext) -> None:
    """Every rank has exited after the last step. Where the save failed (a full disk), the hosts write it again."""
    state = ctx.state
    reason = f"done after step {state.last_applied_step}"
    if state.save_failed is None or state.committed_step >= state.last_applied_step:
        finish(ctx, "succeeded", 0, reason)
    elif not ctx.settings.spec.checkpoint.snapshot_every_steps or not _connected(ctx):
        finish(ctx, "failed", 1, f"{reason}, which could not be saved ({state.save_failed}): {_newest_checkpoint(ctx)}")
    else:
        flush_and_finish(ctx, "succeeded", 0, reason)


def flush_and_finish(ctx: SupervisorContext, outcome: str, code: int, reason: str) -> None:
    """End the run without a save by its ranks: first the hosts write what only their memory holds."""
    state = ctx.state
    nothing_newer = not state.attempt or state.last_applied_step <= state.committed_step
    if nothing_newer or not ctx.settings.spec.checkpoint.snapshot_every_steps or not _connected(ctx):
        finish(ctx, outcome, code, reason)
        return
    state.ending = Ending(outcome=outcome, exit_code=code, reason=reason)
    ctx.log("run.ending", {"outcome": outcome, "exit_code": code, "reason": reason}, sync=True)
    if state.phase in (Phase.RUN, Phase.STOPPING):
        ctx.log("attempt.ended", {"reason": reason})
    begin_flush(ctx)


def begin_flush(ctx: SupervisorContext) -> None:
    """Ask every host to end its ranks and list its snapshots. A takeover of a run that was ending begins here."""
    state, ending = ctx.state, ctx.state.ending
    assert ending is not None
    if not _connected(ctx):
        finish(ctx, *_final_outcome(ctx), f"{ending.reason}; no host is left that could write its memory")
        return
    state.phase, state.resizing, state.open = Phase.FLUSH, False, None
    ending.until_ns = ctx.now_ns + int(ctx.settings.spec.recovery.grace_s * SECOND_NS)
    ending.waiting = dict.fromkeys(_connected(ctx), 1)
    for name in ending.waiting:
        ctx.send(name, {"t": "end", "attempt": state.attempt, "why": "the run ends"})
    ctx.deadline(min(ctx.settings.drain_timeout_s, ctx.settings.spec.recovery.grace_s))


def on_drained(ctx: SupervisorContext, name: str) -> None:
    """A host has ended its ranks and listed its snapshots; after the last one the newest version is written."""
    ending = ctx.state.ending
    if ending is None or ending.choice is not None or name not in ending.waiting:
        return
    del ending.waiting[name]
    ending.answered.add(name)
    if not ending.waiting:
        _write(ctx)


def on_answer(ctx: SupervisorContext, name: str, message: Mapping[str, Any]) -> None:
    """``flushed`` or ``flush_committed`` of a host."""
    ending = ctx.state.ending
    if ctx.state.phase is not Phase.FLUSH or ending is None or ending.choice is None or name not in ending.waiting:
        return
    ending.waiting[name] -= 1
    if ending.waiting[name] > 0:  # the answer to a request that the loss of another host has replaced
        return
    if ending.committing != (message["t"] == "flush_committed"):
        return
    del ending.waiting[name]
    if not message.get("ok"):
        step, attempt = ending.choice.step, ending.choice.attempt
        ending.given_up.add((step, attempt))
        ending.problem = f"{name}: {message.get('reason', 'no reason given')}"
        text = f"step {step} of attempt {attempt} cannot be written from memory: {ending.problem}"
        ctx.log("run.message", {"text": text}, step=step)
        _write(ctx)
    elif ending.committing:
        step = ending.choice.step
        ctx.state.committed_step = max(ctx.state.committed_step, step)
        reason = f"{ending.reason}; step {step} was written from memory at the end"
        newest = max((given_up for given_up, _ in ending.given_up), default=step)
        if newest > step:
            reason += f", and step {newest} could not be ({ending.problem})"
        finish(ctx, *_final_outcome(ctx), reason)
    else:
        ending.files += list(message.get("files", ()))
        ending.writers.append(name)
        if not ending.waiting:
            _commit(ctx)


def on_host_lost(ctx: SupervisorContext, name: str) -> None:
    """A host was lost, or its agent restarted and does not know the request: continue with what there is."""
    ending = ctx.state.ending
    if ending is None or ctx.state.phase is not Phase.FLUSH:
        return
    awaited = ending.waiting.pop(name, None) is not None
    if not ctx.state.hosts[name].connected:
        ending.answered.discard(name)
    if not awaited:
        return
    if ending.choice is None:
        if not ending.waiting:
            _write(ctx)
    elif ending.committing:
        _commit(ctx)
    else:
        ending.problem = f"{name} was lost"
        _write(ctx)


def on_host_returned(ctx: SupervisorContext, name: str) -> None:
    """Its agent restarted and may not know what it was asked."""
    ending = ctx.state.ending
    if ending is not None and ending.choice is None and name in ending.waiting:
        ctx.send(name, {"t": "end", "attempt": ctx.state.attempt, "why": "the run ends"})
    else:
        on_host_lost(ctx, name)


def on_deadline(ctx: SupervisorContext) -> None:
    """The deadline has passed: continue without the hosts that have not answered."""
    ending = ctx.state.ending
    assert ending is not None
    if ending.choice is None and ctx.now_ns < ending.until_ns:
        ending.waiting = {}
        _write(ctx)
        return
    finish_unsaved(ctx, f"not within grace_s={ctx.settings.spec.recovery.grace_s:g} s")


def _write(ctx: SupervisorContext) -> None:
    """Have the newest version that is left written; without one the run ends."""
    state, ending = ctx.state, ctx.state.ending
    assert ending is not None
    ending.files, ending.writers, ending.committing = [], [], False
    choice = ctx.newest_held(hosts=ending.answered, without=ending.given_up | state.unreadable_snapshots)
    if choice is None or choice.step <= state.committed_step:
        finish_unsaved(ctx, ending.problem)
        return
    ending.choice = choice
    due = ending.waiting
    ending.waiting = {}
    for name in sorted({held.host for held in choice.shards.values()}):
        ending.waiting[name] = due.get(name, 0) + 1
        ctx.send(name, {"t": "flush", **_version(ctx), "ranks": choice.shards_on(name)})
    ctx.state.deadline_ns = ending.until_ns


def _commit(ctx: SupervisorContext) -> None:
    """Every shard is written: one of the hosts that wrote puts the marker."""
    ending = ctx.state.ending
    assert ending is not None
    writer = next((name for name in ending.writers if ctx.state.hosts[name].connected), None)
    if writer is None:
        finish_unsaved(ctx, "the hosts that wrote it were lost")
        return
    ending.writers.remove(writer)  # asked once: if it is lost, another one is asked
    ending.committing, ending.waiting = True, {writer: 1}
    ctx.send(writer, {"t": "flush_commit", **_version(ctx), "files": ending.files})


def _version(ctx: SupervisorContext) -> dict[str, Any]:
    ending = ctx.state.ending
    assert ending is not None and ending.choice is not None
    directory = ctx.settings.spec.checkpoint.dir or uris.join(ctx.settings.run_dir, "checkpoints")
    choice = ending.choice
    return {"step": choice.step, "attempt": choice.attempt, "layout": choice.layout.key, "uri": directory}


def finish_unsaved(ctx: SupervisorContext, problem: str) -> None:
    """End without the flush; the reason names what is lost, and why."""
    state, ending = ctx.state, ctx.state.ending
    assert ending is not None
    reason = ending.reason
    if problem or ending.choice is not None:
        step = ending.choice.step if ending.choice is not None else state.last_applied_step
        problem = problem or "no complete version is left"
        reason += f"; step {step} was only in memory and was not written ({problem}): {_newest_checkpoint(ctx)}"
    finish(ctx, *_final_outcome(ctx), reason)


def _newest_checkpoint(ctx: SupervisorContext) -> str:
    step = ctx.state.committed_step
    return f"the checkpoint of step {step} remains" if step else "there is no checkpoint"


def _final_outcome(ctx: SupervisorContext) -> tuple[str, int]:
    """(outcome, exit code). A run whose last step is saved nowhere has not succeeded: `muster recover` redoes it."""
    state, ending = ctx.state, ctx.state.ending
    assert ending is not None
    if ending.outcome == "succeeded" and state.committed_step < state.last_applied_step:
        return "failed", 1
    return ending.outcome, ending.exit_code


def _connected(ctx: SupervisorContext) -> list[str]:
    return sorted(name for name, host in ctx.state.hosts.items() if host.connected)
