"""What every purchased host was doing, as segments that tile its purchased time without a gap."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from muster.core.event_details.attempts import PhaseChanged, RankExited
from muster.core.event_details.hosts import (
    AgentEnded,
    AgentStarted,
    HostAllocated,
    HostLost,
    HostQuarantined,
    HostReleased,
)
from muster.core.event_details.run import RunStopping
from muster.report.ledger.coverage import Coverage
from muster.report.ledger.incident_record import IncidentRecord, ended_by
from muster.report.ledger.lineage import Attempt
from muster.report.ledger.time_axis import Timed, writer_of

#: A host's state is that of its least advanced rank: earlier in this list wins.
_RANK_STATES = ("down", "restart", "detect", "start", "restore", "warmup", "checkpoint", "eval", "train", "idle")

_HOST_CHANGES = (HostLost.kind, HostQuarantined.kind, HostAllocated.kind)
_LANE_KINDS = (PhaseChanged.kind, RankExited.kind, AgentStarted.kind, *_HOST_CHANGES)


@dataclass(frozen=True)
class Segment:
    """One host in one state. ``state`` is a category, or ``train`` for time that steps cover."""

    begin_ns: int
    end_ns: int
    state: str
    attempt: int | None = None
    incident_id: str | None = None
    warming: bool = False
    """Within the warm-up phase: what exceeds a normal step is warm-up."""


@dataclass
class HostLane:
    """One host: what it cost, when it was held, and what it did."""

    host: str
    gpus: int = 1
    role: str = "active"
    usd_per_hour: float | None = None
    peak_flops: float | None = None
    machine: str | None = None
    location: str | None = None
    held: list[tuple[int, int]] = field(default_factory=list)
    segments: list[Segment] = field(default_factory=list)
    purchase_logged: bool = True

    @property
    def held_ns(self) -> int:
        return sum(end - begin for begin, end in self.held)


@dataclass
class EventIndex:
    by_host: Mapping[str, Sequence[Timed]]
    """Each host's events in time order, steps left out."""
    host_changes: Mapping[str, Sequence[tuple[int, str]]]
    """Host -> when it was allocated, lost or quarantined."""
    run_states: Sequence[tuple[int, str]]
    """The supervisor's own phases (hold, wait): the whole run's, not a rank's."""
    attempts: Sequence[Attempt]
    coverage: Mapping[int, Coverage]
    incident_records: Mapping[str, IncidentRecord]
    finished: bool
    asked: Mapping[int, tuple[int, int]] = field(default_factory=dict)
    """Attempt -> when its ranks were asked to leave, and with which exit code."""


def index_events(
    events: Sequence[Timed],
    attempts: Sequence[Attempt],
    coverage: Mapping[int, Coverage],
    incident_records: Mapping[str, IncidentRecord],
    finished: bool,
) -> EventIndex:
    """Index the events once; every lane reads from this."""
    by_host: dict[str, list[Timed]] = defaultdict(list)
    run_states = []
    asked: dict[int, tuple[int, int]] = {}
    for timed in events:
        event = timed.event
        if event.kind == RunStopping.kind:
            asked.setdefault(event.attempt, (timed.t_ns, event.read(RunStopping).exit_code))
        if event.kind in _LANE_KINDS:
            by_host[event.host].append(timed)
            if event.phase in ("hold", "wait") and event.rank is None and writer_of(timed.file) == "supervisor":
                run_states.append((timed.t_ns, event.phase))
    return EventIndex(
        by_host=by_host,
        host_changes={
            host: [(timed.t_ns, timed.event.kind) for timed in result if timed.event.kind in _HOST_CHANGES]
            for host, result in by_host.items()
        },
        run_states=run_states,
        attempts=attempts,
        coverage=coverage,
        incident_records=incident_records,
        finished=finished,
        asked=asked,
    )


def held_lanes(events: Sequence[Timed], end_ns: int) -> dict[str, HostLane]:
    """Hosts and when they were held. Still held at ``end_ns``: closed there."""
    lanes: dict[str, HostLane] = {}
    since: dict[str, int] = {}
    for timed in events:
        event = timed.event
        if event.kind == HostAllocated.kind:
            lane = lanes.setdefault(event.host, HostLane(host=event.host))
            detail = event.read(HostAllocated)
            since.setdefault(event.host, timed.t_ns)
            lane.gpus = max(1, detail.gpus)
            lane.role = detail.role
            lane.usd_per_hour = lane.usd_per_hour if detail.usd_per_hour is None else detail.usd_per_hour
            lane.peak_flops = lane.peak_flops if detail.peak_flops is None else detail.peak_flops
            lane.machine, lane.location = detail.machine, detail.location
        elif event.kind == HostReleased.kind and event.host in since:
            lanes[event.host].held.append((since.pop(event.host), timed.t_ns))
    for host, begin in since.items():
        lanes[host].held.append((begin, max(begin, end_ns)))
    return dict(sorted({**lanes, **_without_purchase(events, lanes, end_ns)}.items()))


