"""What went wrong, judged by the policy and acted upon."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from muster.core.nouns import Action, Decision, Incident, IncidentKind
from muster.policy.situation import Situation
from muster.supervise.attempts import collect
from muster.supervise.context import YIELDED, Context
from muster.supervise.flush import leave
from muster.supervise.state import SECOND_NS, OpenIncident, Phase
from muster.supervise.survivors import keepable

#: Says nothing against the host it happened on.
_NOT_THE_HOSTS = (
    IncidentKind.HOST_RETURNED,
    IncidentKind.PREEMPTION_NOTICE,
    IncidentKind.RANK_OOM,
    IncidentKind.NOT_FINITE,
)
#: The same again at the same step: the program's own doing, not the machine's.
_OWN = (IncidentKind.RANK_EXCEPTION, IncidentKind.START_UP, IncidentKind.RANK_OOM)


def incident(
    c: Context,
    kind: IncidentKind,
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
        kind=kind,
        attempt=state.attempt,
        step=step if step is not None else state.last_applied_step,
        host=host,
        rank=rank,
        evidence=evidence,
        detected_ns=c.now_ns,
        detail=detail or {},
    )
    state.next_incident += 1
    if host in state.hosts and kind not in _NOT_THE_HOSTS:
        since_ns = c.now_ns - int(c.settings.lemon_window_s * SECOND_NS)
        state.hosts[host].failures_ns = [at for at in state.hosts[host].failures_ns if at > since_ns] + [c.now_ns]
    if rank is not None:
        state.blamed.add(rank)
    c.log(
        "incident",
        {"incident_id": found.incident_id, "incident": kind.value, "evidence": evidence, **(detail or {})},
        host=host,
        rank=rank,
        step=found.step,
    )
    decision = c.policy.decide(situation(c, found), found)
    c.log(
        "decision",
        {
            "incident_id": decision.incident_id,
            "action": decision.action.value,
            "reason": decision.reason,
            **({"replacement": decision.replacement} if decision.replacement else {}),
        },
        host=decision.host,
        sync=True,
    )
    if decision.action is not Action.IGNORE and (state.open is None or state.phase is Phase.RUN):
        state.open = OpenIncident(
            incident_id=found.incident_id,
            kind=kind.value,
            detected_ns=c.now_ns,
            last_applied_step=state.last_applied_step,
            secondary=bool((detail or {}).get("secondary")),
        )
    act(c, decision, found)


def situation(c: Context, incident: Incident) -> Situation:
    """What the policy may look at. Counts repeats of an error, so call it once an incident."""
    state = c.state
    repeats = 0
    if incident.kind in _OWN:
        # A rank that fails at once in its attempt has not told its step yet: it was at the next one.
        step = incident.step if incident.step is not None and incident.step >= 0 else state.last_applied_step + 1
        key = f"{step}:{incident.detail.get('signature', incident.evidence)}"
        repeats = state.error_counts[key] = state.error_counts.get(key, 0) + 1
    members = _members(c)
    window_ns = int(c.settings.lemon_window_s * SECOND_NS)
    return Situation(
        active=tuple(name for name in members if state.hosts[name].connected),
        spares=tuple(name for name in c.usable() if name not in members),
        wanted_hosts=c.settings.wanted_hosts,
        min_hosts=c.settings.min_hosts,
        last_applied_step=state.last_applied_step,
        restarts_without_progress=state.restarts_without_progress,
        max_restarts_without_progress=c.settings.spec.recovery.max_restarts_without_progress,
        same_error_repeats=repeats,
        resettable=frozenset(name for name, host in state.hosts.items() if host.resettable and host.connected),
        host_failures={
            name: sum(at > c.now_ns - window_ns for at in host.failures_ns) for name, host in state.hosts.items()
        },
        waited_s=(c.now_ns - state.waiting_since_ns) / SECOND_NS if state.waiting_since_ns is not None else 0.0,
    )


def act(c: Context, decision: Decision, incident: Incident) -> None:
    """Carry a logged decision out, as far as it goes before the hosts answer."""
    state = c.state
    action = decision.action
    members = _members(c)
    if action is Action.IGNORE:
        return
    if action is Action.STOP:
        give_up(c, decision, incident)
        return
    if action in (Action.SWAP, Action.SHRINK, Action.WAIT) and decision.host in members:
        place = members.index(decision.host)
        members[place : place + 1] = [decision.replacement] if action is Action.SWAP and decision.replacement else []
        retire(c, decision.host)
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
            ask_to_leave(c)
        return
    state.target = members
    if action is Action.WAIT:
        state.waiting_since_ns = state.waiting_since_ns or c.now_ns
        state.needed_hosts = int(str(decision.detail.get("hosts", 0)))
    if state.phase is not Phase.COLLECT:
        collect(c, wait=action is Action.WAIT)


def _members(c: Context) -> list[str]:
    """Hosts of the world that is, or, while ranks are being replaced or leave so that it can grow, that will be."""
    state = c.state
    return list(state.active if state.phase is Phase.RUN and not state.yielding else state.target)


def retire(c: Context, name: str | None) -> None:
    """Take a host out of the run: a lemon is never used again, a lost one may come back."""
    host = c.state.hosts.get(name or "")
    if host is not None and host.connected:
        host.quarantined = True
        c.log("host.quarantined", {"reason": f"{len(host.failures_ns)} failures"}, host=host.name)
        c.send(host.name, {"t": "end", "attempt": c.state.attempt, "why": "replaced"})


def ask_to_leave(c: Context) -> None:
    """Ask the ranks to leave after the step they are in; nothing is recomputed."""
    if c.state.yielding:
        return
    c.state.yielding = True
    c.deadline(c.settings.spec.recovery.grace_s)
    for name in c.state.active:
        c.send(name, {"t": "order", "order": {"kind": "stop", "save": False, "exit_code": YIELDED}})


def give_up(c: Context, decision: Decision, incident: Incident) -> None:
    spec = c.settings.spec
    hint = incident.detail.get("hint")
    c.state.verdict = (decision.exit_code, decision.reason + (f" (hint: {hint})" if hint else ""))
    own = incident.kind in (IncidentKind.RANK_EXCEPTION, IncidentKind.START_UP, IncidentKind.NOT_FINITE)
    if spec.recovery.hold_s > 0 and own and decision.exit_code != 75:
        for name in c.state.active or list(c.state.hosts):
            c.send(name, {"t": "end", "attempt": c.state.attempt, "why": "held after a failure"})
        c.state.phase = Phase.HOLD
        c.deadline(spec.recovery.hold_s)
        c.log("phase", {"reason": decision.reason}, phase="hold")
        c.log("run.note", {"text": f"held for {spec.recovery.hold_s:.0f} s: muster restart {c.settings.run_id}"})
        return
    outcome = "preempted" if decision.exit_code == 75 else "failed"
    leave(c, outcome, decision.exit_code, c.state.verdict[1])
