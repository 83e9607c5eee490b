"""The ledger: a pure fold over the event log into host-time by category, tokens, incidents and exposure.

Identity: over all hosts, the nanoseconds in ``categories`` sum to the nanoseconds held. It holds by
tiling, not by a remainder: what the log does not explain is ``unattributed`` or ``other``, by name.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from muster.core.event_details.attempts import AttemptStarted
from muster.core.event_details.hosts import HostRequested
from muster.core.event_details.run import RunFinished, RunSubmitted
from muster.core.events import Event
from muster.report.ledger.categories import CATEGORIES, RECOVERY
from muster.report.ledger.coverage import Coverage, split
from muster.report.ledger.file_log import FileLog
from muster.report.ledger.host_timeline import HostLane, Segment, build_segments, held_lanes, index_events
from muster.report.ledger.incident_record import IncidentRecord, incident_records
from muster.report.ledger.lineage import Lineage, trace
from muster.report.ledger.reference_rate import Reference, reference_rate
from muster.report.ledger.time_axis import Aligned, Timed, align, writer_of


@dataclass
class Ledger:
    """Everything a report is made of. Times are integer nanoseconds on the axis of ``aligned``."""

    run_id: str
    aligned: Aligned
    begin_ns: int
    end_ns: int
    finished: RunFinished | None
    lineage: Lineage
    lanes: dict[str, HostLane]
    coverage: dict[int, Coverage]
    reference: Reference | None
    incident_records: dict[str, IncidentRecord]
    host_ns: dict[str, dict[str, int]]
    """Host -> category -> nanoseconds."""
    queue_ns: int
    notes: list[str] = field(default_factory=list)

    @property
    def events(self) -> list[Timed]:
        """Without steps, but for the first of each attempt."""
        return self.aligned.events

    @property
    def held_span(self) -> tuple[int, int] | None:
        """From the first purchase to the last release; None: no host was held."""
        held = [span for lane in self.lanes.values() for span in lane.held]
        return (min(begin for begin, _ in held), max(end for _, end in held)) if held else None

    @property
    def held_spans(self) -> list[tuple[int, int]]:
        """When any host was held, in order: between two of them is a pause, as from a stop to what continued it."""
        merged: list[tuple[int, int]] = []
        for begin, end in sorted(span for lane in self.lanes.values() for span in lane.held):
            if merged and begin <= merged[-1][1]:
                merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
            else:
                merged.append((begin, end))
        return merged

    @property
    def purchased_ns(self) -> int:
        return sum(lane.held_ns for lane in self.lanes.values())

    @property
    def categories_ns(self) -> dict[str, int]:
        """Category -> host-nanoseconds over all hosts, in the order of ``CATEGORIES``."""
        return {name: sum(spent.get(name, 0) for spent in self.host_ns.values()) for name in CATEGORIES}

    @property
    def identity_error(self) -> float:
        """|sum of categories - purchased| / purchased. 0.0 where nothing was purchased."""
        purchased = self.purchased_ns
        return abs(sum(self.categories_ns.values()) - purchased) / purchased if purchased else 0.0


def fold(files: Mapping[str, FileLog | Sequence[Event]], *, reference_tokens_per_s: float | None = None) -> Ledger:
    """Read a whole run out of its files. Any order of events is accepted; nothing raises for content."""
    aligned = align(files)
    events = aligned.events
    begin, end = aligned.span_ns
    end_event = finished(events)
    lineage = trace(aligned, end_event.outcome if end_event else None)
    reference = reference_rate(events, lineage.steps, reference_tokens_per_s)
    result = incident_records(events, lineage, _shifts(events))
    steps, splits = lineage.steps, split(lineage.steps, reference)
    coverage = {
        attempt.number: Coverage(steps, np.flatnonzero(steps.attempt == attempt.number), splits, reference)
        for attempt in lineage.attempts
    }
    lanes = held_lanes(events, end)
    index = index_events(events, lineage.attempts, coverage, result, end_event is not None)
    host_ns = {}
    for host, lane in lanes.items():
        build_segments(lane, index)
        host_ns[host] = _spent(lane, coverage, result)
    _charge_redone(lineage, result)
    return Ledger(
        run_id=events[0].event.run_id if events else "",
        aligned=aligned,
        begin_ns=begin,
        end_ns=end,
        finished=end_event,
        lineage=lineage,
        lanes=lanes,
        coverage=coverage,
        reference=reference,
        incident_records=result,
        host_ns=host_ns,
        queue_ns=_queue(events, lanes, end),
        notes=[*aligned.notes, *_notes(lineage, lanes)],
    )


def finished(events: Sequence[Timed]) -> RunFinished | None:
    """The run's end, unless it was continued."""
    for timed in reversed(events):
        if timed.event.kind == RunFinished.kind:
            return timed.event.read(RunFinished)
        if timed.event.kind in (RunSubmitted.kind, AttemptStarted.kind):
            return None
    return None