def _without_purchase(events: Sequence[Timed], known: Mapping[str, HostLane], end_ns: int) -> dict[str, HostLane]:
    """Hosts that ran ranks although no purchase is logged: held from their first sign of life to their last."""
    first: dict[str, int] = {}
    last: dict[str, int] = {}
    ranks: dict[str, set[int]] = defaultdict(set)
    for timed in events:
        host = timed.event.host
        if host in known or writer_of(timed.file) in ("supervisor", "client"):
            continue
        first.setdefault(host, timed.t_ns)
        last[host] = timed.t_ns if timed.event.kind == AgentEnded.kind else end_ns
        if timed.event.rank is not None:
            ranks[host].add(timed.event.rank)
    return {
        host: HostLane(host=host, gpus=max(1, len(ranks[host])), held=[(begin, last[host])], purchase_logged=False)
        for host, begin in first.items()
    }


def build_segments(lane: HostLane, index: EventIndex) -> None:
    """Fill ``lane.segments``: they tile every held interval."""
    result: list[Segment] = []
    for begin, end in lane.held:
        for segment in _timeline(lane, index, begin, end):
            if segment.end_ns <= segment.begin_ns:
                continue
            before = result[-1] if segment.begin_ns > begin else None  # what an earlier purchase ended with stays apart
            if before and replace(before, begin_ns=before.end_ns, end_ns=segment.end_ns) == segment:
                segment = replace(segment, begin_ns=result.pop().begin_ns)
            result.append(segment)
    lane.segments = result


def _timeline(lane: HostLane, index: EventIndex, begin: int, end: int) -> Iterator[Segment]:
    """One held interval, from moment to moment between attempts' starts and ends."""
    at = begin
    previous: Attempt | None = None
    for position, attempt in enumerate(index.attempts):
        following = index.attempts[position + 1] if position + 1 < len(index.attempts) else None
        upto = min(end, attempt.start_ns)
        if at < upto:
            yield from _between(lane, index, previous, attempt, at, upto)
            at = upto
        upto = min(end, attempt.end_ns)
        if at < upto:
            yield from _inside(lane, index, attempt, following, at, upto)
            at = upto
        previous = attempt
    if at < end:
        yield from _between(lane, index, previous, None, at, end)


# ---------------------------------------------------------------- between attempts


def _between(
    lane: HostLane, index: EventIndex, before: Attempt | None, after: Attempt | None, begin: int, end: int
) -> Iterator[Segment]:
    if before is None:
        ready = _ready(lane, index, begin)
        ready = begin if ready is None and not lane.purchase_logged else ready
        yield Segment(begin, min(end, end if ready is None else max(begin, ready)), "provision")
        if ready is not None and ready < end:
            yield Segment(max(begin, ready), end, "start")
        return
    incident = ended_by(before, after, index.incident_records)
    name = incident.incident_id if incident else None
    was_spare = lane.role == "spare"
    used = lane.host in before.hosts or (after is not None and lane.host in after.hosts and not was_spare)
    cuts = [*(t for t, _ in index.run_states), *_own_losses(lane, index)]
    for lower, upper in _cut(begin, end, cuts):
        if _lost_before(lane, index, lower):
            state = "out"
        elif not used:
            state = "spare"
        elif after is None and (incident is None or not incident.stopped_training or index.finished):
            state = _run_state(index, lower, before.start_ns) or "idle"
        else:
            state = _run_state(index, lower, before.start_ns) or "restart"
        yield Segment(lower, upper, state, None, name if state in ("restart", "wait") else None)


def _run_state(index: EventIndex, at: int, since: int) -> str | None:
    return next((phase for t, phase in reversed(index.run_states) if since <= t <= at), None)


def _own_losses(lane: HostLane, index: EventIndex) -> list[int]:
    return [t for t, _ in index.host_changes.get(lane.host, ())]


def _lost_before(lane: HostLane, index: EventIndex, at: int) -> bool:
    """Lost, quarantined or back again, and not used since."""
    state = False
    used = [attempt.start_ns for attempt in index.attempts if lane.host in attempt.hosts]
    for t, kind in index.host_changes.get(lane.host, ()):
        if t <= at:
            state = kind != HostAllocated.kind and not any(t < start <= at for start in used)
    return state


# ---------------------------------------------------------------- inside an attempt


def _inside(
    lane: HostLane, index: EventIndex, attempt: Attempt, following: Attempt | None, begin: int, end: int
) -> Iterator[Segment]:
    if lane.host not in attempt.hosts:
        ready = _ready(lane, index, begin) or begin
        for lower, upper in _cut(begin, end, [*_own_losses(lane, index), ready]):
            unborn = "provision" if upper <= ready else "spare"
            yield Segment(lower, upper, "out" if _lost_before(lane, index, lower) else unborn)
        return
    incident = ended_by(attempt, following, index.incident_records)
    first = attempt is index.attempts[0]
    coverage = index.coverage[attempt.number]
    for lower, upper, phase in _phases(lane, index, attempt, begin, end):
        for a, b in _cut(lower, upper, [incident.fault_ns, incident.detected_ns] if incident else []):
            yield from _classified(index, attempt, incident, coverage, a, b, phase, first)


