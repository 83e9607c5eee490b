"""The process that copies the run's figures to its trackers, on the host of rank 0.

It runs from rank 0's first start on this host to the end of the run, over all attempts. Where rank 0 has moved to
another host, there is one there too; this one has nothing more to deliver then.
"""

from __future__ import annotations

import contextlib
from typing import cast, get_args

from muster.agent.values.actions import FinishTrackers, Program, StartProgram, StopProgram
from muster.agent.values.events import ProgramEnded
from muster.agent.values.state import NEVER, HostContext
from muster.core.event_details.run import Outcome
from muster.core.typed_json import Unreadable
from muster.protocol.codec import reader_of
from muster.protocol.pipes import TRACKER_NOTES
from muster.trackers import wanted

NAME = "trackers"
#: Wait before it is started again. The first death is reported, and those after that time without one.
RETRY_S, QUIET_S = 5.0, 600.0
_read = reader_of(TRACKER_NOTES)


def tick(ctx: HostContext) -> None:
    state, trackers = ctx.state, ctx.state.trackers
    rank_0 = next((rank for rank in state.ranks.living() if rank.rank == 0), None)
    if rank_0 is not None:
        trackers.attempt = rank_0.attempt
    if rank_0 is not None and trackers.spec is not state.spec:
        trackers.spec, trackers.retry_s = state.spec, NEVER
        if trackers.running:
            trackers.running = False
            ctx.do(StopProgram(NAME, leave=True))
        if wanted(state.spec):
            _start(ctx)
    elif ctx.now_s >= trackers.retry_s:
        _start(ctx)


def _start(ctx: HostContext) -> None:
    state = ctx.state
    state.trackers.running, state.trackers.retry_s = True, NEVER
    argv = (
        "muster.trackers.main", "--run-dir", str(state.identity.run_dir), "--run-id", state.identity.run_id,
        "--writer", state.writer,
    )  # fmt: skip
    ctx.do(
        StartProgram(
            Program(NAME, argv, reads="lines", writes=True, env="run", spec=state.spec, ends_with_session=True)
        )
    )


def on_line(ctx: HostContext, line: bytes) -> None:
    with contextlib.suppress(Unreadable):
        _note(ctx, _read(line).text)


def on_ended(ctx: HostContext, event: ProgramEnded) -> None:
    trackers = ctx.state.trackers
    trackers.running = False
    if event.failure is not None:
        trackers.retry_s = ctx.now_s + QUIET_S
        _note(ctx, f"no figures for {' and '.join(wanted(ctx.state.spec))}: {event.failure.reason}")
        return
    if not event.code:  # nothing more can be delivered, which it has reported; or it was stopped
        return
    before, trackers.died_s = trackers.died_s, ctx.now_s
    trackers.retry_s = ctx.now_s + RETRY_S
    if trackers.died_s - before > QUIET_S:
        _note(
            ctx, f"the process on {ctx.state.host} that serves trackers ended with code {event.code} and is restarted"
        )


def end(ctx: HostContext, reason: str) -> None:
    """Where ``reason`` is a final outcome of the run, wait until trackers have everything, in a bounded time. Else end
    it at once: the run goes on elsewhere or later, and the host may have seconds left."""
    trackers = ctx.state.trackers
    is_final = reason in get_args(Outcome) and reason != "preempted"
    if trackers.running and is_final:
        ctx.do(FinishTrackers(cast(Outcome, reason)))
    elif trackers.running:
        ctx.do(StopProgram(NAME, leave=True))
    elif is_final and trackers.retry_s < NEVER:
        _note(ctx, "trackers lack figures and how the run ended: muster track RUN sends the rest")


def _note(ctx: HostContext, text: str) -> None:
    ctx.tell("run.message", {"text": text}, attempt=ctx.state.trackers.attempt)
