"""From an incident to the policy's decision, and from the decision to what is done."""

from __future__ import annotations

from collections.abc import Mapping

from muster.core.incidents import IncidentTraits, Repeats, counts_against_host
from muster.core.typed_json import INT64_MAX, Json, JsonObject
from muster.core.types import Action, Decision, Incident
from muster.policy.builtin import SHIPPED
from muster.policy.cluster_state import ClusterState
from muster.protocol.ranks import RESIZE_EXIT_CODE
from muster.protocol.to_agent import EndAttempt
from muster.protocol.values import CommandRanks
from muster.supervise.recovery.attempts import ask_to_save, drain, retainable_ranks, start_when_drained
from muster.supervise.recovery.context import SupervisorContext
from muster.supervise.recovery.final_flush import flush_and_finish
from muster.supervise.recovery.inputs import SECOND_NS
from muster.supervise.recovery.phases import Draining, Held, Resize, Running, Stopping, Waiting
from muster.supervise.recovery.state import OpenIncident, Quarantine, State

#: Ranks that were asked to exit for a resize and continue because a save is running have this long.
RESIZE_S = 300.0


def report_incident(
    ctx: SupervisorContext,
    traits: IncidentTraits,
    *,
    evidence: str,
    host: str | None = None,
    rank: int | None = None,
    step: int | None = None,
    detail: JsonObject | None = None,
    silent_s: float = 0.0,
) -> None:
    """Log an incident, ask the policy, log its decision, carry it out. ``silent_s``: how old the fault can be."""
    state, detail = ctx.state, detail or {}
    if silent_s > 0:
        detail = {**detail, "since_ns": ctx.now_ns - int(silent_s * SECOND_NS)}
    incident = Incident(
        incident_id=f"i{state.next_incident}",
        kind=traits.kind,
        attempt=state.attempt,
        step=step if step is not None else state.last_applied_step,
        host=host,
        rank=rank,
        evidence=evidence,
        detected_ns=ctx.now_ns,
        detail=detail,
    )
    state.next_incident += 1
    if host in state.hosts and counts_against_host(traits, detail.get("culprit")):
        since_ns = ctx.now_ns - int(ctx.settings.host_failure_window_s * SECOND_NS)
        state.hosts[host].failures_ns = [at for at in state.hosts[host].failures_ns if at > since_ns] + [ctx.now_ns]
    if rank is not None:
        state.progress.blamed.add(rank)
    identity: JsonObject = {"incident_id": incident.incident_id, "incident": traits.kind, "evidence": evidence}
    ctx.log("incident.detected", {**identity, **detail}, host=host, rank=rank, step=incident.step)
    key = error_key(state, traits, incident.step, detail, evidence)
    count_error(state, key, host)
    for name in readmit_suspects(state, key, host):
        ctx.log(
            "host.readmitted",
            {"reason": f"the error that quarantined {name} recurred on {host}", "cause": "recurred"},
            host=name,
        )
    decision = decide(ctx, incident, key)
    if "part_of" in detail and _changes_nothing(decision):
        return
    hosts = hosts_after(ctx, decision)
    _log_decision(ctx, decision, hosts)
    if decision.action is Action.IGNORE and detail.get("sound_step") is not None:
        state.saves.distrusted.pop(state.attempt, None)  # the ranks go on from what they have
    if decision.action is not Action.IGNORE:
        details = {**identity, **detail}
        state.open_incident(opened_by(details, host=host, at_ns=ctx.now_ns, step=state.last_applied_step))
    apply_decision(ctx, decision, incident, hosts, key)


def judge_fault(ctx: SupervisorContext, name: str) -> None:
    """What was last reported on a host that trains, or is about to: an incident."""
    host = ctx.state.hosts[name]
    if (fault := host.health.take_fault()) is None:
        return
    report_incident(ctx, fault.traits, host=name, evidence=f"{name}: {fault.evidence}", detail=fault.detail)


def start_unless_faulty(ctx: SupervisorContext) -> None:
    """Once every host has reported: judge what was reported on the next attempt's hosts meanwhile, then start it.

    Not earlier: a second order to end the ranks (with a reset) would be taken for answered by the first one's answer.
    """
    phase = ctx.state.phase
    if not isinstance(phase, Draining):
        return
    for name in phase.next.hosts[:]:
        if not phase.waiting and ctx.state.phase is phase and name in phase.next.hosts:
            judge_fault(ctx, name)
    start_when_drained(ctx)


