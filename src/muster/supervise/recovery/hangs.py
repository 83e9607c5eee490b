"""Ranks that hang: all hosts capture what their ranks do, and the incident names who holds the others up."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

from muster.core.incidents import RANK_HANG
from muster.core.typed_json import Json, JsonObject, Unreadable, decode
from muster.health.hang import ras
from muster.health.hang.analysis import analyse
from muster.health.hang.evidence import Analysis, Evidence, RankEvidence, in_words
from muster.protocol.to_agent import GatherEvidence
from muster.protocol.to_supervisor import EvidenceReady, RankHang
from muster.supervise.recovery.context import SupervisorContext
from muster.supervise.recovery.incidents import report_incident
from muster.supervise.recovery.inputs import SECOND_NS
from muster.supervise.recovery.phases import Gathering, Running
from muster.supervise.recovery.state import Host

#: Alarm of the state machine: the evidence that is not there by then is missing.
ALARM = "evidence"
#: Lines in the event.
MOST_RANKS, MOST_MISSING = 64, 16


def on_hang(ctx: SupervisorContext, host: Host, message: RankHang | EvidenceReady) -> None:
    """A rank hangs, or a host has captured its ranks. Evidence comes before the incident: it ends the ranks."""
    state, phase, settings = ctx.state, ctx.state.phase, ctx.settings
    if isinstance(message, EvidenceReady) and message.exited is not None:
        _seen_beside_exit(ctx, host, message)
        return
    if message.attempt != state.attempt or not isinstance(phase, Running):
        return
    if isinstance(message, EvidenceReady):
        if phase.gathering is not None and phase.gathering.add(host.name, message):
            judge_hang(ctx)
        return
    if phase.gathering is not None:
        return  # the same hang, seen on another rank
    hosts = {name for name in state.active if name in state.hosts and state.hosts[name].connected}
    phase.gathering = Gathering(host=host.name, report=message, begun_ns=ctx.now_ns, waiting=hosts)
    if settings.gather_evidence_s <= 0:
        judge_hang(ctx)
        return
    ctx.alarm(ALARM, settings.gather_evidence_s)
    for name in sorted(hosts):
        ctx.send(name, GatherEvidence(attempt=state.attempt))


def _seen_beside_exit(ctx: SupervisorContext, host: Host, answer: EvidenceReady) -> None:
    """Evidence of a rank's exit, which is judged already: only logged."""
    incident_id = ctx.state.exits.pop((answer.attempt, answer.exited or 0), None)
    if incident_id is not None:
        analysis, ranks = _of_exit(host.name, answer)
        ctx.log("evidence.gathered", _event_of(analysis, ranks, incident_id=incident_id, took_ns=0))


def judge_hang(ctx: SupervisorContext) -> None:
    """All hosts have answered, or the time is over: the incident names who holds the others up, if anybody can."""
    state, phase = ctx.state, ctx.state.phase
    state.alarms.pop(ALARM, None)
    if not isinstance(phase, Running) or phase.gathering is None:
        return  # something else has ended the attempt meanwhile
    found, phase.gathering = phase.gathering, None
    report = found.report
    host, rank, evidence, detail = found.host, report.rank, report.evidence, dict[str, Json]()
    if found.answers:
        took_ns = ctx.now_ns - found.begun_ns
        analysis, ranks = conclude(found, len(state.ranks))
        details = _event_of(analysis, ranks, incident_id=f"i{state.next_incident}", took_ns=took_ns)
        ctx.log("evidence.gathered", details)
        if analysis.culprits:
            culprit = analysis.culprits[0]
            host, rank = state.ranks.get(culprit.rank, host), culprit.rank
            evidence = f"{analysis.sentence}; noticed as: {evidence}"
            detail["culprit"] = culprit.kind.value
    silent_s = report.silent_s + (ctx.now_ns - found.begun_ns) / SECOND_NS
    report_incident(ctx, RANK_HANG, host=host, rank=rank, evidence=evidence, detail=detail, silent_s=silent_s)


def conclude(gathering: Gathering, world: int) -> tuple[Analysis, tuple[RankEvidence, ...]]:
    """Who holds the others up, from what has come."""
    ranks, missing = read_answers(gathering.answers, gathering.waiting)
    report = _ras(gathering.answers, missing)
    evidence = Evidence(ranks=tuple(ranks), world=world, ras=report, missing=tuple(missing))
    return analyse(evidence), evidence.ranks


def _of_exit(host: str, answer: EvidenceReady) -> tuple[Analysis, tuple[RankEvidence, ...]]:
    """What was seen of a rank that has exited and of the others on its host."""
    ranks, missing = read_answers({host: answer}, ())
    analysis = analyse(Evidence(ranks=tuple(ranks)))
    # Who waits is no question where the ranks are ended, nor is what was not asked for.
    return replace(analysis, victims=0, missing=tuple(missing)), tuple(ranks)


def _ras(answers: Mapping[str, EvidenceReady], missing: list[str]) -> ras.Ras | None:
    """The report of NCCL's RAS, which one host has asked for all."""
    for host, answer in sorted(answers.items()):
        if not answer.ras:
            continue
        try:
            found = ras.parse(answer.ras)
        except Unreadable as error:
            missing.append(f"{host}: {error}")
            continue
        if not found.complete:
            missing.append(f"{host}: the report of NCCL's RAS is cut")
        return found
    return None


def read_answers(answers: Mapping[str, EvidenceReady], waiting: Iterable[str]) -> tuple[list[RankEvidence], list[str]]:
    """(what hosts report of their ranks, a sentence for each host of ``waiting`` and each text that is unreadable)."""
    missing = [f"{host} has not answered" for host in sorted(waiting)]
    ranks: list[RankEvidence] = []
    for host, answer in sorted(answers.items()):
        missing += [f"{host}: {sentence}" for sentence in answer.missing]
        for text in answer.ranks:
            try:
                ranks.append(decode(RankEvidence, text))
            except Unreadable as error:
                missing.append(f"{host}: {error}")
    return ranks, missing


def _event_of(analysis: Analysis, ranks: Iterable[RankEvidence], *, incident_id: str, took_ns: int) -> JsonObject:
    """The detail of ``evidence.gathered``."""
    culprit = analysis.culprits[0] if analysis.culprits else None
    named: dict[str, Json] = {}
    if culprit is not None:
        texts = {
            "place": culprit.place,
            "other_place": culprit.other_place,
            "group": culprit.group,
            "operation": culprit.operation,
        }
        named = {"culprit": culprit.kind.value, "confidence": culprit.confidence.value}
        named |= {key: text for key, text in texts.items() if text}
    first = {one.rank for one in analysis.culprits}
    ordered = sorted(ranks, key=lambda one: (one.rank not in first, one.rank))
    return {
        "incident_id": incident_id,
        "summary": analysis.sentence[:2000],
        **named,
        "victims": analysis.victims,
        "took_ns": took_ns,
        "ranks": [in_words(one)[:500] for one in ordered[:MOST_RANKS]],
        "missing": [sentence[:500] for sentence in analysis.missing[:MOST_MISSING]],
    }
