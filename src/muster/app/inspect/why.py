"""Why a run stopped or hangs: the culprit of its incidents, or of a folder of captures."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path

from muster.app.inspect.logs import events
from muster.app.inspect.report import report
from muster.core.errors import MusterError, UsageError
from muster.core.event_details.incidents import (
    EvidenceGathered,
    IncidentDecided,
    IncidentDetected,
    IncidentResolved,
)
from muster.core.event_log import Damage
from muster.core.event_log.names import event_files
from muster.core.incidents import RANK_HANG
from muster.core.typed_json import JsonObject
from muster.health.hang.analysis import analyse
from muster.health.hang.captures import evidence_of
from muster.health.hang.evidence import Analysis, in_words
from muster.health.hang.flight_recorder import LARGEST_BYTES
from muster.report.ledger.figures import usd_per_hour
from muster.report.ledger.step_budget import Lever, step_budget
from muster.report.render.sentences import lever_in_words
from muster.storage import run_registry

#: More files than ranks with a few captures each: the wrong folder was named.
MOST_FILES = 20_000
#: Of a run's log: of a longer one (a hundred thousand steps and more) only the incidents are read, which the supervisor
#: writes; where steps go, which needs all of it, is ``muster report``'s.
LONGEST_LOG_BYTES = 64 << 20


@dataclass(kw_only=True)
class IncidentView:
    incident_id: str
    kind: str
    evidence: str
    part_of: str | None = None
    """The incident that it came with: that one's decision holds for it, unless it has one."""
    host: str | None = None
    rank: int | None = None
    step: int | None = None
    attempt: int = 0
    last_words: str | None = None
    hint: str | None = None
    captured: EvidenceGathered | None = None
    """What the ranks did, of a hang."""
    action: str | None = None
    reason: str | None = None
    lost_s: float | None = None
    """Until the first new step; None: not yet."""


@dataclass(frozen=True, kw_only=True)
class Why:
    """``incidents``: of a run, the newest first. ``analysis``: of captures, with a line for each rank."""

    subject: str
    incidents: tuple[IncidentView, ...] = ()
    analysis: Analysis | None = None
    ranks: tuple[str, ...] = ()
    lever: Lever | None = None
    """What would make a run's steps shorter; None: not known, or nothing would."""
    damaged: tuple[Damage, ...] = field(default=())

    def to_json(self) -> JsonObject:
        analysis = None
        if self.analysis is not None:
            analysis = {**asdict(self.analysis), "sentence": self.analysis.sentence, "ranks": list(self.ranks)}
        return {
            "of": self.subject,
            "analysis": analysis,
            "incidents": [asdict(one) for one in self.incidents],
            "next": None if self.lever is None else asdict(self.lever),
            "damaged": [damage.to_json() for damage in self.damaged],
        }

    def lines(self, *, whole: bool = False) -> list[str]:
        """For people: the answer first; at most ten lines unless ``whole``."""
        result = list(self._of_captures() if self.analysis is not None else self._of_run())
        last = [] if self.lever is None else [lever_in_words(self.lever)]
        if whole or len(result) + len(last) <= 10:
            return result + last
        shown = 9 - len(last)
        return [*result[:shown], f"and {len(result) - shown} lines more: --all", *last]

    def _of_captures(self) -> Iterator[str]:
        analysis = self.analysis
        assert analysis is not None
        if not analysis.culprits:
            yield analysis.summary
        for one in analysis.culprits:
            yield f"{one.sentence} [{one.kind.value}, confidence {one.confidence.value}]"
        if analysis.culprits:
            whom = "it" if len(analysis.culprits) == 1 else "them"
            yield f"{analysis.victims} {'rank waits' if analysis.victims == 1 else 'ranks wait'} for {whom}"
        yield from (f"missing: {sentence}" for sentence in analysis.missing)
        named = {f"rank {one.rank}" for one in analysis.culprits}
        yield from sorted(self.ranks, key=lambda line: line.split(":")[0].split(" on ")[0] not in named)

    def _of_run(self) -> Iterator[str]:
        if not self.incidents:
            yield f"{self.subject}: no incident, nothing has gone wrong so far"
        for one in self.incidents:
            at_step = f" at step {one.step}" if one.step is not None and one.step >= 0 else ""
            part = f" (part of {one.part_of})" if one.part_of is not None else ""
            yield f"incident {one.incident_id}{part}: {one.kind}{at_step}, attempt {one.attempt}: {one.evidence}"
            if one.last_words is not None and one.last_words not in one.evidence:
                yield f"  last words: {one.last_words}"
            if one.captured is not None:
                seen = _seen(one.captured, of_hang=one.kind == RANK_HANG.kind)
                yield from (f"  {line}" for line in seen)
            if one.hint:
                yield f"  hint: {one.hint}"
            if one.action is not None:
                lost = f"; the next new step came {one.lost_s:.2f} s later" if one.lost_s is not None else ""
                yield f"  decision: {one.action}: {one.reason}{lost}"


