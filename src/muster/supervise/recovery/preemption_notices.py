"""Preemption notices of hosts: gathered for a moment, since a scheduler that takes one host often takes all."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from muster.core.incidents import PREEMPTION_NOTICE
from muster.supervise.recovery.context import SupervisorContext
from muster.supervise.recovery.final_flush import flush_and_finish
from muster.supervise.recovery.incidents import members_of, report_incident
from muster.supervise.recovery.state import SECOND_NS, Phase

ALARM = "notices"


def on_notice(ctx: SupervisorContext, name: str, message: Mapping[str, Any]) -> None:
    """A host will be taken away. Ranks continue until it is known which other hosts leave with it."""
    state, host = ctx.state, ctx.state.hosts[name]
    grace_s = float(message.get("grace_s", ctx.settings.spec.recovery.grace_s))
    ctx.log(
        "termination.notice", {"notice": message["notice"], "source": message["source"], "grace_s": grace_s}, host=name
    )
    host.preemption_grace_s = grace_s
    all_leave = all(host.preemption_grace_s is not None for host in state.hosts.values() if host.connected)
    if state.phase is Phase.HELD_AFTER_FAILURE and state.final_result is not None and all_leave:
        flush_and_finish(ctx, "failed", *state.final_result)  # no host is left to be held
        return
    if state.phase is Phase.RUN and name in members_of(ctx):
        wait_s = min(ctx.settings.gather_notices_s, grace_s / 10)
        state.alarms.setdefault(ALARM, ctx.now_ns + int(wait_s * SECOND_NS))
    else:
        judge(ctx)


def judge(ctx: SupervisorContext) -> None:
    """Each host of the attempt that will leave is an incident; the first decision may already cover all."""
    state = ctx.state
    for name in members_of(ctx):
        host = state.hosts[name]
        if host.preemption_grace_s is None or name not in members_of(ctx):
            continue
        if state.phase not in (Phase.RUN, Phase.DRAINING, Phase.WAIT):
            return
        evidence = f"{name} will be taken away in {host.preemption_grace_s:.0f} s"
        report_incident(ctx, PREEMPTION_NOTICE, host=name, evidence=evidence)
