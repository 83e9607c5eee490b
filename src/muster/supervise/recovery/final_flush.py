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
from muster.supervise.recovery.context import Context
from muster.supervise.recovery.held_snapshots import newest_held
from muster.supervise.recovery.state import SECOND_NS, End, Ending, Phase


def finish(c: Context, outcome: str, code: int, reason: str) -> None:
    """End the run, once: say so, let the hosts go."""
    c.state.phase = Phase.ENDED
    c.state.deadline_ns, c.state.alarms = None, {}
    c.log(
        "run.finished",
        {"outcome": outcome, "exit_code": code, "reason": reason, "final_step": c.state.last_applied_step},
        sync=True,
    )
    for name, host in c.state.hosts.items():
        if host.connected:
            c.send(name, {"t": "shutdown", "reason": outcome})
        if host.allocated:
            c.log("host.released", {"reason": outcome}, host=name)
    c.effects.append(End(exit_code=code, outcome=outcome, reason=reason))


def done(c: Context) -> None:
    """Every rank has left after the last step. Where its save failed (a full disk), the hosts write it once more."""
    state = c.state
    reason = f"done after step {state.last_applied_step}"
    if state.save_failed is None or state.committed_step >= state.last_applied_step:
        finish(c, "succeeded", 0, reason)
    elif not c.settings.spec.checkpoint.snapshot_every_steps or not _connected(c):
        finish(c, "failed", 1, f"{reason}, which could not be saved ({state.save_failed}): {_stands(c)}")
    else:
        leave(c, "succeeded", 0, reason)


def leave(c: Context, outcome: str, code: int, reason: str) -> None:
    """End the run without a save by its ranks: first the hosts write what only their memory holds."""
    state = c.state
    nothing_newer = state.last_applied_step <= state.committed_step
    if not state.attempt or nothing_newer or not c.settings.spec.checkpoint.snapshot_every_steps or not _connected(c):
        finish(c, outcome, code, reason)
        return
    state.ending = Ending(outcome=outcome, exit_code=code, reason=reason)
    c.log("run.ending", {"outcome": outcome, "exit_code": code, "reason": reason}, sync=True)
    if state.phase in (Phase.RUN, Phase.STOPPING):
        c.log("attempt.ended", {"reason": reason})
    take_up(c)


def take_up(c: Context) -> None:
    """Ask every host what it holds once its ranks are gone. A new supervisor of a run that was ending begins here."""
    state, ending = c.state, c.state.ending
    assert ending is not None
    if not _connected(c):
        finish(c, *_verdict(c), f"{ending.reason}; no host is left that could write its memory")
        return
    state.phase, state.resizing, state.open = Phase.FLUSH, False, None
    ending.until_ns = c.now_ns + int(c.settings.spec.recovery.grace_s * SECOND_NS)
    ending.waiting = dict.fromkeys(_connected(c), 1)
    for name in ending.waiting:
        c.send(name, {"t": "end", "attempt": state.attempt, "why": "the run ends"})
    c.deadline(min(c.settings.collect_timeout_s, c.settings.spec.recovery.grace_s))


def left(c: Context, name: str) -> None:
    """A host has ended its ranks and said what it holds; after the last one the newest version is written."""
    ending = c.state.ending
    if ending is None or ending.choice is not None or name not in ending.waiting:
        return
    del ending.waiting[name]
    ending.answered.add(name)
    if not ending.waiting:
        _write(c)


def answered(c: Context, name: str, message: Mapping[str, Any]) -> None:
    """``flushed`` or ``flush_committed`` of a host."""
    ending = c.state.ending
    if c.state.phase is not Phase.FLUSH or ending is None or ending.choice is None or name not in ending.waiting:
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
        c.log("run.message", {"text": text}, step=step)
        _write(c)
    elif ending.committing:
        step = ending.choice.step
        c.state.committed_step = max(c.state.committed_step, step)
        told = f"{ending.reason}; step {step} was written from memory before the hosts went"
        newest = max((given_up for given_up, _ in ending.given_up), default=step)
        if newest > step:
            told += f", and step {newest} could not be ({ending.why})"
        finish(c, *_verdict(c), told)
    else:
        ending.files += list(message.get("files", ()))
        ending.writers.append(name)
        if not ending.waiting:
            _commit(c)