def _shifts(events: Sequence[Timed]) -> dict[str, int]:
    return {timed.file: timed.t_ns - timed.event.mono_ns for timed in events if writer_of(timed.file) == "supervisor"}


def _spent(lane: HostLane, coverage: Mapping[int, Coverage], result: Mapping[str, IncidentRecord]) -> dict[str, int]:
    """Category -> nanoseconds of one host; also charges incidents with what they cost here."""
    total: dict[str, int] = defaultdict(int)
    for segment in lane.segments:
        spent = _segment(segment, coverage)
        incident = result.get(segment.incident_id or "")
        for name, ns in spent.items():
            total[name] += ns
            if incident is not None and name in (*RECOVERY, "start"):
                incident.host_ns[name] = incident.host_ns.get(name, 0) + ns
    return dict(total)


def _segment(segment: Segment, coverage: Mapping[int, Coverage]) -> dict[str, int]:
    length = segment.end_ns - segment.begin_ns
    if segment.state != "train" or segment.attempt is None:
        return {segment.state if segment.state in CATEGORIES else "unattributed": length}
    steps = coverage[segment.attempt]
    if segment.warming:
        ideal = steps.ideal_ns(segment.begin_ns, segment.end_ns)
        if ideal is not None:
            productive = min(length, ideal)
            return {"productive": productive, "warmup": length - productive}
    return steps.spent(segment.begin_ns, segment.end_ns)


def _charge_redone(lineage: Lineage, result: Mapping[str, IncidentRecord]) -> None:
    hosts = {attempt.number: len(attempt.hosts) for attempt in lineage.attempts}
    steps = lineage.steps
    for at in np.flatnonzero(steps.lost_to):
        incident = result.get(steps.causes[int(steps.lost_to[at])] or "")
        if incident is not None:
            cost_ns = int(steps.length_ns[at]) * hosts[int(steps.attempt[at])]
            incident.host_ns["redone"] = incident.host_ns.get("redone", 0) + cost_ns


def _queue(events: Sequence[Timed], lanes: Mapping[str, HostLane], end_ns: int) -> int:
    """Wall time in which hosts were requested and none was held."""
    requested = next(
        (timed.t_ns for timed in events if timed.event.kind in (RunSubmitted.kind, HostRequested.kind)), None
    )
    if requested is None:
        return 0
    begins = [begin for lane in lanes.values() for begin, _ in lane.held]
    return max(0, min(begins, default=end_ns) - requested)


def _notes(lineage: Lineage, lanes: Mapping[str, HostLane]) -> list[str]:
    result = []
    if lineage.fenced:
        result.append(f"{lineage.fenced} step events of replaced attempts were fenced: they changed nothing")
    for lane in lanes.values():
        if not lane.purchase_logged:
            result.append(f"{lane.host}: no purchase in the log; held from its first event on is an assumption")
    if lineage.missing:
        result.append(f"{lineage.missing} steps have no event: a part of the log is lost; their tokens are not counted")
    return result
