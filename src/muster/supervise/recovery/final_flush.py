"""The end of a run. What only memory holds is written before the hosts go.

::

    leave -> inventory -> write -> commit -> finish      what memory holds is newer than what is committed
    leave -> finish                                      it is not, or nobody is there to be asked

The ranks are gone or hang by then: the hosts write their snapshots themselves, one of them puts the marker. All
of it has ``grace_s``; what could not be written in that time is said in the run's last word.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from muster.storage import uris
from muster.supervise.recovery.context import SupervisorContext
from muster.supervise.recovery.held_snapshots import newest_held
from muster.supervise.recovery.state import SECOND_NS, End, Ending, Phase


def finish(ctx: SupervisorContext, outcome: str, code: int, reason: str) -> None:
    """End the run, once: say so, let the hosts go."""
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
    """Every rank has left after the last step. Where its save failed (a full disk), the hosts write it once more."""
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
    nothing_newer = state.last_applied_step <= state.committed_step
    if (
        not state.attempt
        or nothing_newer
        or not ctx.settings.spec.checkpoint.snapshot_every_steps
        or not _connected(ctx)
    ):
        finish(ctx, outcome, code, reason)
        return
    state.ending = Ending(outcome=outcome, exit_code=code, reason=reason)
    ctx.log("run.ending", {"outcome": outcome, "exit_code": code, "reason": reason}, sync=True)
    if state.phase in (Phase.RUN, Phase.STOPPING):
        ctx.log("attempt.ended", {"reason": reason})
    begin_flush(ctx)


def begin_flush(ctx: SupervisorContext) -> None:
    """Ask every host what it holds once its ranks are gone. A new supervisor of a run that was ending begins here."""
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
    """A host has ended its ranks and said what it holds; after the last one the newest version is written."""
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
    if ending.waiting[name] > 0:  # the answer to an order that a lost host has overtaken
        return
    if ending.committing != (message["t"] == "flush_committed"):
        return
    del ending.waiting[name]
    if not message.get("ok"):
        step, attempt = ending.choice.step, ending.choice.attempt
        ending.given_up.add((step, attempt))
        ending.why = f"{name}: {message.get('reason', 'no reason given')}"
        text = f"step {step} of attempt {attempt} cannot be written from memory: {ending.why}"
        ctx.log("run.message", {"text": text}, step=step)
        _write(ctx)
    elif ending.committing:
        step = ending.choice.step
        ctx.state.committed_step = max(ctx.state.committed_step, step)
        told = f"{ending.reason}; step {step} was written from memory before the hosts went"
        newest = max((given_up for given_up, _ in ending.given_up), default=step)
        if newest > step:
            told += f", and step {newest} could not be ({ending.why})"
        finish(ctx, *_final_outcome(ctx), told)
    else:
        ending.files += list(message.get("files", ()))
        ending.writers.append(name)
        if not ending.waiting:
            _commit(ctx)


def on_host_lost(ctx: SupervisorContext, name: str) -> None:
    """A host went, or its agent began anew and knows of no order: go on with what there is."""
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
        ending.why = f"{name} was lost"
        _write(ctx)


def on_host_returned(ctx: SupervisorContext, name: str) -> None:
    """Its agent said hello again: what it was asked before it may not know."""
    ending = ctx.state.ending
    if ending is not None and ending.choice is None and name in ending.waiting:
        ctx.send(name, {"t": "end", "attempt": ctx.state.attempt, "why": "the run ends"})
    else:
        on_host_lost(ctx, name)


def on_deadline(ctx: SupervisorContext) -> None:
    """The deadline has passed: hosts that have not said what they hold are left out, and nothing else is waited for."""
    ending = ctx.state.ending
    assert ending is not None
    if ending.choice is None and ctx.now_ns < ending.until_ns:
        ending.waiting = {}
        _write(ctx)
        return
    ending.why = f"not within grace_s={ctx.settings.spec.recovery.grace_s:g} s"
    _finish_unsaved(ctx)


def skip_flush(ctx: SupervisorContext, source: str) -> None:
    """Somebody does not want to wait for it."""
    ending = ctx.state.ending
    assert ending is not None
    ending.why = source
    _finish_unsaved(ctx)


def _write(ctx: SupervisorContext) -> None:
    """Order the newest version that is left to be written; without one the run ends."""
    state, ending = ctx.state, ctx.state.ending
    assert ending is not None
    ending.files, ending.writers, ending.committing = [], [], False
    choice = newest_held(ctx, hosts=ending.answered, without=ending.given_up | state.unreadable_snapshots)
    if choice is None or choice.step <= state.committed_step:
        _finish_unsaved(ctx)
        return
    ending.choice = choice
    owed = ending.waiting
    ending.waiting = {}
    for name in sorted({held.host for held in choice.shards.values()}):
        mine = [
            {"rank": rank, "tier": held.tier, "held_as": held.rank}
            for rank, held in sorted(choice.shards.items())
            if held.host == name
        ]
        ending.waiting[name] = owed.get(name, 0) + 1
        ctx.send(name, {"t": "flush", **_version(ctx), "ranks": mine})
    ctx.state.deadline_ns = ending.until_ns


def _commit(ctx: SupervisorContext) -> None:
    """Every shard is written: one of the hosts that wrote puts the marker."""
    ending = ctx.state.ending
    assert ending is not None
    writer = next((name for name in ending.writers if ctx.state.hosts[name].connected), None)
    if writer is None:
        ending.why = "the hosts that wrote it were lost"
        _finish_unsaved(ctx)
        return
    ending.writers.remove(writer)  # asked once: if it is lost, another one is
    ending.committing, ending.waiting = True, {writer: 1}
    ctx.send(writer, {"t": "flush_commit", **_version(ctx), "files": ending.files})


def _version(ctx: SupervisorContext) -> dict[str, Any]:
    ending = ctx.state.ending
    assert ending is not None and ending.choice is not None
    directory = ctx.settings.spec.checkpoint.dir or uris.join(ctx.settings.run_dir, "checkpoints")
    choice = ending.choice
    return {"step": choice.step, "attempt": choice.attempt, "layout": choice.layout.key, "uri": directory}


def _finish_unsaved(ctx: SupervisorContext) -> None:
    """End without it, and say what is lost; nothing where memory held nothing newer."""
    state, ending = ctx.state, ctx.state.ending
    assert ending is not None
    reason = ending.reason
    if ending.why or ending.choice is not None:
        step = ending.choice.step if ending.choice is not None else state.last_applied_step
        why = ending.why or "no complete version is left"
        reason += f"; step {step} lay only in memory and was not written ({why}): {_newest_checkpoint(ctx)}"
    finish(ctx, *_final_outcome(ctx), reason)


def _newest_checkpoint(ctx: SupervisorContext) -> str:
    step = ctx.state.committed_step
    return f"step {step} on disk stands" if step else "no checkpoint stands"


def _final_outcome(ctx: SupervisorContext) -> tuple[str, int]:
    """(outcome, exit code). A run whose last step stands nowhere has not succeeded: recovered, it makes up for it."""
    state, ending = ctx.state, ctx.state.ending
    assert ending is not None
    if ending.outcome == "succeeded" and state.committed_step < state.last_applied_step:
        return "failed", 1
    return ending.outcome, ending.exit_code


def _connected(ctx: SupervisorContext) -> list[str]:
    return sorted(name for name, host in ctx.state.hosts.items() if host.connected)
