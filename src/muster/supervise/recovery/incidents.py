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
from muster.supervise.recovery.attempts import ask_to_save, collect
from muster.supervise.recovery.context import Context
from muster.supervise.recovery.final_flush import leave
from muster.supervise.recovery.retained_ranks import keepable
from muster.supervise.recovery.state import SECOND_NS, OpenIncident, Phase

#: Ranks that were asked to leave for a larger world and step on, since a save is under way, have so long.
YIELD_S = 300.0


def incident(
    c: Context,
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
    state = c.state
    if silent_s > 0:
        detail = {**(detail or {}), "since_ns": c.now_ns - int(silent_s * SECOND_NS)}
    found = Incident(
        incident_id=f"i{state.next_incident}",
        kind=traits.kind,
        attempt=state.attempt,
        step=step if step is not None else state.last_applied_step,
        host=host,
        rank=rank,
        evidence=evidence,
        detected_ns=c.now_ns,
        detail=detail or {},
    )
    state.next_incident += 1
    if host in state.hosts and traits.blames_host:
        since_ns = c.now_ns - int(c.settings.host_failure_window_s * SECOND_NS)
        state.hosts[host].failures_ns = [at for at in state.hosts[host].failures_ns if at > since_ns] + [c.now_ns]
    if rank is not None:
        state.blamed.add(rank)
    c.log(
        "incident.detected",
        {"incident_id": found.incident_id, "incident": traits.kind, "evidence": evidence, **(detail or {})},
        host=host,
        rank=rank,
        step=found.step,
    )
    key = error_history.key_of(state, traits, found.step, found.detail, evidence)
    error_history.count(state, key, host)
    for name in error_history.suspects_cleared(state, key, host):
        c.log("host.readmitted", {"reason": f"the error that quarantined {name} recurred on {host}"}, host=name)
    decision = decided(c, found, key)
    c.log(
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
            detected_ns=c.now_ns,
            last_applied_step=state.last_applied_step,
            secondary=bool((detail or {}).get("secondary")),
        )
    act(c, decision, found, key)


def decided(c: Context, incident: Incident, key: str | None) -> Decision:
    """The policy's decision; the default's where the policy has none that could be carried out (and a note says so)."""
    seen = situation(c, key)
    try:
        decision = c.policy.decide(seen, incident)
        problem = nonsense(c, seen, incident, decision)
    except (Exception, SystemExit) as error:  # noqa: BLE001 (the user's code: the run outlives it)
        problem = f"{type(error).__name__}: {error}"
    if problem is None:
        return decision
    text = f"recovery.policy: no decision on {incident.incident_id} ({problem[:300]}); the default policy's is taken"
    c.log("run.message", {"text": text})
    return SHIPPED["default"].decide(seen, incident)


def nonsense(c: Context, seen: ClusterState, incident: Incident, decision: object) -> str | None:
    """Why a decision cannot be carried out; None: it can."""
    if not isinstance(decision, Decision) or not isinstance(decision.action, Action):
        return f"decide returned {decision!r}, no Decision"
    detail = decision.detail
    typed = isinstance(decision.reason, str) and isinstance(detail, Mapping) and isinstance(decision.exit_code, int)
    if not typed or decision.incident_id != incident.incident_id:
        return "its fields are of another kind or for another incident"
    if decision.host is not None and decision.host not in c.state.hosts:
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


def situation(c: Context, key: str | None) -> ClusterState:
    """What the policy may look at. ``key``: the error, where it can repeat itself (``repeats.key_of``)."""
    state = c.state
    members = members_of(c)
    window_ns = int(c.settings.host_failure_window_s * SECOND_NS)
    return ClusterState(
        active=tuple(name for name in members if state.hosts[name].connected),
        spares=tuple(name for name in c.usable() if name not in members),
        wanted_hosts=c.settings.wanted_hosts,
        min_hosts=c.settings.min_hosts,
        last_applied_step=state.last_applied_step,
        restarts_without_progress=state.restarts_without_progress,
        max_restarts_without_progress=c.settings.spec.recovery.max_restarts_without_progress,
        same_error_repeats=state.error_counts.get(key or "", 0),
        same_error_hosts=len(state.error_hosts.get(key or "", ())),
        on_nonfinite_step=c.settings.spec.recovery.on_nonfinite_step,
        skipped_steps=tuple(sorted(state.skip_steps)),
        noticed=frozenset(name for name in members if state.hosts[name].going_s is not None),
        resettable=frozenset(name for name, host in state.hosts.items() if host.resettable and host.connected),
        host_failures={
            name: sum(at > c.now_ns - window_ns for at in host.failures_ns) for name, host in state.hosts.items()
        },
        waited_s=(c.now_ns - state.waiting_since_ns) / SECOND_NS if state.waiting_since_ns is not None else 0.0,
    )


def act(c: Context, decision: Decision, incident: Incident, key: str | None = None) -> None:
    """Carry a logged decision out, as far as it goes before the hosts answer."""
    state = c.state
    action = decision.action
    members = members_of(c)
    if action is Action.IGNORE:
        return
    if action is Action.STOP:
        give_up(c, decision, incident)
        return
    state.skip_steps |= {int(step) for step in decision.detail.get("skip_steps", ())}  # type: ignore[attr-defined]
    if action in (Action.SWAP, Action.SHRINK, Action.WAIT) and decision.host in members:
        place = members.index(decision.host)
        members[place : place + 1] = [decision.replacement] if action is Action.SWAP and decision.replacement else []
        retire(c, decision.host, incident, key)
    if action is Action.RESET and decision.host in state.hosts:
        state.hosts[decision.host].resetting = True
        state.blamed |= {rank for rank, name in state.ranks.items() if name == decision.host}
    if action is Action.GROW and decision.host is not None:
        named = decision.detail.get("hosts")
        new = [str(name) for name in named] if isinstance(named, (list, tuple)) else [decision.host]
        usable = c.usable()
        members += [name for name in new if name in usable and name not in members]
        state.target = members
        if keepable(c):
            collect(c)  # the ranks keep their processes: the pause is the step they are in
        else:
            request_resize(c)
        return
    state.target = members
    if action is Action.WAIT:
        state.waiting_since_ns = state.waiting_since_ns or c.now_ns
        state.needed_hosts = int(str(decision.detail.get("hosts", 0)))
    if state.phase is not Phase.COLLECT:
        collect(c, wait=action is Action.WAIT)


def members_of(c: Context) -> list[str]:
    """Hosts of the world that is, or, while ranks are being replaced or leave so that it can grow, that will be."""
    state = c.state
    return list(state.active if state.phase is Phase.RUN and not state.resizing else state.target)


def retire(c: Context, name: str | None, incident: Incident, key: str | None) -> None:
    """Take a host out of the run: a lemon for good, a flapping one for a while, one that goes until it is back."""
    host = c.state.hosts.get(name or "")
    if host is not None and host.connected:
        host.quarantined = True
        more: dict[str, Any] = {}
        if incident.traits.announced:
            host.until_return = more["until_return"] = True
        elif incident.traits.quarantine_expires:
            host.hold_off_s = more["for_s"] = c.settings.host_failure_window_s
            c.alarm(f"back:{host.name}", host.hold_off_s)
        elif key is not None:
            host.suspected_of = more["suspected_of"] = key
        reason = incident.evidence if more else f"{len(host.failures_ns)} failures"
        c.log("host.quarantined", {"reason": reason, **more}, host=host.name)
        c.send(host.name, {"t": "end", "attempt": c.state.attempt, "why": "replaced"})


def request_resize(c: Context) -> None:
    """Ask the ranks to leave after the step they are in; nothing is recomputed.

    They train on until a save that is under way stands, so that growing costs no checkpoint. Each step gives them
    ``grace_s`` again (``extend_resize_deadline``); one that takes longer is not worth its wait, the larger world is faster.
    """
    if c.state.resizing:
        return
    _leaving(c)
    for name in c.state.active:
        c.send(name, {"t": "order", "order": {"kind": "stop", "save": False, "exit_code": RESIZE_EXIT_CODE}})


def go_on_leaving(c: Context) -> None:
    """Ranks leave so that the world can grow: an earlier supervisor asked them to, and this one takes its place."""
    state = c.state
    others = [name for name in c.usable() if name not in state.active]
    state.target = [*state.active, *others][: max(c.settings.wanted_hosts, len(state.active))]
    _leaving(c)


def _leaving(c: Context) -> None:
    c.state.resizing, c.state.resize_deadline_ns = True, c.now_ns + int(YIELD_S * SECOND_NS)
    extend_resize_deadline(c)


def extend_resize_deadline(c: Context) -> None:
    """Ranks were asked to leave just now, or have taken another step since."""
    if c.now_ns < c.state.resize_deadline_ns:
        c.deadline(c.settings.spec.recovery.grace_s)


def give_up(c: Context, decision: Decision, incident: Incident) -> None:
    spec = c.settings.spec
    hint = incident.detail.get("hint")
    c.state.verdict = (decision.exit_code, decision.reason + (f" (hint: {hint})" if hint else ""))
    if incident.traits.announced and c.state.phase is Phase.RUN:
        ask_to_save(c, "preempted", decision.exit_code, source=incident.evidence)
        return
    correctable = "signature" in incident.detail or incident.traits.user_error
    if spec.recovery.keep_hosts_after_failure_s > 0 and correctable and decision.exit_code != 75:
        for name in c.state.active or list(c.state.hosts):
            c.send(name, {"t": "end", "attempt": c.state.attempt, "why": "held after a failure"})
        c.state.phase = Phase.HOLD
        c.deadline(spec.recovery.keep_hosts_after_failure_s)
        c.log("phase.changed", {"reason": decision.reason}, phase="hold")
        c.log("run.message", {"text": f"held for {spec.recovery.keep_hosts_after_failure_s:.0f} s: muster restart {c.settings.run_id}"})
        return
    outcome = "preempted" if decision.exit_code == 75 else "failed"
    leave(c, outcome, decision.exit_code, c.state.verdict[1])
