"""Stop requests of users and schedulers, and preemption notices of hosts."""

from __future__ import annotations

from muster.core.incidents import PREEMPTION_NOTICE
from muster.core.typed_json import JsonObject
from muster.protocol.to_supervisor import HostNotice
from muster.supervise.recovery import final_flush
from muster.supervise.recovery.attempts import ask_to_save
from muster.supervise.recovery.context import SupervisorContext
from muster.supervise.recovery.final_flush import finish, flush_and_finish
from muster.supervise.recovery.incidents import report_incident
from muster.supervise.recovery.inputs import SECOND_NS, StopRequest
from muster.supervise.recovery.phases import (
    Adopting,
    Draining,
    Flushing,
    Held,
    Running,
    Stopping,
    Waiting,
    ends_for_good,
)

NOTICES_ALARM = "notices"


def on_notice(ctx: SupervisorContext, name: str, message: HostNotice) -> None:
    """A host will be taken away. Ranks continue until it is known which other hosts leave with it."""
    state, phase, host = ctx.state, ctx.state.phase, ctx.state.hosts[name]
    detail: JsonObject = {"notice": message.notice, "source": message.source, "grace_s": message.grace_s}
    ctx.log("termination.notice", detail, host=name)
    host.notice.grace_s, host.notice.lost_since = message.grace_s, False
    all_leave = all(host.notice.grace_s is not None for host in state.hosts.values() if host.connected)
    if isinstance(phase, Held) and all_leave:
        flush_and_finish(ctx, "failed", phase.exit_code, phase.reason)  # no host is left to be held
        return
    if isinstance(phase, Running) and name in ctx.members():
        wait_s = min(ctx.settings.gather_notices_s, message.grace_s / 10)
        state.alarms.setdefault(NOTICES_ALARM, ctx.now_ns + int(wait_s * SECOND_NS))
    else:
        judge_notices(ctx)


def judge_notices(ctx: SupervisorContext) -> None:
    """Each host of the attempt that will leave is an incident; the first decision may already cover all."""
    state = ctx.state
    for name in ctx.members():
        host = state.hosts[name]
        if host.notice.grace_s is None or name not in ctx.members():
            continue
        if not isinstance(state.phase, Running | Draining | Waiting):
            return
        evidence = f"{name} will be taken away in {host.notice.grace_s:.0f} s"
        report_incident(ctx, PREEMPTION_NOTICE, host=name, evidence=evidence)


def on_stop(ctx: SupervisorContext, given: StopRequest) -> None:
    """A stop that is logged already: save, where there is something to save, and end."""
    phase = ctx.state.phase
    if isinstance(phase, Adopting) and not given.force:
        phase.asked = given  # hosts that have not answered yet must hear of it too
        if phase.alone:
            ctx.deadline(ctx.settings.adopt_timeout_s)
        return
    again = given.force
    if isinstance(phase, Stopping | Flushing):
        if ends_for_good(phase, given.exit_code) and not again:
            return  # it saves already
        again, phase.by_user = again or phase.by_user, True
    if isinstance(phase, Flushing):
        if again:
            final_flush.finish_unsaved(ctx, phase, f"{given.source}: left at once")
        return
    if again:
        finish(ctx, given.outcome, given.exit_code, f"{given.source}: left at once, the newest checkpoint remains")
        return
    if isinstance(phase, Stopping):
        return  # the ranks are saving already
    grace_s = ctx.settings.spec.recovery.grace_s
    notice: JsonObject = {
        "notice": "stop",
        "source": given.source,
        "grace_s": grace_s,
        "exit_code": given.exit_code,
        "save": given.save,
    }
    ctx.log("termination.notice", notice, sync=True)
    if isinstance(phase, Held):
        flush_and_finish(ctx, "failed", phase.exit_code, phase.reason, by_user=True)
    elif isinstance(phase, Running):
        stopping = Stopping(outcome=given.outcome, exit_code=given.exit_code, source=given.source, saves=given.save)
        stopping.by_user = True
        ask_to_save(ctx, stopping)
    elif given.save:
        flush_and_finish(ctx, given.outcome, given.exit_code, f"{given.source} before training continued", by_user=True)
    else:
        finish(ctx, given.outcome, given.exit_code, f"{given.source} before training continued")