def _changes_nothing(decision: Decision) -> bool:
    """Whether it is being carried out already, where the ranks are being replaced."""
    return decision.action in (Action.RESTART, Action.IGNORE) and not skipped_by(decision)


def opened_by(details: JsonObject, *, host: str | None, at_ns: int, step: int) -> OpenIncident:
    """``details``: those of ``incident.detected``; ``step``: the last that was applied."""
    return OpenIncident(
        incident_id=str(details["incident_id"]),
        kind=str(details["incident"]),
        detected_ns=at_ns,
        last_applied_step=step,
        secondary=bool(details.get("secondary")),
        host=host,
        counts=not details.get("snapshot_rejected"),
    )


def _log_decision(ctx: SupervisorContext, decision: Decision, hosts: list[str]) -> None:
    optional: dict[str, Json] = {"replacement": decision.replacement, "skip_steps": skipped_by(decision) or None}
    if decision.action not in (Action.IGNORE, Action.STOP):
        optional["hosts"] = hosts[:]
    if decision.action is Action.WAIT:
        optional["wait_for"] = waits_for(decision)
    required = {"incident_id": decision.incident_id, "action": decision.action.value, "reason": decision.reason}
    detail: JsonObject = {**required, **{key: value for key, value in optional.items() if value is not None}}
    ctx.log("incident.decided", detail, host=decision.host, sync=True)


def decide(ctx: SupervisorContext, incident: Incident, key: str | None) -> Decision:
    """The policy's decision; the default policy's, with a message, where it has none that could be carried out."""
    situation = cluster_state(ctx, key)
    try:
        decision = ctx.policy.decide(situation, incident)
        problem = decision_error(ctx, situation, incident, decision)
    except (Exception, SystemExit) as error:  # noqa: BLE001 (the user's code must not end the run)
        problem = f"{type(error).__name__}: {error}"
    if problem is None:
        return decision
    text = f"policy returned no valid decision for {incident.incident_id} ({problem[:300]}); using the default policy"
    ctx.log("run.message", {"text": text})
    return SHIPPED["default"].decide(situation, incident)


def decision_error(ctx: SupervisorContext, situation: ClusterState, incident: Incident, decision: object) -> str | None:
    """Why a decision cannot be carried out; None: it can."""
    if not isinstance(decision, Decision) or not isinstance(decision.action, Action):
        return f"decide returned {decision!r}, not a Decision"
    detail = decision.detail
    typed = isinstance(decision.reason, str) and isinstance(detail, Mapping) and type(decision.exit_code) is int
    if not typed or decision.incident_id != incident.incident_id:
        return "wrong field types, or an incident_id that does not match"
    if decision.host is not None and decision.host not in ctx.state.hosts:
        return f"{decision.host!r} is not a host of the run"
    if decision.action is Action.SWAP and decision.replacement not in situation.spares:
        return (
            f"replacement {decision.replacement!r} is not a spare ({', '.join(situation.spares) or 'there are none'})"
        )
    if decision.action is Action.IGNORE and not incident.traits.may_be_ignored:
        return f"training does not continue by itself after {incident.kind}"
    if decision.action is Action.WAIT and not str(detail.get("hosts", 0)).isdecimal():
        return f"it waits for {detail.get('hosts')!r} hosts, which is not a number"
    skips = detail.get("skip_steps", ())
    if not isinstance(skips, (list, tuple)) or not all(type(step) is int and 0 <= step <= INT64_MAX for step in skips):
        return f"skip_steps={skips!r} is not a list of steps"
    return None


def skipped_by(decision: Decision) -> list[int]:
    """Steps whose update it leaves out."""
    steps = decision.detail.get("skip_steps", ())
    return [step for step in steps if isinstance(step, int)] if isinstance(steps, (list, tuple)) else []


