"""What hosts capture of their ranks between the report of a hang and its incident. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from muster.core.typed_json import Json, JsonObject, Unreadable, decode
from muster.health.hang import ras
from muster.health.hang.analysis import analyse
from muster.health.hang.evidence import Analysis, Evidence, RankEvidence, in_words
from muster.protocol.to_supervisor import EvidenceReady, RankHang

#: Alarm of the state machine: the evidence that is not there by then is missing.
ALARM = "evidence"
#: Lines in the event: of more ranks nobody reads each.
MOST_RANKS, MOST_MISSING = 64, 16


@dataclass(kw_only=True)
class Gathering:
    """Begun by the first report of a hang; others that follow meanwhile are the same hang."""

    host: str
    report: RankHang
    begun_ns: int
    waiting: set[str]
    """Hosts that have not answered."""
    answers: dict[str, EvidenceReady] = field(default_factory=dict)

    def add(self, host: str, answer: EvidenceReady) -> bool:
        """Whether it was the last that is awaited."""
        if host in self.waiting and answer.attempt == self.report.attempt:
            self.waiting.discard(host)
            self.answers[host] = answer
        return not self.waiting

    def conclude(self, world: int) -> tuple[Analysis, tuple[RankEvidence, ...]]:
        """Who holds the others up, from what has come."""
        ranks, missing = read_answers(self.answers, self.waiting)
        report = _ras(self.answers, missing)
        evidence = Evidence(ranks=tuple(ranks), world=world, ras=report, missing=tuple(missing))
        return analyse(evidence), evidence.ranks


def of_exit(host: str, answer: EvidenceReady) -> tuple[Analysis, tuple[RankEvidence, ...]]:
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
    """(what hosts told of their ranks, a sentence for each host of ``waiting`` and each text that is unreadable)."""
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


def event_of(analysis: Analysis, ranks: Iterable[RankEvidence], *, incident_id: str, took_ns: int) -> JsonObject:
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
