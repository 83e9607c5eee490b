"""Preemption notices of hosts: gathered for a moment, since a scheduler that takes one host often takes all."""

from __future__ import annotations

from muster.core.incidents import PREEMPTION_NOTICE
from muster.core.typed_json import JsonObject
from muster.protocol.to_supervisor import HostNotice
from muster.supervise.recovery.context import SupervisorContext
from muster.supervise.recovery.final_flush import flush_and_finish
from muster.supervise.recovery.incidents import report_incident
from muster.supervise.recovery.inputs import SECOND_NS
from muster.supervise.recovery.phases import Draining, Held, Running, Waiting

ALARM = "notices"


def on_notice(ctx: SupervisorContext, name: str, message: HostNotice) -> None:
    """A host will be taken away. Ranks continue until it is known which other hosts leave with it."""
    state, phase, host = ctx.state, ctx.state.phase, ctx.state.hosts[name]
    detail: JsonObject = {"notice": message.notice, "source": message.source, "grace_s": message.grace_s}
    ctx.log("termination.notice", detail, host=name)
    host.preemption_grace_s, host.lost = message.grace_s, False
    all_leave = all(host.preemption_grace_s is not None for host in state.hosts.values() if host.connected)
    if isinstance(phase, Held) and all_leave:
        flush_and_finish(ctx, "failed", phase.exit_code, phase.reason)  # no host is left to be held
        return
    if isinstance(phase, Running) and name in ctx.members():
        wait_s = min(ctx.settings.gather_notices_s, message.grace_s / 10)
        state.alarms.setdefault(ALARM, ctx.now_ns + int(wait_s * SECOND_NS))
    else:
        judge(ctx)


def judge(ctx: SupervisorContext) -> None:
    """Each host of the attempt that will leave is an incident; the first decision may already cover all."""
    state = ctx.state
    for name in ctx.members():
        host = state.hosts[name]
        if host.preemption_grace_s is None or name not in ctx.members():
            continue
        if not isinstance(state.phase, Running | Draining | Waiting):
            return
        evidence = f"{name} will be taken away in {host.preemption_grace_s:.0f} s"
        report_incident(ctx, PREEMPTION_NOTICE, host=name, evidence=evidence)