def cluster_state(ctx: SupervisorContext, key: str | None) -> ClusterState:
    """What the policy may look at. ``key``: the error, where it can recur (``error_key``)."""
    state, phase, members = ctx.state, ctx.state.phase, ctx.members()
    waiting_since_ns = phase.next.waiting_since_ns if isinstance(phase, Draining | Waiting) else None
    window_ns = int(ctx.settings.host_failure_window_s * SECOND_NS)
    return ClusterState(
        active=tuple(name for name in members if state.hosts[name].connected),
        spares=tuple(name for name in ctx.usable() if name not in members),
        wanted_hosts=ctx.settings.wanted_hosts,
        min_hosts=ctx.settings.min_hosts,
        last_applied_step=state.last_applied_step,
        restarts_without_progress=state.failures.without_progress,
        max_restarts_without_progress=ctx.settings.spec.recovery.max_restarts_without_progress,
        same_error_repeats=state.errors.counts.get(key or "", 0),
        same_error_hosts=len(state.errors.hosts.get(key or "", ())),
        on_nonfinite_step=ctx.settings.spec.recovery.on_nonfinite_step,
        skipped_steps=tuple(sorted(state.steps.skipped)),
        noticed=frozenset(name for name in members if state.hosts[name].notice.grace_s is not None),
        resettable=frozenset(name for name, host in state.hosts.items() if host.health.resettable and host.connected),
        host_failures={
            name: sum(at > ctx.now_ns - window_ns for at in host.failures_ns) for name, host in state.hosts.items()
        },
        waited_s=(ctx.now_ns - waiting_since_ns) / SECOND_NS if waiting_since_ns is not None else 0.0,
    )


def hosts_after(ctx: SupervisorContext, decision: Decision) -> list[str]:
    """The hosts of the next attempt, if this is carried out."""
    hosts, action = ctx.members(), decision.action
    if action in (Action.SWAP, Action.SHRINK, Action.WAIT) and decision.host in hosts:
        place = hosts.index(decision.host)
        hosts[place : place + 1] = [decision.replacement] if action is Action.SWAP and decision.replacement else []
    if action is Action.GROW and decision.host is not None:
        named = decision.detail.get("hosts")
        new = [str(name) for name in named] if isinstance(named, (list, tuple)) else [decision.host]
        usable = ctx.usable()
        hosts += [name for name in new if name in usable and name not in hosts]
    return hosts


def waits_for(decision: Decision) -> int:
    """Of a wait: the number of hosts; 0: the run's minimum."""
    return int(str(decision.detail.get("hosts", 0)))


def apply_decision(
    ctx: SupervisorContext, decision: Decision, incident: Incident, hosts: list[str], key: str | None
) -> None:
    """Carry out a logged decision, as far as is possible before the hosts answer. ``hosts``: of the next attempt."""
    state, action = ctx.state, decision.action
    if action is Action.IGNORE:
        return
    if action is Action.STOP:
        stop_run(ctx, decision, incident)
        return
    following = ctx.following()
    state.steps.skipped |= set(skipped_by(decision))
    if action in (Action.SWAP, Action.SHRINK, Action.WAIT) and decision.host in following.hosts:
        quarantine_host(ctx, decision.host, incident, key)
    if action is Action.RESET and decision.host is not None:
        state.reset_host(decision.host)
    following.hosts = hosts
    if action is Action.GROW and isinstance(state.phase, Running) and not retainable_ranks(ctx, hosts):
        request_resize(ctx, state.phase, hosts)
        return  # else the ranks keep their processes: the pause is the step they are in
    if action is Action.WAIT:
        following.waiting_since_ns = following.waiting_since_ns or ctx.now_ns
        following.needed = waits_for(decision)
    if not isinstance(state.phase, Draining) or (action is Action.RESET and not state.phase.waiting):
        drain(ctx, following)


def quarantine_host(ctx: SupervisorContext, name: str | None, incident: Incident, key: str | None) -> None:
    """Take a host out of the run: for good, for a while, or until it has left and rejoined."""
    host = ctx.state.hosts.get(name or "")
    if host is None or not host.connected:
        return
    extra: dict[str, Json] = {}
    host.quarantine = Quarantine()
    if incident.traits.announced:
        host.quarantine, extra["until_return"] = Quarantine(until_return=True), True
    elif incident.traits.quarantine_expires:
        for_s = extra["for_s"] = ctx.settings.host_failure_window_s
        host.quarantine = Quarantine(for_s=for_s)
        ctx.alarm(f"back:{host.name}", for_s)
    elif key is not None:
        host.quarantine, extra["quarantined_for_error"] = Quarantine(error=key), key
    reason = incident.evidence if extra else f"{len(host.failures_ns)} failures"
    ctx.log("host.quarantined", {"reason": reason, **extra}, host=host.name)
    ctx.send(host.name, EndAttempt(attempt=ctx.state.attempt, why="replaced"))


