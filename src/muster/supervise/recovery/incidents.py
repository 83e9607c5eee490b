"""From an incident to the policy's decision, and from the decision to what is done."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from muster.core.incidents import IncidentTraits
from muster.core.types import Action, Decision, Incident
from muster.policy.builtin import SHIPPED
from muster.policy.cluster_state import ClusterState
from muster.protocol.ranks import RESIZE_EXIT_CODE
from muster.supervise.recovery import error_history
from muster.supervise.recovery.attempts import ask_to_save, drain
from muster.supervise.recovery.context import SupervisorContext
from muster.supervise.recovery.final_flush import flush_and_finish
from muster.supervise.recovery.retained_ranks import retainable_ranks
from muster.supervise.recovery.state import SECOND_NS, OpenIncident, Phase

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
    detail: Mapping[str, Any] | None = None,
    silent_s: float = 0.0,
) -> None:
    """Log an incident, ask the policy, log its decision, carry it out. ``silent_s``: how old the fault can be."""
    state, detail = ctx.state, dict(detail or {})
    if silent_s > 0:
        detail["since_ns"] = ctx.now_ns - int(silent_s * SECOND_NS)
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
    if host in state.hosts and traits.blames_host:
        since_ns = ctx.now_ns - int(ctx.settings.host_failure_window_s * SECOND_NS)
        state.hosts[host].failures_ns = [at for at in state.hosts[host].failures_ns if at > since_ns] + [ctx.now_ns]
    if rank is not None:
        state.blamed.add(rank)
    identity = {"incident_id": incident.incident_id, "incident": traits.kind, "evidence": evidence}
    ctx.log("incident.detected", {**identity, **detail}, host=host, rank=rank, step=incident.step)
    key = error_history.key_of(state, traits, incident.step, detail, evidence)
    error_history.count(state, key, host)
    for name in error_history.readmit_suspects(state, key, host):
        ctx.log("host.readmitted", {"reason": f"the error that quarantined {name} recurred on {host}"}, host=name)
    decision = decide(ctx, incident, key)
    _log_decision(ctx, decision)
    if decision.action is not Action.IGNORE and (state.open is None or state.phase is Phase.RUN):
        state.open = OpenIncident(
            incident_id=incident.incident_id,
            kind=traits.kind,
            detected_ns=ctx.now_ns,
            last_applied_step=state.last_applied_step,
            secondary=bool(detail.get("secondary")),
        )
    apply_decision(ctx, decision, incident, key)


def _log_decision(ctx: SupervisorContext, decision: Decision) -> None:
    skip_steps: Any = decision.detail.get("skip_steps")
    optional = {"replacement": decision.replacement, "skip_steps": skip_steps and list(skip_steps)}
    required = {"incident_id": decision.incident_id, "action": decision.action.value, "reason": decision.reason}
    detail = {**required, **{key: value for key, value in optional.items() if value}}
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
    typed = isinstance(decision.reason, str) and isinstance(detail, Mapping) and isinstance(decision.exit_code, int)
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
    if decision.action is Action.WAIT and not str(detail.get("hosts", 0)).isdigit():
        return f"it waits for {detail.get('hosts')!r} hosts, which is not a number"
    skips = detail.get("skip_steps", ())
    if not isinstance(skips, (list, tuple)) or not all(isinstance(step, int) for step in skips):
        return f"skip_steps={skips!r} is not a list of steps"
    return None


def cluster_state(ctx: SupervisorContext, key: str | None) -> ClusterState:
    """What the policy may look at. ``key``: the error, where it can recur (``error_history.key_of``)."""
    state = ctx.state
    members = members_of(ctx)
    window_ns = int(ctx.settings.host_failure_window_s * SECOND_NS)
    return ClusterState(
        active=tuple(name for name in members if state.hosts[name].connected),
        spares=tuple(name for name in ctx.usable() if name not in members),
        wanted_hosts=ctx.settings.wanted_hosts,
        min_hosts=ctx.settings.min_hosts,
        last_applied_step=state.last_applied_step,
        restarts_without_progress=state.restarts_without_progress,
        max_restarts_without_progress=ctx.settings.spec.recovery.max_restarts_without_progress,
        same_error_repeats=state.error_counts.get(key or "", 0),
        same_error_hosts=len(state.error_hosts.get(key or "", ())),
        on_nonfinite_step=ctx.settings.spec.recovery.on_nonfinite_step,
        skipped_steps=tuple(sorted(state.skip_steps)),
        noticed=frozenset(name for name in members if state.hosts[name].preemption_grace_s is not None),
        resettable=frozenset(name for name, host in state.hosts.items() if host.resettable and host.connected),
        host_failures={
            name: sum(at > ctx.now_ns - window_ns for at in host.failures_ns) for name, host in state.hosts.items()
        },
        waited_s=(ctx.now_ns - state.waiting_since_ns) / SECOND_NS if state.waiting_since_ns is not None else 0.0,
    )


def apply_decision(ctx: SupervisorContext, decision: Decision, incident: Incident, key: str | None = None) -> None:
    """Carry out a logged decision, as far as is possible before the hosts answer."""
    state = ctx.state
    action = decision.action
    members = members_of(ctx)
    if action is Action.IGNORE:
        return
    if action is Action.STOP:
        stop_run(ctx, decision, incident)
        return
    state.skip_steps |= {int(step) for step in decision.detail.get("skip_steps", ())}  # type: ignore[attr-defined]
    if action in (Action.SWAP, Action.SHRINK, Action.WAIT) and decision.host in members:
        place = members.index(decision.host)
        members[place : place + 1] = [decision.replacement] if action is Action.SWAP and decision.replacement else []
        quarantine_host(ctx, decision.host, incident, key)
    if action is Action.RESET and decision.host in state.hosts:
        state.hosts[decision.host].resetting = True
        state.blamed |= {rank for rank, name in state.ranks.items() if name == decision.host}
    if action is Action.GROW and decision.host is not None:
        named = decision.detail.get("hosts")
        new = [str(name) for name in named] if isinstance(named, (list, tuple)) else [decision.host]
        usable = ctx.usable()
        members += [name for name in new if name in usable and name not in members]
        state.target = members
        if retainable_ranks(ctx):
            drain(ctx)  # the ranks keep their processes: the pause is the step they are in
        else:
            request_resize(ctx)
        return
    state.target = members
    if action is Action.WAIT:
        state.waiting_since_ns = state.waiting_since_ns or ctx.now_ns
        state.needed_hosts = int(str(decision.detail.get("hosts", 0)))
    if state.phase is not Phase.DRAINING:
        drain(ctx)


def members_of(ctx: SupervisorContext) -> list[str]:
    """Hosts of the current attempt, or of the next one while ranks are being replaced or a resize is under way."""
    state = ctx.state
    return list(state.active if state.phase is Phase.RUN and not state.resizing else state.target)


def quarantine_host(ctx: SupervisorContext, name: str | None, incident: Incident, key: str | None) -> None:
    """Take a host out of the run: for good, for a while, or until it has left and rejoined."""
    host = ctx.state.hosts.get(name or "")
    if host is None or not host.connected:
        return
    host.quarantined = True
    extra: dict[str, Any] = {}
    if incident.traits.announced:
        host.until_return = extra["until_return"] = True
    elif incident.traits.quarantine_expires:
        host.hold_off_s = extra["for_s"] = ctx.settings.host_failure_window_s
        ctx.alarm(f"back:{host.name}", host.hold_off_s)
    elif key is not None:
        host.quarantined_for_error = extra["quarantined_for_error"] = key
    reason = incident.evidence if extra else f"{len(host.failures_ns)} failures"
    ctx.log("host.quarantined", {"reason": reason, **extra}, host=host.name)
    ctx.send(host.name, {"t": "end", "attempt": ctx.state.attempt, "why": "replaced"})


def request_resize(ctx: SupervisorContext) -> None:
    """Ask the ranks to exit after the current step; nothing is recomputed.

    They continue until a running save has committed, so that growing costs no checkpoint. Each step extends the
    deadline by ``grace_s``; a step that takes longer is not worth waiting for, since more hosts are faster.
    """
    if ctx.state.resizing:
        return
    _start_resize(ctx)
    for name in ctx.state.active:
        ctx.send(name, {"t": "order", "order": {"kind": "stop", "save": False, "exit_code": RESIZE_EXIT_CODE}})


def continue_resize(ctx: SupervisorContext) -> None:
    """Ranks exit for a resize that an earlier supervisor requested."""
    state = ctx.state
    others = [name for name in ctx.usable() if name not in state.active]
    state.target = [*state.active, *others][: max(ctx.settings.wanted_hosts, len(state.active))]
    _start_resize(ctx)


def _start_resize(ctx: SupervisorContext) -> None:
    ctx.state.resizing, ctx.state.resize_deadline_ns = True, ctx.now_ns + int(RESIZE_S * SECOND_NS)
    extend_resize_deadline(ctx)


def extend_resize_deadline(ctx: SupervisorContext) -> None:
    """Call it when ranks were asked to exit, and after each step they take since."""
    if ctx.now_ns < ctx.state.resize_deadline_ns:
        ctx.deadline(ctx.settings.spec.recovery.grace_s)


def stop_run(ctx: SupervisorContext, decision: Decision, incident: Incident) -> None:
    """End the run; after an error that a corrected run file may fix, hold its hosts first."""
    hold_s = ctx.settings.spec.recovery.keep_hosts_after_failure_s
    hint = incident.detail.get("hint")
    ctx.state.final_result = (decision.exit_code, decision.reason + (f" (hint: {hint})" if hint else ""))
    if incident.traits.announced and ctx.state.phase is Phase.RUN:
        ask_to_save(ctx, "preempted", decision.exit_code, source=incident.evidence)
        return
    correctable = "signature" in incident.detail or incident.traits.user_error
    if hold_s > 0 and correctable and decision.exit_code != 75:
        for name in ctx.state.active or list(ctx.state.hosts):
            ctx.send(name, {"t": "end", "attempt": ctx.state.attempt, "why": "held after a failure"})
        ctx.state.phase = Phase.HELD_AFTER_FAILURE
        ctx.deadline(hold_s)
        ctx.log("phase.changed", {"reason": decision.reason}, phase="hold")
        ctx.log("run.message", {"text": f"held for {hold_s:.0f} s: muster restart {ctx.settings.run_id}"})
        return
    outcome = "preempted" if decision.exit_code == 75 else "failed"
    flush_and_finish(ctx, outcome, decision.exit_code, ctx.state.final_result[1])
