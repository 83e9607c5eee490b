"""The recovery state machine. Pure: inputs and a time in, effects out; no clock, no sockets, no sleep.

::

    STARTING -> RUN -> (DRAINING -> RUN)* -> ENDED       a healthy run, or one that recovers
    ADOPT -> RUN                                         a new supervisor found its ranks stepping
    DRAINING -> WAIT -> RUN                              too few hosts for a while
    RUN -> STOPPING -> ENDED                             asked to save and exit
    RUN -> DRAINING -> HELD_AFTER_FAILURE -> RUN         the user's own failure, hosts kept warm
    any -> FLUSH -> ENDED                                over without a save: hosts write what only memory holds

Every decision is logged before the first message that carries it out, and an attempt's number is used
once: a message of an older attempt changes nothing on the host that gets it. So a supervisor killed
between any two effects leaves a state from which the next one continues.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

from muster.core.incidents import CAPACITY, RANK_HANG
from muster.policy.cluster_state import Policy
from muster.supervise.recovery import error_history, final_flush, host_messages, preemption_notices
from muster.supervise.recovery.attempts import ask_to_save, await_answers, drain, start_attempt
from muster.supervise.recovery.context import SupervisorContext
from muster.supervise.recovery.final_flush import finish, flush_and_finish
from muster.supervise.recovery.hosts import adopt_failed, consider_growth, end_quarantine, host_down, host_up
from muster.supervise.recovery.incidents import report_incident
from muster.supervise.recovery.state import (
    SECOND_NS,
    Effect,
    FromHost,
    HostDown,
    HostUp,
    Input,
    Phase,
    RestartRequest,
    Settings,
    State,
    StopRequest,
    Tick,
)

#: Reports that are judged only once every host of the attempt has answered a new supervisor.
DEFERRED_KINDS = ("rank_exit", "rank_hang", "failed", "health")


class RecoveryStateMachine:
    """One run's supervisor, as a fold. Call ``handle`` with each input; call it with ``Tick`` at ``deadline_ns``."""

    def __init__(self, *, settings: Settings, policy: Policy, state: State | None = None) -> None:
        self._ctx = SupervisorContext(settings=settings, policy=policy, state=state or State())

    @property
    def settings(self) -> Settings:
        return self._ctx.settings

    @property
    def state(self) -> State:
        return self._ctx.state

    @property
    def deadline_ns(self) -> int | None:
        """When ``Tick`` is due, if nothing happens before."""
        state = self._ctx.state
        own = [] if state.deadline_ns is None else [state.deadline_ns]
        return min([*own, *state.alarms.values()], default=None)

    def start(self, now_ns: int) -> list[Effect]:
        """The first effects, before any input."""
        ctx, settings = self._ctx, self._ctx.settings
        ctx.now_ns = now_ns
        if ctx.state.phase is Phase.STARTING:
            ctx.deadline(settings.spec.recovery.start_timeout_s)
            ctx.log("host.requested", {"count": settings.wanted_hosts + settings.spec.resources.spare_hosts})
        else:
            ctx.deadline(settings.adopt_timeout_s)
        for host in ctx.state.hosts.values():  # from ages to times of this clock
            host.failures_ns = [now_ns + age_ns for age_ns in host.failures_ns]
            if host.quarantined and host.hold_off_s:
                ctx.alarm(f"back:{host.name}", host.hold_off_s)
        return self._taken()

    def handle(self, given: Input, now_ns: int) -> list[Effect]:
        """Fold one input; return what is to be done, in order."""
        ctx, state = self._ctx, self._ctx.state
        ctx.now_ns = now_ns
        if state.phase is Phase.ENDED:
            return []
        handlers: dict[type, Callable[[Any], None]] = {
            HostUp: functools.partial(host_up, ctx),
            HostDown: functools.partial(host_down, ctx),
            FromHost: self._from_host,
            StopRequest: self._stop_request,
            RestartRequest: self._restart_request,
            Tick: self._tick,
        }
        adopting = state.phase is Phase.ADOPT
        handlers[type(given)](given)
        if adopting and ctx.state.phase is not Phase.ADOPT:
            self._adopted()
        if state.asked is not None and ctx.state.phase not in (Phase.ADOPT, Phase.ENDED):
            asked, state.asked = state.asked, None
            self._stop_request(asked)
        return self._taken()

    def _adopted(self) -> None:
        """It is known whether the attempt continues: judge, in their order, the reports that were deferred."""
        ctx, state = self._ctx, self._ctx.state
        deferred, state.deferred = state.deferred, []
        for given in deferred:
            if state.phase is not Phase.ENDED:
                self._from_host(given)
        if state.phase is Phase.RUN and state.stepped and not state.exited and state.asked is None:
            consider_growth(ctx)
        leaving = any(host.preemption_grace_s is not None for host in state.hosts.values())
        if state.phase is not Phase.ENDED and leaving:
            at_ns = ctx.now_ns + int(ctx.settings.gather_notices_s * SECOND_NS)
            state.alarms.setdefault(preemption_notices.ALARM, at_ns)

    def _from_host(self, given: FromHost) -> None:
        """A message of a host's agent. Kinds that are not known (of a later version) are ignored."""
        host = self._ctx.state.hosts.get(given.host)
        kind = str(given.message.get("t"))
        handler = host_messages.HANDLERS.get(kind)
        if host is None or handler is None:
            return
        if self._ctx.state.phase is Phase.ADOPT and kind in DEFERRED_KINDS:
            self._ctx.state.deferred.append(given)
        else:
            handler(self._ctx, host, given.message)

    def _stop_request(self, given: StopRequest) -> None:
        ctx, state = self._ctx, self._ctx.state
        outcome = "preempted" if given.exit_code == 75 else "stopped"
        if state.phase is Phase.ADOPT and not given.force:
            state.asked = given  # hosts that have not answered yet must hear of it too
            return
        again, state.stop_asked = state.stop_asked or given.force, True
        if state.phase is Phase.FLUSH:
            if again:
                final_flush.finish_unsaved(ctx, f"{given.source}: left at once")
            return
        if given.force or (again and state.phase is Phase.STOPPING):
            finish(ctx, outcome, given.exit_code, f"{given.source}: left at once, the newest checkpoint remains")
            return
        if state.phase is Phase.STOPPING:
            return  # the ranks are saving already
        grace_s = ctx.settings.spec.recovery.grace_s
        notice = {"notice": "stop", "source": given.source, "grace_s": grace_s}
        ctx.log("termination.notice", {**notice, "exit_code": given.exit_code, "save": given.save}, sync=True)
        state.stop, state.stop_source = (outcome, given.exit_code), given.source
        if state.phase is Phase.HELD_AFTER_FAILURE and state.final_result is not None:
            flush_and_finish(ctx, "failed", *state.final_result)
        elif state.phase is not Phase.RUN:
            end = flush_and_finish if given.save else finish
            end(ctx, outcome, given.exit_code, f"{given.source} before training continued")
        else:
            ask_to_save(ctx, outcome, given.exit_code, source=given.source, save=given.save)

    def _restart_request(self, given: RestartRequest) -> None:
        ctx, state = self._ctx, self._ctx.state
        if state.phase is not Phase.HELD_AFTER_FAILURE:
            return
        ctx.settings = given.settings
        ctx.policy = given.policy or ctx.policy
        error_history.forget(state)
        for host in state.hosts.values():
            host.start_failed = False  # the file may have been the reason
        state.committed_step = 0  # the corrected file may name another folder
        state.target = ctx.usable()[: ctx.settings.wanted_hosts]
        state.open = None
        ctx.log("run.restarted", {"reason": "restarted by the user with a corrected run file"})
        for name in state.target:
            ctx.send(name, {"t": "reload"})
        drain(ctx)

    def _tick(self, _: Tick) -> None:
        ctx, state = self._ctx, self._ctx.state
        for alarm in [name for name, at_ns in state.alarms.items() if at_ns <= ctx.now_ns]:
            del state.alarms[alarm]
            kind, _colon, host = alarm.partition(":")
            if kind == preemption_notices.ALARM:
                preemption_notices.judge(ctx)
            elif host in state.hosts:
                end_quarantine(ctx, host)
        if state.deadline_ns is not None and ctx.now_ns >= state.deadline_ns and state.phase in _DEADLINES:
            state.deadline_ns = None
            _DEADLINES[state.phase](ctx)

    def _taken(self) -> list[Effect]:
        effects, self._ctx.effects = self._ctx.effects, []
        return effects


