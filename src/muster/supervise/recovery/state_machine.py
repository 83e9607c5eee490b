"""The recovery state machine. Pure: inputs and a time in, effects out; no clock, no sockets, no sleep.

::

    STARTING -> RUN -> (DRAINING -> RUN)* -> ENDED        a healthy or a healed run
    ADOPT -> RUN                                     a new supervisor found its ranks stepping
    DRAINING -> WAIT -> RUN                           too few hosts for a while
    RUN -> STOPPING -> ENDED                         asked to save and leave
    RUN -> DRAINING -> HELD_AFTER_FAILURE -> RUN                    the user's own failure, hosts kept warm
    any -> FLUSH -> ENDED                            over without a save: hosts write what only memory holds

Every decision is logged before the first message that carries it out, and an attempt's number is used
once: a message of an older attempt changes nothing on the host that gets it. So a supervisor killed
between any two effects leaves a state from which the next one goes on.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

from muster.core.errors import UsageError
from muster.core.incidents import CAPACITY, HOST_UNHEALTHY, RANK_HANG, START_UP, traits_of
from muster.policy.cluster_state import Policy
from muster.supervise.recovery import error_history, final_flush, preemption_notices
from muster.supervise.recovery.attempts import (
    ask_to_save,
    await_answers,
    drain,
    on_replicator_address,
    overdue,
    start_attempt,
    start_when_drained,
)
from muster.supervise.recovery.context import SupervisorContext
from muster.supervise.recovery.final_flush import finish, flush_and_finish
from muster.supervise.recovery.hosts import (
    adopt_failed,
    consider_growth,
    end_quarantine,
    host_down,
    host_ready,
    host_up,
    rejoin_after_timeout,
    set_aside,
)
from muster.supervise.recovery.incidents import extend_resize_deadline, incident
from muster.supervise.recovery.rank_exits import rank_exit
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

#: Reports that say nothing before every host of the attempt has answered a new supervisor.
JUDGED_LATER = ("rank_exit", "rank_hang", "failed", "health")


class RecoveryStateMachine:
    """One run's supervisor, as a fold. Call ``handle`` with each input; wake it at ``deadline_ns``."""

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
        self._ctx.now_ns = now_ns
        if self._ctx.state.phase is Phase.STARTING:
            self._ctx.deadline(self._ctx.settings.spec.recovery.start_timeout_s)
            self._ctx.log(
                "host.requested",
                {"count": self._ctx.settings.wanted_hosts + self._ctx.settings.spec.resources.spare_hosts},
            )
        else:
            self._ctx.deadline(self._ctx.settings.adopt_timeout_s)
        for host in self._ctx.state.hosts.values():  # times in a log are not this clock's: what counts begins anew
            host.failures_ns = [now_ns + age_ns for age_ns in host.failures_ns]
            if host.quarantined and host.hold_off_s:
                self._ctx.alarm(f"back:{host.name}", host.hold_off_s)
        return self._taken()

    def handle(self, given: Input, now_ns: int) -> list[Effect]:
        """Fold one input; return what is to be done, in order."""
        self._ctx.now_ns = now_ns
        if self._ctx.state.phase is Phase.ENDED:
            return []
        handlers: dict[type, Callable[[Any], None]] = {
            HostUp: functools.partial(host_up, self._ctx),
            HostDown: functools.partial(host_down, self._ctx),
            FromHost: self._from_host,
            StopRequest: self._stop_request,
            RestartRequest: self._restart_request,
            Tick: self._tick,
        }
        adopting = self._ctx.state.phase is Phase.ADOPT
        handlers[type(given)](given)
        if adopting and self._ctx.state.phase is not Phase.ADOPT:
            self._catch_up()
        asked = self._ctx.state.asked
        if asked is not None and self._ctx.state.phase not in (Phase.ADOPT, Phase.ENDED):
            self._ctx.state.asked = None
            self._stop_request(asked)
        return self._taken()

    def _catch_up(self) -> None:
        """It is known whether the attempt goes on: judge what was reported, in its order, before it was."""
        state = self._ctx.state
        deferred, state.deferred = state.deferred, []
        for given in deferred:
            if state.phase is not Phase.ENDED:
                self._from_host(given)
        if state.phase is Phase.RUN and state.stepped and not state.exited and state.asked is None:
            consider_growth(self._ctx)
        if state.phase is not Phase.ENDED and any(host.preemption_grace_s is not None for host in state.hosts.values()):
            state.alarms.setdefault(
                preemption_notices.ALARM, self._ctx.now_ns + int(self._ctx.settings.gather_notices_s * SECOND_NS)
            )

    def _from_host(self, given: FromHost) -> None:
        message = given.message
        host = self._ctx.state.hosts.get(given.host)
        if host is None:
            return
        kind = message.get("t")
        if self._ctx.state.phase is Phase.ADOPT and kind in JUDGED_LATER:
            self._ctx.state.deferred.append(given)
        elif kind == "ready":
            host_ready(self._ctx, host, message)
        elif kind == "memory":
            on_replicator_address(self._ctx, host, (str(message["memory"][0]), int(message["memory"][1])))
        elif kind == "progress":
            self._progress(message)
        elif kind == "store":
            host.store = (str(message["store"][0]), int(message["store"][1]))
        elif kind == "event":
            self._event(given.host, message["event"])
        elif kind == "rank_exit":
            rank_exit(self._ctx, given.host, message)
        elif (
            kind == "rank_hang" and message["attempt"] == self._ctx.state.attempt and self._ctx.state.phase is Phase.RUN
        ):
            incident(
                self._ctx,
                RANK_HANG,
                host=given.host,
                rank=message.get("rank"),
                evidence=str(message["evidence"]),
                silent_s=float(message.get("silent_s", 0.0)),
            )
        elif kind == "collected" and host.drain_timed_out and not host.connected:
            rejoin_after_timeout(self._ctx, host, message)
        elif kind == "collected" and message["attempt"] >= self._ctx.state.attempt:
            host.snapshots = list(message["snapshots"])
            host.retained = {int(rank): int(step) for rank, step in message.get("kept", {}).items()}
            host.alive = {}
            reset = message.get("reset")
            if reset is not None and not reset["ok"]:
                evidence = f"{given.host}: its GPUs could not be reset: {reset['evidence']}"
                incident(self._ctx, HOST_UNHEALTHY, host=given.host, evidence=evidence)
            final_flush.left(self._ctx, given.host)
            if given.host in self._ctx.state.draining:
                self._ctx.state.draining.discard(given.host)
                start_when_drained(self._ctx)
        elif kind == "store_lost":
            host.store = None
        elif kind in ("flushed", "flush_committed"):
            final_flush.answered(self._ctx, given.host, message)
        elif kind == "failed":
            self._start_failed(given.host, message)
        elif kind == "notice":
            preemption_notices.noticed(self._ctx, given.host, message)
        elif kind == "health":
            self._unhealthy(given.host, message)

    def _progress(self, message: Mapping[str, Any]) -> None:
        """Ranks that have not stepped yet are at something long and alive: the time to the first step begins anew."""
        state = self._ctx.state
        if message["attempt"] == state.attempt and state.phase is Phase.RUN and not state.stepped:
            self._ctx.deadline(self._ctx.settings.spec.recovery.start_timeout_s)  # a script that says so can speak

    def _event(self, host: str, event: Mapping[str, Any]) -> None:
        if event.get("kind") == "checkpoint.committed":
            self._ctx.state.committed(event)
        elif event.get("kind") == "checkpoint.failed":
            self._ctx.state.save_failed = str((event.get("detail") or {}).get("reason", ""))
        if event.get("kind") != "step" or event.get("attempt") != self._ctx.state.attempt:
            return
        step = int(event["step"])
        state = self._ctx.state
        first, state.stepped = not state.stepped, True
        state.took(event.get("detail") or {}, first=first)
        if state.phase is Phase.RUN and not state.resizing:
            state.deadline_ns = None
        elif state.phase is Phase.RUN:
            extend_resize_deadline(self._ctx)
        if step > state.last_applied_step:
            self._advanced(step)
        if first and state.phase is Phase.RUN:
            consider_growth(self._ctx)

    def _advanced(self, step: int) -> None:
        """A step beyond all that were applied before: whatever went wrong has been overcome."""
        state = self._ctx.state
        redone_from = state.open.last_applied_step if state.open else 0
        state.last_applied_step = step
        state.restarts_without_progress = 0
        if state.open is not None and "started" not in state.open.stages_ns:
            state.open.last_applied_step = step  # of the attempt that ends: heard late, applied all the same
        elif state.open is not None and state.phase is Phase.RUN:
            found = state.open
            found.stages_ns["first_step"] = self._ctx.now_ns - found.detected_ns
            resumed = found.stages_ns.pop("resume_step", redone_from)
            self._ctx.log(
                "incident.resolved",
                {
                    "incident_id": found.incident_id,
                    "lost_ns": self._ctx.now_ns - found.detected_ns,
                    "redone_steps": max(0, redone_from - resumed),
                    "stages_ns": dict(found.stages_ns),
                },
                step=step,
            )
            state.open = None

    def _start_failed(self, host: str, message: Mapping[str, Any]) -> None:
        """An agent could not prepare: bad data, a missing library, no memory for a fork server."""
        state = self._ctx.state
        if set_aside(self._ctx, host, str(message["reason"])):
            return
        if state.phase in (Phase.STARTING, Phase.RUN, Phase.WAIT):
            incident(
                self._ctx,
                START_UP,
                host=host,
                evidence=str(message["reason"]),
                detail={"exit_code": int(message.get("exit_code", 1)), "hint": message.get("hint")},
            )

    def _unhealthy(self, name: str, message: Mapping[str, Any]) -> None:
        """A health check's word on a host: what is wrong, and which GPUs a reset may heal (none: it may not)."""
        host = self._ctx.state.hosts[name]
        host.resettable = tuple(int(gpu) for gpu in message.get("resettable", ()))
        if self._ctx.state.phase is Phase.RUN and name in self._ctx.state.active:
            try:
                traits = traits_of(str(message.get("kind", HOST_UNHEALTHY.kind)))
            except UsageError:  # of a package that only the host has
                traits = HOST_UNHEALTHY
            incident(self._ctx, traits, host=name, evidence=f"{name}: {message['evidence']}")

    def _stop_request(self, given: StopRequest) -> None:
        state = self._ctx.state
        outcome = "preempted" if given.exit_code == 75 else "stopped"
        if state.phase is Phase.ADOPT and not given.force:
            state.asked = given  # hosts that have not answered yet must hear of it too
            return
        again, state.stop_asked = state.stop_asked or given.force, True
        if state.phase is Phase.FLUSH:
            if again:
                final_flush.skip(self._ctx, f"{given.source}: left at once")
            return
        if given.force or (again and state.phase is Phase.STOPPING):
            finish(self._ctx, outcome, given.exit_code, f"{given.source}: left at once, the newest checkpoint stands")
            return
        if state.phase is Phase.STOPPING:
            return  # they save and leave already
        grace_s = self._ctx.settings.spec.recovery.grace_s
        asked = {"exit_code": given.exit_code, "save": given.save}
        self._ctx.log(
            "termination.notice", {"notice": "stop", "source": given.source, "grace_s": grace_s, **asked}, sync=True
        )
        state.stop, state.stop_source = (outcome, given.exit_code), given.source
        if state.phase is Phase.HELD_AFTER_FAILURE and state.final_result is not None:
            flush_and_finish(self._ctx, "failed", state.final_result[0], state.final_result[1])
        elif state.phase is not Phase.RUN:
            end = flush_and_finish if given.save else finish
            end(self._ctx, outcome, given.exit_code, f"{given.source} before training went on")
        else:
            ask_to_save(self._ctx, outcome, given.exit_code, source=given.source, save=given.save)

    def _restart_request(self, given: RestartRequest) -> None:
        if self._ctx.state.phase is not Phase.HELD_AFTER_FAILURE:
            return
        self._ctx.settings = given.settings
        self._ctx.policy = given.policy or self._ctx.policy
        error_history.forget(self._ctx.state)
        for host in self._ctx.state.hosts.values():
            host.start_failed = False  # the file may have been the reason
        self._ctx.state.committed_step = 0  # the corrected file may name another folder
        self._ctx.state.target = self._ctx.usable()[: self._ctx.settings.wanted_hosts]
        self._ctx.state.open = None
        self._ctx.log("run.restarted", {"reason": "restarted by the user with a corrected run file"})
        for name in self._ctx.state.target:
            self._ctx.send(name, {"t": "reload"})
        drain(self._ctx)

    def _tick(self, _: Tick) -> None:
        state = self._ctx.state
        for alarm in [name for name, at_ns in state.alarms.items() if at_ns <= self._ctx.now_ns]:
            del state.alarms[alarm]
            what, _colon, host = alarm.partition(":")
            if what == preemption_notices.ALARM:
                preemption_notices.judge(self._ctx)
            elif host in state.hosts:
                end_quarantine(self._ctx, host)
        if state.phase is Phase.ENDED or state.deadline_ns is None or self._ctx.now_ns < state.deadline_ns:
            return
        state.deadline_ns = None
        if state.phase is Phase.STARTING:
            ready = self._ctx.usable()
            self._ctx.state.target = ready
            if len(ready) >= self._ctx.settings.min_hosts:
                start_attempt(self._ctx)
            else:
                incident(
                    self._ctx,
                    CAPACITY,
                    evidence=f"{len(ready)} of {self._ctx.settings.min_hosts} hosts were ready in time",
                )
        elif state.phase is Phase.ADOPT:
            adopt_failed(self._ctx)
        elif state.phase is Phase.RUN and state.resizing:
            drain(self._ctx)
        elif state.phase is Phase.RUN and not state.stepped:
            incident(
                self._ctx,
                RANK_HANG,
                evidence=f"no step within start_timeout_s={self._ctx.settings.spec.recovery.start_timeout_s:g} s",
            )
        elif state.phase is Phase.DRAINING:
            for name in overdue(self._ctx):
                state.hosts[name].drain_timed_out = state.hosts[name].ready
                host_down(self._ctx, HostDown(host=name, why="did not end its ranks in time"))
            await_answers(self._ctx)
        elif state.phase is Phase.WAIT:
            incident(self._ctx, CAPACITY, evidence="too few hosts")
        elif state.phase is Phase.STOPPING:
            outcome, code = state.stop or ("stopped", 130)
            text = f"not saved within {self._ctx.settings.spec.recovery.grace_s:g} s; the newest checkpoint stands"
            end = flush_and_finish if state.stop_saves else finish
            end(self._ctx, outcome, code, text)
        elif state.phase is Phase.HELD_AFTER_FAILURE:
            code, reason = state.final_result or (1, "failed")
            flush_and_finish(self._ctx, "failed", code, reason)
        elif state.phase is Phase.FLUSH:
            final_flush.overdue(self._ctx)

    def _taken(self) -> list[Effect]:
        effects, self._ctx.effects = self._ctx.effects, []
        return effects
