"""Reports on a host's hardware: what is wrong, and what may heal it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Literal

from muster.config.spec import RunSpec
from muster.core.incidents import HOST_UNHEALTHY, traits_of
from muster.core.typed_json import Json, JsonObject
from muster.health.hardware.error_table import OwnNumbers
from muster.health.machine.expected import expected_of
from muster.health.machine.fleet import commands
from muster.health.machine.judge import judge_machine
from muster.health.machine.report import of_own_gpus, read_probe
from muster.health.verdicts import Finding, Verdict, worst
from muster.protocol.client import HealthReport
from muster.protocol.to_supervisor import HostFault, HostLooked
from muster.protocol.values import HostLook
from muster.supervise.recovery.context import SupervisorContext
from muster.supervise.recovery.hosts import set_apart, start_if_enough
from muster.supervise.recovery.incidents import judge_fault
from muster.supervise.recovery.phases import Running, Starting, Waiting
from muster.supervise.recovery.state import Fault, Host

#: In the event.
MOST_FINDINGS = 16
_GRAVEST = tuple(reversed(Verdict))
_ASKED: dict[Verdict, Literal["reset", "drain", "replace"]] = {
    Verdict.RESET: "reset",
    Verdict.DRAIN: "drain",
    Verdict.REPLACE: "replace",
}
_SAID = (Verdict.NOTE, Verdict.APP, Verdict.INCOMPLETE)


def on_health(ctx: SupervisorContext, host: Host, message: HealthReport | HostFault | HostLooked) -> None:
    """A detector's report on a host, or its own look at its hardware: what is wrong, and what may heal it.

    Judged at once where ranks run or could, else before the next attempt starts.
    """
    if isinstance(message, HostLooked):
        fault = _fault_seen(ctx, host, message)
        if fault is None:
            return
        message = fault
    state, phase = ctx.state, ctx.state.phase
    traits, evidence, detail = HOST_UNHEALTHY, message.evidence[:500], dict[str, Json]()
    health: dict[str, Json] = {"resettable": list(message.resettable)}
    if isinstance(message, HostFault):
        last, host.health.reported = host.health.reported, (message.at_ns, evidence)
        if host.health.reported == last:
            return
        health["verdict"] = detail["class"] = message.verdict
        if message.sound_step is not None:
            health["sound_step"] = detail["sound_step"] = message.sound_step
            health["sound_attempt"] = message.attempt
            state.saves.distrust(message.attempt, message.sound_step)
    else:
        traits = traits_of(message.kind)
    ctx.log("host.health", {"incident": traits.kind, "evidence": evidence, **health}, host=host.name)
    if state.keeps_faults_of(host.name):
        host.health.keep(Fault(traits=traits, evidence=evidence, resettable=message.resettable, detail=detail))
        if isinstance(phase, Running | Waiting):
            judge_fault(ctx, host.name)
        elif isinstance(phase, Starting):
            start_if_enough(ctx)
        return
    host.health.resettable = message.resettable
    if isinstance(message, HostFault) and not host.quarantined:
        set_apart(ctx, host, evidence, message.resettable)


def _fault_seen(ctx: SupervisorContext, host: Host, message: HostLooked) -> HostFault | None:
    """What a host saw of its hardware: logged; what needs an action is a fault as any other."""
    spec = ctx.settings.spec
    found = judge(host.name, message.look, spec)
    ctx.log("host.check", _event_of(host.name, message.look, found, spec), host=host.name)
    return fault_of(found, message)


def judge(host: str, look: HostLook, spec: RunSpec) -> list[Finding]:
    """Findings on one host, the gravest first. Processes of the run may use its GPUs meanwhile."""
    expected = expected_of(spec.resources.machine)
    report = of_own_gpus(read_probe(look.output.encode(), host=host), look.own)
    wanted = len(look.own) if look.own is not None else expected.gpus
    found = judge_machine(report, gpus=wanted, source=expected.source, idle=False, own=own_numbers(spec))
    return sorted(found, key=lambda one: _GRAVEST.index(one.verdict))


def own_numbers(spec: RunSpec | None) -> OwnNumbers:
    """The Xid numbers that a run file judges itself."""
    if spec is None:
        return OwnNumbers()
    return OwnNumbers(ignore=frozenset(spec.check.xid_ignore), fatal=frozenset(spec.check.xid_fatal))


def _event_of(host: str, look: HostLook, found: list[Finding], spec: RunSpec) -> JsonObject:
    """The detail of ``host.check``."""
    said = [one.message[:300] for one in found if one.verdict.faulty or one.verdict in _SAID]
    detail: dict[str, Json] = {
        "part": look.part,
        "verdict": worst(found).value,
        "findings": said[:MOST_FINDINGS],
        "took_s": round(look.seconds, 3),
    }
    if look.node:
        detail["node"] = look.node
    command = take_out(host, look, found, spec)
    if command is not None:
        detail["command"] = command
    return detail


def take_out(host: str, look: HostLook, found: Iterable[Finding], spec: RunSpec) -> str | None:
    """The command that takes the machine out of its cluster; None: nothing is to be done, or none is known."""
    named = [replace(one, host=look.node) for one in found if one.host == host]
    return commands_of(named, spec).get(look.node)


def commands_of(found: Iterable[Finding], spec: RunSpec) -> dict[str, str]:
    """Faulty machine -> the command that takes it out, by where the run file places hosts."""
    model = spec.resources.provisioning_model
    reserved = bool(spec.resources.reservation) and model in (None, "reservation", "calendar")
    zone = next((place for place in spec.resources.locations if place.count("-") == 2), "")
    return commands(found, backend=spec.backend, reserved=reserved, zone=zone)


def fault_of(found: list[Finding], looked: HostLooked) -> HostFault | None:
    """What the policy is to answer; None: nothing is to be done about the host (what could not be seen is no fault)."""
    gravest = worst(found)
    decisive = [one for one in found if one.verdict is gravest]
    if gravest not in _ASKED:
        return None
    resettable: tuple[int, ...] = ()
    if gravest is Verdict.RESET and all(one.gpu is not None for one in decisive):
        resettable = tuple(sorted({one.gpu for one in decisive if one.gpu is not None}))
    evidence = "; ".join(one.message for one in decisive)[:500]
    return HostFault(verdict=_ASKED[gravest], evidence=evidence, resettable=resettable, at_ns=looked.at_ns)
