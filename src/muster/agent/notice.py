"""This host is being taken away (by a scheduler or the cloud): be replaced, or save and leave.

A supervisor decides for a run of several hosts; without one the run is saved and ends as preempted.
"""

from __future__ import annotations

from muster.agent.ranks import attempts
from muster.agent.values.events import Noticed
from muster.agent.values.state import NEVER, HostContext, HostState
from muster.protocol.to_supervisor import HostNotice
from muster.protocol.values import CommandRanks

#: Share of the grace time in which a host of several waits for a new supervisor, which can replace it. In the rest the
#: ranks save, as they do where there is no one to ask.
WAIT_SHARE = 0.5


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
