"""What went wrong, judged by the policy and acted upon."""

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

#: Ranks that were asked to leave for a larger world and step on, since a save is under way, have so long.
YIELD_S = 300.0


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
    """Log it, let the policy judge it, log the decision, act. ``silent_s``: how old the fault can be."""
    state = ctx.state
    if silent_s > 0:
        detail = {**(detail or {}), "since_ns": ctx.now_ns - int(silent_s * SECOND_NS)}
    found = Incident(
        incident_id=f"i{state.next_incident}",
        kind=traits.kind,
        attempt=state.attempt,
        step=step if step is not None else state.last_applied_step,
        host=host,
        rank=rank,
        evidence=evidence,
        detected_ns=ctx.now_ns,
        detail=detail or {},
    )
    state.next_incident += 1
    if host in state.hosts and traits.blames_host:
        since_ns = ctx.now_ns - int(ctx.settings.host_failure_window_s * SECOND_NS)
        state.hosts[host].failures_ns = [at for at in state.hosts[host].failures_ns if at > since_ns] + [ctx.now_ns]
    if rank is not None:
        state.blamed.add(rank)
    ctx.log(
        "incident.detected",
        {"incident_id": found.incident_id, "incident": traits.kind, "evidence": evidence, **(detail or {})},
        host=host,
        rank=rank,
        step=found.step,
    )
    key = error_history.key_of(state, traits, found.step, found.detail, evidence)
    error_history.count(state, key, host)
    for name in error_history.readmit_suspects(state, key, host):
        ctx.log("host.readmitted", {"reason": f"the error that quarantined {name} recurred on {host}"}, host=name)
    decision = decided(ctx, found, key)
    ctx.log(
        "incident.decided",
        {
            "incident_id": decision.incident_id,
            "action": decision.action.value,
            "reason": decision.reason,
            **({"replacement": decision.replacement} if decision.replacement else {}),
            **({"skip_steps": list(decision.detail["skip_steps"])} if "skip_steps" in decision.detail else {}),  # type: ignore[call-overload]
        },
        host=decision.host,
        sync=True,
    )
    if decision.action is not Action.IGNORE and (state.open is None or state.phase is Phase.RUN):
        state.open = OpenIncident(
            incident_id=found.incident_id,
            kind=traits.kind,
            detected_ns=ctx.now_ns,
            last_applied_step=state.last_applied_step,
            secondary=bool((detail or {}).get("secondary")),
        )
    apply_decision(ctx, decision, found, key)


def decided(ctx: SupervisorContext, incident: Incident, key: str | None) -> Decision:
    """The policy's decision; the default's where the policy has none that could be carried out (and a note says so)."""
    seen = cluster_state(ctx, key)
    try:
        decision = ctx.policy.decide(seen, incident)
        problem = decision_error(ctx, seen, incident, decision)
    except (Exception, SystemExit) as error:  # noqa: BLE001 (the user's code: the run outlives it)
        problem = f"{type(error).__name__}: {error}"
    if problem is None:
        return decision
    text = f"recovery.policy: no decision on {incident.incident_id} ({problem[:300]}); the default policy's is taken"
    ctx.log("run.message", {"text": text})
    return SHIPPED["default"].decide(seen, incident)


def decision_error(ctx: SupervisorContext, seen: ClusterState, incident: Incident, decision: object) -> str | None:
    """Why a decision cannot be carried out; None: it can."""
    if not isinstance(decision, Decision) or not isinstance(decision.action, Action):
        return f"decide returned {decision!r}, no Decision"
    detail = decision.detail
    typed = isinstance(decision.reason, str) and isinstance(detail, Mapping) and isinstance(decision.exit_code, int)
    if not typed or decision.incident_id != incident.incident_id:
        return "its fields are of another kind or for another incident"
    if decision.host is not None and decision.host not in ctx.state.hosts:
        return f"it names {decision.host!r}, which is no host of the run"
    if decision.action is Action.SWAP and decision.replacement not in seen.spares:
        return f"it swaps for {decision.replacement!r}, and the spares are {', '.join(seen.spares) or 'none'}"
    if decision.action is Action.IGNORE and not incident.traits.may_be_ignored:
        return f"training does not continue by itself after {incident.kind}"
    if decision.action is Action.WAIT and not str(detail.get("hosts", 0)).isdigit():
        return f"it waits for {detail.get('hosts')!r} hosts"
    skips = detail.get("skip_steps", ())
    if not isinstance(skips, (list, tuple)) or not all(isinstance(step, int) for step in skips):
        return f"it leaves out the steps {skips!r}"
    return None