def _seen(captured: EvidenceGathered, *, of_hang: bool) -> Iterator[str]:
    """What was captured of a hang, or at an exit."""
    if not of_hang:
        yield f"seen at the exit: {captured.summary}"
    elif captured.culprit:
        where = f" in {captured.operation} of {captured.group}" if captured.operation else ""
        waits = f"{captured.victims} {'rank waits' if captured.victims == 1 else 'ranks wait'}{where}"
        yield f"culprit: {captured.culprit}, confidence {captured.confidence}; {waits}"
    else:
        yield captured.summary
    yield from captured.ranks
    yield from (f"missing: {sentence}" for sentence in captured.missing)


def why(reference: str | None, folder: str | None = None) -> Why:
    """Of the run that ``reference`` names, or of the captures in ``folder`` (or one file).

    Raises:
        UsageError: neither is given; no such run or folder; nothing in it is a capture.
    """
    if folder is not None:
        return _of_captures(Path(folder))
    if reference is None:
        raise UsageError("no run given", hint="muster why RUN, or muster why --from DIR with captures of its ranks")
    return _of_run(reference)


def _of_run(reference: str) -> Why:
    found: dict[str, IncidentView] = {}
    damaged: list[Damage] = []
    captured: dict[str, EvidenceGathered] = {}
    kinds = (EvidenceGathered.kind, IncidentDetected.kind, IncidentDecided.kind, IncidentResolved.kind)
    for event in events(reference, kinds=kinds, on_damage=damaged.append, writer="supervisor"):
        if event.kind == EvidenceGathered.kind:
            gathered = event.read(EvidenceGathered)
            captured[gathered.incident_id] = gathered
            if known := found.get(gathered.incident_id):  # for a rank's exit it comes after the incident
                known.captured = gathered
        elif event.kind == IncidentDetected.kind:
            begun = event.read(IncidentDetected)
            found[begun.incident_id] = IncidentView(
                incident_id=begun.incident_id,
                kind=begun.incident,
                evidence=begun.evidence,
                part_of=begun.part_of,
                host=event.host,
                rank=event.rank,
                step=event.step,
                attempt=event.attempt,
                last_words=begun.message,
                hint=begun.hint,
                captured=captured.get(begun.incident_id),
            )
        elif event.kind == IncidentDecided.kind:
            decided = event.read(IncidentDecided)
            if one := found.get(decided.incident_id):
                one.action, one.reason = decided.action.value, decided.reason
        elif one := found.get(event.read(IncidentResolved).incident_id):
            one.lost_s = event.read(IncidentResolved).lost_ns / 1e9
    run = run_registry.find(reference)
    return Why(
        subject=run.run_id, incidents=tuple(reversed(found.values())), lever=_lever(reference), damaged=tuple(damaged)
    )


def _lever(reference: str) -> Lever | None:
    """The most valuable one; None as well where a damaged log says nothing about it, or a long one would take long."""
    held = event_files(run_registry.find(reference).events)
    if sum(path.stat().st_size for path in held) > LONGEST_LOG_BYTES:
        return None
    try:
        ledger = report(reference, brought=True).ledger
    except MusterError:
        return None
    budget = step_budget(ledger.events, ledger.lineage.steps, usd_per_hour(ledger))
    return budget.levers[0] if budget is not None and budget.levers else None


def _of_captures(folder: Path) -> Why:
    evidence = evidence_of(captured_files(folder))
    if not evidence.ranks and evidence.ras is None:
        first = f": {evidence.missing[0]}" if evidence.missing else ""
        raise UsageError(
            f"no capture of a rank in {folder}{first}",
            hint="flight recorder dumps, py-spy or faulthandler stacks, /proc/PID/stat, ncclras; a file for each rank",
        )
    ranks = tuple(in_words(one) for one in evidence.ranks)
    return Why(subject=str(folder), analysis=analyse(evidence), ranks=ranks)


def captured_files(folder: Path) -> Iterator[tuple[str, bytes]]:
    """(name in the folder, content), those in folders beneath it as well."""
    if not folder.exists():
        raise UsageError(f"no folder {folder}", hint="--from takes a folder of captures, or one file")
    paths = [folder] if folder.is_file() else sorted(path for path in folder.rglob("*") if path.is_file())
    if len(paths) > MOST_FILES:
        raise UsageError(f"{folder} holds {len(paths)} files", hint="--from takes a folder with captures of one moment")
    root = folder.resolve()
    for path in paths:
        if not path.resolve().is_relative_to(root):
            raise UsageError(f"{path} is a link out of the folder, to {path.resolve()}", hint="remove the link")
        try:
            with path.open("rb") as file:
                content = file.read(LARGEST_BYTES + 1)
        except OSError as error:
            raise UsageError(f"cannot read {path}: {error.strerror}", hint="check who may read it") from error
        yield str(path.relative_to(folder)) if path != folder else path.name, content