def request_resize(ctx: SupervisorContext, running: Running, hosts: list[str]) -> None:
    """Ask the ranks to exit after the current step, for an attempt on ``hosts``; nothing is recomputed.

    They continue until a running save has committed, so that growing costs no checkpoint. Each step extends the
    deadline by ``grace_s``; a step that takes longer is not worth waiting for, since more hosts are faster.
    """
    if running.resize is not None:
        return
    ctx.log("attempt.resizing", {"hosts": hosts[:]}, sync=True)
    running.resize = Resize(hosts=hosts, until_ns=ctx.now_ns + int(RESIZE_S * SECOND_NS))
    extend_resize_deadline(ctx, running.resize)
    for name in ctx.state.active:
        ctx.send(name, CommandRanks(kind="stop", save=False, exit_code=RESIZE_EXIT_CODE))


def extend_resize_deadline(ctx: SupervisorContext, resize: Resize) -> None:
    """Call it when ranks were asked to exit, and after each step they take since."""
    if ctx.now_ns < resize.until_ns:
        ctx.deadline(ctx.settings.spec.recovery.grace_s)


def end_of_held(ctx: SupervisorContext) -> EndAttempt:
    return EndAttempt(attempt=ctx.state.attempt, why="held after a failure")


def stop_run(ctx: SupervisorContext, decision: Decision, incident: Incident) -> None:
    """End the run; after an error that a corrected run file may fix, hold its hosts first."""
    hold_s = ctx.settings.spec.recovery.keep_hosts_after_failure_s
    hint, code = incident.detail.get("hint"), decision.exit_code
    reason = decision.reason + (f" (hint: {hint})" if hint else "")
    if incident.traits.announced and isinstance(ctx.state.phase, Running):
        ask_to_save(ctx, Stopping(outcome="preempted", exit_code=code, source=incident.evidence))
        return
    correctable = "signature" in incident.detail or incident.traits.user_error
    if hold_s > 0 and correctable and code != 75:
        ctx.log("run.held", {"exit_code": code, "reason": reason, "hold_s": hold_s}, sync=True)
        ctx.enter(Held(exit_code=code, reason=reason))
        ctx.deadline(hold_s)
        ctx.log("phase.changed", {"reason": decision.reason}, phase="hold")
        for name in ctx.state.active or list(ctx.state.hosts):
            ctx.send(name, end_of_held(ctx))
        return
    flush_and_finish(ctx, "preempted" if code == 75 else "failed", code, reason)


def error_key(
    state: State, traits: IncidentTraits, step: int | None, detail: Mapping[str, object], evidence: str
) -> str | None:
    """What is the same about two incidents that are the same error; None: this one cannot be recognised again."""
    if traits.repeats is Repeats.NEVER or (traits.repeats is Repeats.BY_SIGNATURE and "signature" not in detail):
        return None
    # A rank that fails right at its start has not reported a step yet: it was at the next one.
    at = step if step is not None and step >= 0 else state.last_applied_step + 1
    error = traits.kind if traits.repeats is Repeats.BY_STEP else detail.get("signature", evidence)
    return f"{at}:{error}"


def count_error(state: State, key: str | None, host: str | None) -> None:
    """Count one more, on ``host``."""
    if key is None:
        return
    state.errors.counts[key] = state.errors.counts.get(key, 0) + 1
    hosts = state.errors.hosts.setdefault(key, [])
    if host is not None and host not in hosts:
        hosts.append(host)


def readmit_suspects(state: State, key: str | None, host: str | None) -> list[str]:
    """Readmit the hosts that are quarantined for this error, since it recurred on another one; return their names."""
    suspects = [
        other
        for other in state.hosts.values()
        if key is not None
        and other.name != host
        and host is not None
        and other.quarantine is not None
        and other.quarantine.error == key
    ]
    for other in suspects:
        readmit_host(state, other.name)
    return [other.name for other in suspects]


def readmit_host(state: State, name: str) -> None:
    """A quarantined host becomes like any other."""
    host = state.hosts[name]
    host.quarantine, host.readiness.asked_about, host.failures_ns = None, False, []
