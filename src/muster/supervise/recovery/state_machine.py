"""The recovery state machine. Pure: inputs and a time in, effects out; no clock, no sockets, no sleep.

::

    BOOT -> RUN -> (COLLECT -> RUN)* -> ENDED        a healthy or a healed run
    ADOPT -> RUN                                     a new supervisor found its ranks stepping
    COLLECT -> WAIT -> RUN                           too few hosts for a while
    RUN -> STOPPING -> ENDED                         asked to save and leave
    RUN -> COLLECT -> HOLD -> RUN                    the user's own failure, hosts kept warm
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
    begin,
    collect,
    collected_all,
    memory_moved,
    overdue,
)
from muster.supervise.recovery.context import Context
from muster.supervise.recovery.final_flush import finish, leave
from muster.supervise.recovery.hosts import (
    adopt_failed,
    answered_late,
    held_off_long_enough,
    host_down,
    host_ready,
    host_up,
    look_for_growth,
    start_failed_aside,
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
        self._c = Context(settings=settings, policy=policy, state=state or State())

    @property
    def settings(self) -> Settings:
        return self._c.settings

    @property
    def state(self) -> State:
        return self._c.state

    @property
    def deadline_ns(self) -> int | None:
        """When ``Tick`` is due, if nothing happens before."""
        state = self._c.state
        own = [] if state.deadline_ns is None else [state.deadline_ns]
        return min([*own, *state.alarms.values()], default=None)

    def start(self, now_ns: int) -> list[Effect]:
        """The first effects, before any input."""
        self._c.now_ns = now_ns
        if self._c.state.phase is Phase.BOOT:
            self._c.deadline(self._c.settings.spec.recovery.start_timeout_s)
            self._c.log(
                "host.requested", {"count": self._c.settings.wanted_hosts + self._c.settings.spec.resources.spare_hosts}
            )
        else:
            self._c.deadline(self._c.settings.adopt_timeout_s)
        for host in self._c.state.hosts.values():  # times in a log are not this clock's: what counts begins anew
            host.failures_ns = [now_ns + age_ns for age_ns in host.failures_ns]
            if host.quarantined and host.hold_off_s:
                self._c.alarm(f"back:{host.name}", host.hold_off_s)
        return self._taken()

    def handle(self, given: Input, now_ns: int) -> list[Effect]:
        """Fold one input; return what is to be done, in order."""
        self._c.now_ns = now_ns
        if self._c.state.phase is Phase.ENDED:
            return []
        handlers: dict[type, Callable[[Any], None]] = {
            HostUp: functools.partial(host_up, self._c),
            HostDown: functools.partial(host_down, self._c),
            FromHost: self._from_host,
            StopRequest: self._stop_request,
            RestartRequest: self._restart_request,
            Tick: self._tick,
        }
        adopting = self._c.state.phase is Phase.ADOPT
        handlers[type(given)](given)
        if adopting and self._c.state.phase is not Phase.ADOPT:
            self._catch_up()
        asked = self._c.state.asked
        if asked is not None and self._c.state.phase not in (Phase.ADOPT, Phase.ENDED):
            self._c.state.asked = None
            self._stop_request(asked)
        return self._taken()

    def _catch_up(self) -> None:
        """It is known whether the attempt goes on: judge what was reported, in its order, before it was."""
        state = self._c.state
        deferred, state.deferred = state.deferred, []
        for given in deferred:
            if state.phase is not Phase.ENDED:
                self._from_host(given)
        if state.phase is Phase.RUN and state.stepped and not state.exited and state.asked is None:
            look_for_growth(self._c)
        if state.phase is not Phase.ENDED and any(host.going_s is not None for host in state.hosts.values()):
            state.alarms.setdefault(preemption_notices.ALARM, self._c.now_ns + int(self._c.settings.gather_notices_s * SECOND_NS))

    def _from_host(self, given: FromHost) -> None:
        message = given.message
        host = self._c.state.hosts.get(given.host)
        if host is None:
            return
        kind = message.get("t")
        if self._c.state.phase is Phase.ADOPT and kind in JUDGED_LATER:
            self._c.state.deferred.append(given)
        elif kind == "ready":
            host_ready(self._c, host, message)
        elif kind == "memory":
            memory_moved(self._c, host, (str(message["memory"][0]), int(message["memory"][1])))
        elif kind == "progress":
            self._progress(message)
        elif kind == "store":
            host.store = (str(message["store"][0]), int(message["store"][1]))
        elif kind == "event":
            self._event(given.host, message["event"])
        elif kind == "rank_exit":
            rank_exit(self._c, given.host, message)
        elif kind == "rank_hang" and message["attempt"] == self._c.state.attempt and self._c.state.phase is Phase.RUN:
            incident(
                self._c,
                RANK_HANG,
                host=given.host,
                rank=message.get("rank"),
                evidence=str(message["evidence"]),
                silent_s=float(message.get("silent_s", 0.0)),
            )
        elif kind == "collected" and host.slow and not host.connected:
            answered_late(self._c, host, message)
        elif kind == "collected" and message["attempt"] >= self._c.state.attempt:
            host.snapshots = list(message["snapshots"])
            host.kept = {int(rank): int(step) for rank, step in message.get("kept", {}).items()}
            host.alive = {}
            reset = message.get("reset")
            if reset is not None and not reset["ok"]:
                evidence = f"{given.host}: its GPUs could not be reset: {reset['evidence']}"
                incident(self._c, HOST_UNHEALTHY, host=given.host, evidence=evidence)
            final_flush.left(self._c, given.host)
            if given.host in self._c.state.collecting:
                self._c.state.collecting.discard(given.host)
                collected_all(self._c)
        elif kind == "store_lost":
            host.store = None
        elif kind in ("flushed", "flush_committed"):
            final_flush.answered(self._c, given.host, message)
        elif kind == "failed":
            self._start_failed(given.host, message)
        elif kind == "notice":
            preemption_notices.noticed(self._c, given.host, message)
        elif kind == "health":
            self._unhealthy(given.host, message)

    def _progress(self, message: Mapping[str, Any]) -> None:
        """Ranks that have not stepped yet are at something long and alive: the time to the first step begins anew."""
        state = self._c.state
        if message["attempt"] == state.attempt and state.phase is Phase.RUN and not state.stepped:
            self._c.deadline(self._c.settings.spec.recovery.start_timeout_s)  # a script that says so can speak

    def _event(self, host: str, event: Mapping[str, Any]) -> None:
        if event.get("kind") == "checkpoint.committed":
            self._c.state.committed(event)
        elif event.get("kind") == "checkpoint.failed":
            self._c.state.save_failed = str((event.get("detail") or {}).get("reason", ""))
        if event.get("kind") != "step" or event.get("attempt") != self._c.state.attempt:
            return
        step = int(event["step"])
        state = self._c.state
        first, state.stepped = not state.stepped, True
        state.took(event.get("detail") or {}, first=first)
        if state.phase is Phase.RUN and not state.resizing:
            state.deadline_ns = None
        elif state.phase is Phase.RUN:
            extend_resize_deadline(self._c)
        if step > state.last_applied_step:
            self._advanced(step)
        if first and state.phase is Phase.RUN:
            look_for_growth(self._c)

    def _advanced(self, step: int) -> None:
        """A step beyond all that were applied before: whatever went wrong has been overcome."""
        state = self._c.state
        redone_from = state.open.last_applied_step if state.open else 0
        state.last_applied_step = step
        state.restarts_without_progress = 0
        if state.open is not None and "started" not in state.open.stages_ns:
            state.open.last_applied_step = step  # of the attempt that ends: heard late, applied all the same
        elif state.open is not None and state.phase is Phase.RUN:
            found = state.open
            found.stages_ns["first_step"] = self._c.now_ns - found.detected_ns
            resumed = found.stages_ns.pop("resume_step", redone_from)
            self._c.log(
                "incident.resolved",
                {
                    "incident_id": found.incident_id,
                    "lost_ns": self._c.now_ns - found.detected_ns,
                    "redone_steps": max(0, redone_from - resumed),
                    "stages_ns": dict(found.stages_ns),
                },
                step=step,
            )
            state.open = None

    def _start_failed(self, host: str, message: Mapping[str, Any]) -> None:
        """An agent could not prepare: bad data, a missing library, no memory for a fork server."""
        state = self._c.state
        if start_failed_aside(self._c, host, str(message["reason"])):
            return
        if state.phase in (Phase.BOOT, Phase.RUN, Phase.WAIT):
            incident(
                self._c,
                START_UP,
                host=host,
                evidence=str(message["reason"]),
                detail={"exit_code": int(message.get("exit_code", 1)), "hint": message.get("hint")},
            )

    def _unhealthy(self, name: str, message: Mapping[str, Any]) -> None:
        """A health check's word on a host: what is wrong, and which GPUs a reset may heal (none: it may not)."""
        host = self._c.state.hosts[name]
        host.resettable = tuple(int(gpu) for gpu in message.get("resettable", ()))
        if self._c.state.phase is Phase.RUN and name in self._c.state.active:
            try:
                traits = traits_of(str(message.get("kind", HOST_UNHEALTHY.kind)))
            except UsageError:  # of a package that only the host has
                traits = HOST_UNHEALTHY
            incident(self._c, traits, host=name, evidence=f"{name}: {message['evidence']}")

    def _stop_request(self, given: StopRequest) -> None:
        state = self._c.state
        outcome = "preempted" if given.exit_code == 75 else "stopped"
        if state.phase is Phase.ADOPT and not given.force:
            state.asked = given  # hosts that have not answered yet must hear of it too
            return
        again, state.stop_asked = state.stop_asked or given.force, True
        if state.phase is Phase.FLUSH:
            if again:
                final_flush.skip(self._c, f"{given.source}: left at once")
            return
        if given.force or (again and state.phase is Phase.STOPPING):
            finish(self._c, outcome, given.exit_code, f"{given.source}: left at once, the newest checkpoint stands")
            return
        if state.phase is Phase.STOPPING:
            return  # they save and leave already
        grace_s = self._c.settings.spec.recovery.grace_s
        asked = {"exit_code": given.exit_code, "save": given.save}
        self._c.log("termination.notice", {"notice": "stop", "source": given.source, "grace_s": grace_s, **asked}, sync=True)
        state.stop, state.stop_source = (outcome, given.exit_code), given.source
        if state.phase is Phase.HOLD and state.verdict is not None:
            leave(self._c, "failed", state.verdict[0], state.verdict[1])
        elif state.phase is not Phase.RUN:
            end = leave if given.save else finish
            end(self._c, outcome, given.exit_code, f"{given.source} before training went on")
        else:
            ask_to_save(self._c, outcome, given.exit_code, source=given.source, save=given.save)

    def _restart_request(self, given: RestartRequest) -> None:
        if self._c.state.phase is not Phase.HOLD:
            return
        self._c.settings = given.settings
        self._c.policy = given.policy or self._c.policy
        error_history.forget(self._c.state)
        for host in self._c.state.hosts.values():
            host.cannot_start = False  # the file may have been the reason
        self._c.state.committed_step = 0  # the corrected file may name another folder
        self._c.state.target = self._c.usable()[: self._c.settings.wanted_hosts]
        self._c.state.open = None
        self._c.log("run.restarted", {"reason": "restarted by the user with a corrected run file"})
        for name in self._c.state.target:
            self._c.send(name, {"t": "reload"})
        collect(self._c)

    def _tick(self, _: Tick) -> None:
        state = self._c.state
        for alarm in [name for name, at_ns in state.alarms.items() if at_ns <= self._c.now_ns]:
            del state.alarms[alarm]
            what, _colon, host = alarm.partition(":")
            if what == preemption_notices.ALARM:
                preemption_notices.judge(self._c)
            elif host in state.hosts:
                held_off_long_enough(self._c, host)
        if state.phase is Phase.ENDED or state.deadline_ns is None or self._c.now_ns < state.deadline_ns:
            return
        state.deadline_ns = None
        if state.phase is Phase.BOOT:
            ready = self._c.usable()
            self._c.state.target = ready
            if len(ready) >= self._c.settings.min_hosts:
                begin(self._c)
            else:
                incident(
                    self._c,
                    CAPACITY,
                    evidence=f"{len(ready)} of {self._c.settings.min_hosts} hosts were ready in time",
                )
        elif state.phase is Phase.ADOPT:
            adopt_failed(self._c)
        elif state.phase is Phase.RUN and state.resizing:
            collect(self._c)
        elif state.phase is Phase.RUN and not state.stepped:
            incident(
                self._c,
                RANK_HANG,
                evidence=f"no step within start_timeout_s={self._c.settings.spec.recovery.start_timeout_s:g} s",
            )
        elif state.phase is Phase.COLLECT:
            for name in overdue(self._c):
                state.hosts[name].slow = state.hosts[name].ready
                host_down(self._c, HostDown(host=name, why="did not end its ranks in time"))
            await_answers(self._c)
        elif state.phase is Phase.WAIT:
            incident(self._c, CAPACITY, evidence="too few hosts")
        elif state.phase is Phase.STOPPING:
            outcome, code = state.stop or ("stopped", 130)
            text = f"not saved within {self._c.settings.spec.recovery.grace_s:g} s; the newest checkpoint stands"
            end = leave if state.stop_saves else finish
            end(self._c, outcome, code, text)
        elif state.phase is Phase.HOLD:
            code, reason = state.verdict or (1, "failed")
            leave(self._c, "failed", code, reason)
        elif state.phase is Phase.FLUSH:
            final_flush.overdue(self._c)

    def _taken(self) -> list[Effect]:
        effects, self._c.effects = self._c.effects, []
        return effects