# ---------------------------------------------------------------- deadlines, by phase


def _start_deadline(ctx: SupervisorContext) -> None:
    ctx.state.target = ready = ctx.usable()
    if len(ready) >= ctx.settings.min_hosts:
        start_attempt(ctx)
    else:
        evidence = f"{len(ready)} of {ctx.settings.min_hosts} hosts were ready in time"
        report_incident(ctx, CAPACITY, evidence=evidence)


def _run_deadline(ctx: SupervisorContext) -> None:
    if ctx.state.resizing:
        drain(ctx)
    elif not ctx.state.stepped:
        evidence = f"no step within start_timeout_s={ctx.settings.spec.recovery.start_timeout_s:g} s"
        report_incident(ctx, RANK_HANG, evidence=evidence)


def _drain_deadline(ctx: SupervisorContext) -> None:
    late = sorted(name for name in ctx.state.draining if ctx.state.hosts[name].answer_by_ns <= ctx.now_ns)
    for name in late:
        ctx.state.hosts[name].drain_timed_out = ctx.state.hosts[name].ready
        host_down(ctx, HostDown(host=name, reason="did not end its ranks in time"))
    await_answers(ctx)


def _stop_deadline(ctx: SupervisorContext) -> None:
    outcome, code = ctx.state.stop or ("stopped", 130)
    reason = f"not saved within {ctx.settings.spec.recovery.grace_s:g} s; the newest checkpoint remains"
    end = flush_and_finish if ctx.state.stop_saves else finish
    end(ctx, outcome, code, reason)


def _hold_deadline(ctx: SupervisorContext) -> None:
    code, reason = ctx.state.final_result or (1, "failed")
    flush_and_finish(ctx, "failed", code, reason)


_DEADLINES: Mapping[Phase, Callable[[SupervisorContext], None]] = {
    Phase.STARTING: _start_deadline,
    Phase.ADOPT: adopt_failed,
    Phase.RUN: _run_deadline,
    Phase.DRAINING: _drain_deadline,
    Phase.WAIT: lambda ctx: report_incident(ctx, CAPACITY, evidence="too few hosts"),
    Phase.STOPPING: _stop_deadline,
    Phase.HELD_AFTER_FAILURE: _hold_deadline,
    Phase.FLUSH: final_flush.on_deadline,
}
