"""What a host saw of its hardware, judged: the event, and the fault that the policy is to answer. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Literal

from muster.config.spec import RunSpec
from muster.core.typed_json import Json, JsonObject
from muster.health.hardware.error_table import OwnNumbers
from muster.health.machine.expected import expected_of
from muster.health.machine.fleet import commands
from muster.health.machine.judge import judge_machine
from muster.health.machine.report import of_own_gpus, read_probe
from muster.health.verdicts import Finding, Verdict, worst
from muster.protocol.to_supervisor import HostFault, HostLooked
from muster.protocol.values import HostLook

#: In the event.
MOST_FINDINGS = 16
_GRAVEST = tuple(reversed(Verdict))
_ASKED: dict[Verdict, Literal["reset", "drain", "replace"]] = {
    Verdict.RESET: "reset",
    Verdict.DRAIN: "drain",
    Verdict.REPLACE: "replace",
}
_SAID = (Verdict.NOTE, Verdict.APP, Verdict.INCOMPLETE)


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


def event_of(host: str, look: HostLook, found: list[Finding], spec: RunSpec) -> JsonObject:
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
    """What takes the machine out of its cluster, to be typed by whoever may; None: nothing is to be done, or nobody
    could be told."""
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