def cluster_state(ctx: SupervisorContext, key: str | None) -> ClusterState:
    """What the policy may look at. ``key``: the error, where it can repeat itself (``repeats.key_of``)."""
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
    """Carry a logged decision out, as far as it goes before the hosts answer."""
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
        drain(ctx, wait=action is Action.WAIT)


def members_of(ctx: SupervisorContext) -> list[str]:
    """Hosts of the world that is, or, while ranks are being replaced or leave so that it can grow, that will be."""
    state = ctx.state
    return list(state.active if state.phase is Phase.RUN and not state.resizing else state.target)


def quarantine_host(ctx: SupervisorContext, name: str | None, incident: Incident, key: str | None) -> None:
    """Take a host out of the run: a lemon for good, a flapping one for a while, one that goes until it is back."""
    host = ctx.state.hosts.get(name or "")
    if host is not None and host.connected:
        host.quarantined = True
        more: dict[str, Any] = {}
        if incident.traits.announced:
            host.until_return = more["until_return"] = True
        elif incident.traits.quarantine_expires:
            host.hold_off_s = more["for_s"] = ctx.settings.host_failure_window_s
            ctx.alarm(f"back:{host.name}", host.hold_off_s)
        elif key is not None:
            host.quarantined_for_error = more["quarantined_for_error"] = key
        reason = incident.evidence if more else f"{len(host.failures_ns)} failures"
        ctx.log("host.quarantined", {"reason": reason, **more}, host=host.name)
        ctx.send(host.name, {"t": "end", "attempt": ctx.state.attempt, "why": "replaced"})


def request_resize(ctx: SupervisorContext) -> None:
    """Ask the ranks to leave after the step they are in; nothing is recomputed.

    They train on until a save that is under way stands, so that growing costs no checkpoint. Each step gives them
    ``grace_s`` again (``extend_resize_deadline``); one that takes longer is not worth its wait, the larger world is faster.
    """
    if ctx.state.resizing:
        return
    _start_resize(ctx)
    for name in ctx.state.active:
        ctx.send(name, {"t": "order", "order": {"kind": "stop", "save": False, "exit_code": RESIZE_EXIT_CODE}})


def continue_resize(ctx: SupervisorContext) -> None:
    """Ranks leave so that the world can grow: an earlier supervisor asked them to, and this one takes its place."""
    state = ctx.state
    others = [name for name in ctx.usable() if name not in state.active]
    state.target = [*state.active, *others][: max(ctx.settings.wanted_hosts, len(state.active))]
    _start_resize(ctx)


def _start_resize(ctx: SupervisorContext) -> None:
    ctx.state.resizing, ctx.state.resize_deadline_ns = True, ctx.now_ns + int(YIELD_S * SECOND_NS)
    extend_resize_deadline(ctx)


def extend_resize_deadline(ctx: SupervisorContext) -> None:
    """Ranks were asked to leave just now, or have taken another step since."""
    if ctx.now_ns < ctx.state.resize_deadline_ns:
        ctx.deadline(ctx.settings.spec.recovery.grace_s)


def stop_run(ctx: SupervisorContext, decision: Decision, incident: Incident) -> None:
    spec = ctx.settings.spec
    hint = incident.detail.get("hint")
    ctx.state.final_result = (decision.exit_code, decision.reason + (f" (hint: {hint})" if hint else ""))
    if incident.traits.announced and ctx.state.phase is Phase.RUN:
        ask_to_save(ctx, "preempted", decision.exit_code, source=incident.evidence)
        return
    correctable = "signature" in incident.detail or incident.traits.user_error
    if spec.recovery.keep_hosts_after_failure_s > 0 and correctable and decision.exit_code != 75:
        for name in ctx.state.active or list(ctx.state.hosts):
            ctx.send(name, {"t": "end", "attempt": ctx.state.attempt, "why": "held after a failure"})
        ctx.state.phase = Phase.HELD_AFTER_FAILURE
        ctx.deadline(spec.recovery.keep_hosts_after_failure_s)
        ctx.log("phase.changed", {"reason": decision.reason}, phase="hold")
        ctx.log(
            "run.message",
            {
                "text": f"held for {spec.recovery.keep_hosts_after_failure_s:.0f} s: muster restart {ctx.settings.run_id}"
            },
        )
        return
    outcome = "preempted" if decision.exit_code == 75 else "failed"
    flush_and_finish(ctx, outcome, decision.exit_code, ctx.state.final_result[1])