def _cut(begin: int, end: int, moments: Iterable[int]) -> Iterator[tuple[int, int]]:
    """The span, cut at the moments that are inside it."""
    return itertools.pairwise(sorted({begin, end, *(t for t in moments if begin < t < end)}))


def _classified(
    index: EventIndex,
    attempt: Attempt,
    incident: IncidentRecord | None,
    coverage: Coverage,
    begin: int,
    end: int,
    phase: str,
    first: bool,
) -> Iterator[Segment]:
    """One span in one phase: what steps cover is training, the rest is named by its place."""
    number = attempt.number
    if phase in ("train", "warmup", "down", "idle"):
        for lower, upper, final in coverage.pieces(begin, end):
            if final is not None:
                yield Segment(lower, upper, "train" if final else "redone", number, None, phase == "warmup" and final)
            else:
                state = _gap(index, attempt, incident, coverage, lower, upper, phase)
                yield _tagged(lower, upper, state, attempt, incident, coverage)
        return
    if incident is not None and begin >= incident.fault_ns and phase not in ("checkpoint", "eval"):
        phase = "detect" if begin < incident.detected_ns else "restart"
    elif phase == "start" and not first:
        phase = "restart"
    yield _tagged(begin, end, phase, attempt, incident, coverage)


def _gap(
    index: EventIndex,
    attempt: Attempt,
    incident: IncidentRecord | None,
    coverage: Coverage,
    begin: int,
    end: int,
    phase: str,
) -> str:
    """Time in training that no applied step covers."""
    tail = coverage.last_end_ns is None or begin >= coverage.last_end_ns
    if incident is not None and begin >= incident.fault_ns:
        return "detect" if begin < incident.detected_ns else "restart"
    if phase == "idle":
        return "idle"
    if phase == "down":
        return "detect" if incident is not None or not attempt.closed else "idle"
    if not tail:
        return "warmup" if phase == "warmup" else "other"
    if incident is not None or not index.finished:
        return "unfinished"
    return "warmup" if phase == "warmup" else "other"


def _tagged(
    begin: int, end: int, state: str, attempt: Attempt, incident: IncidentRecord | None, coverage: Coverage
) -> Segment:
    """Name the incident that this loss belongs to: the one that ended the attempt, or the one it recovers from."""
    name = None
    if state in ("detect", "restart", "restore", "warmup", "wait", "unfinished", "start"):
        first = coverage.first_begin_ns
        if incident is not None and (begin >= incident.fault_ns or state == "unfinished"):
            name = incident.incident_id
        elif first is None or begin <= first:
            name = attempt.cause
    return Segment(begin, end, state, attempt.number, name)


def _phases(
    lane: HostLane, index: EventIndex, attempt: Attempt, begin: int, end: int
) -> Iterator[tuple[int, int, str]]:
    """(begin, end, phase) of the host in this attempt: that of its least advanced rank."""
    ranks = attempt.hosts[lane.host]
    changes = list(_changes(index, lane.host, attempt))
    if not any(phase not in ("down", "idle") for _, _, phase in changes):
        yield from _phases_by_steps(index, attempt, begin, end)
        return
    states = dict.fromkeys(ranks, "start")
    at = begin
    for t, rank, phase in changes:
        moment = min(max(t, begin), end)
        if moment > at:
            yield at, moment, _worst(states.values())
            at = moment
        if rank is None:
            states = dict.fromkeys(states, phase)
        elif states.get(rank) != "down":
            states[rank] = phase
    if at < end:
        yield at, end, _worst(states.values())


def _phases_by_steps(index: EventIndex, attempt: Attempt, begin: int, end: int) -> Iterator[tuple[int, int, str]]:
    """Ranks that log no phases: what steps cover is training, the time before them the start."""
    first = index.coverage[attempt.number].first_begin_ns
    moment = end if first is None else min(max(first, begin), end)
    if begin < moment:
        yield begin, moment, "start"
    if moment < end:
        yield moment, end, "train"


def _changes(index: EventIndex, host: str, attempt: Attempt) -> Iterator[tuple[int, int | None, str]]:
    for timed in index.by_host.get(host, ()):
        event = timed.event
        if event.attempt != attempt.number:
            continue
        if event.kind == PhaseChanged.kind and event.phase is not None:
            yield timed.t_ns, event.rank, event.phase
        elif event.kind == RankExited.kind and event.rank is not None:
            code = event.read(RankExited).exit_code
            since, left_with = index.asked.get(attempt.number, (timed.t_ns, 0))
            on_purpose = timed.t_ns >= since and code in (0, left_with)
            yield timed.t_ns, event.rank, "idle" if on_purpose else "down"


def _worst(states: Iterable[str]) -> str:
    known = [state if state in _RANK_STATES else "idle" for state in states]
    return min(known, key=_RANK_STATES.index, default="start")


def _ready(lane: HostLane, index: EventIndex, at: int) -> int | None:
    """When the agent was up in the purchase that holds ``at``; its event may precede the purchase's."""
    since = max((end for _, end in lane.held if end <= at), default=None)
    ready = (timed.t_ns for timed in index.by_host.get(lane.host, ()) if timed.event.kind == AgentStarted.kind)
    return next((t for t in ready if since is None or t > since), None)