def lost(c: Context, name: str) -> None:
    """A host went, or its agent began anew and knows of no order: go on with what there is."""
    ending = c.state.ending
    if ending is None or c.state.phase is not Phase.FLUSH:
        return
    awaited = ending.waiting.pop(name, None) is not None
    if not c.state.hosts[name].connected:
        ending.answered.discard(name)
    if not awaited:
        return
    if ending.choice is None:
        if not ending.waiting:
            _write(c)
    elif ending.committing:
        _commit(c)
    else:
        ending.why = f"{name} was lost"
        _write(c)


def returned(c: Context, name: str) -> None:
    """Its agent said hello again: what it was asked before it may not know."""
    ending = c.state.ending
    if ending is not None and ending.choice is None and name in ending.waiting:
        c.send(name, {"t": "end", "attempt": c.state.attempt, "why": "the run ends"})
    else:
        lost(c, name)


def overdue(c: Context) -> None:
    """The deadline has passed: hosts that have not said what they hold are left out, and nothing else is waited for."""
    ending = c.state.ending
    assert ending is not None
    if ending.choice is None and c.now_ns < ending.until_ns:
        ending.waiting = {}
        _write(c)
        return
    ending.why = f"not within grace_s={c.settings.spec.recovery.grace_s:g} s"
    _give_up(c)


def skip(c: Context, source: str) -> None:
    """Somebody does not want to wait for it."""
    ending = c.state.ending
    assert ending is not None
    ending.why = source
    _give_up(c)


def _write(c: Context) -> None:
    """Order the newest version that is left to be written; without one the run ends."""
    state, ending = c.state, c.state.ending
    assert ending is not None
    ending.files, ending.writers, ending.committing = [], [], False
    choice = newest_held(c, hosts=ending.answered, without=ending.given_up | state.distrusted)
    if choice is None or choice.step <= state.committed_step:
        _give_up(c)
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
        c.send(name, {"t": "flush", **_version(c), "ranks": mine})
    c.state.deadline_ns = ending.until_ns


def _commit(c: Context) -> None:
    """Every shard is written: one of the hosts that wrote puts the marker."""
    ending = c.state.ending
    assert ending is not None
    writer = next((name for name in ending.writers if c.state.hosts[name].connected), None)
    if writer is None:
        ending.why = "the hosts that wrote it were lost"
        _give_up(c)
        return
    ending.writers.remove(writer)  # asked once: if it is lost, another one is
    ending.committing, ending.waiting = True, {writer: 1}
    c.send(writer, {"t": "flush_commit", **_version(c), "files": ending.files})


def _version(c: Context) -> dict[str, Any]:
    ending = c.state.ending
    assert ending is not None and ending.choice is not None
    directory = c.settings.spec.checkpoint.dir or uris.join(c.settings.run_dir, "checkpoints")
    choice = ending.choice
    return {"step": choice.step, "attempt": choice.attempt, "layout": choice.layout.key, "uri": directory}


def _give_up(c: Context) -> None:
    """End without it, and say what is lost; nothing where memory held nothing newer."""
    state, ending = c.state, c.state.ending
    assert ending is not None
    reason = ending.reason
    if ending.why or ending.choice is not None:
        step = ending.choice.step if ending.choice is not None else state.last_applied_step
        why = ending.why or "no complete version is left"
        reason += f"; step {step} lay only in memory and was not written ({why}): {_stands(c)}"
    finish(c, *_verdict(c), reason)


def _stands(c: Context) -> str:
    step = c.state.committed_step
    return f"step {step} on disk stands" if step else "no checkpoint stands"


def _verdict(c: Context) -> tuple[str, int]:
    """(outcome, exit code). A run whose last step stands nowhere has not succeeded: recovered, it makes up for it."""
    state, ending = c.state, c.state.ending
    assert ending is not None
    if ending.outcome == "succeeded" and state.committed_step < state.last_applied_step:
        return "failed", 1
    return ending.outcome, ending.exit_code


def _connected(c: Context) -> list[str]:
    return sorted(name for name, host in c.state.hosts.items() if host.connected)
