"""What was captured of each rank, with what the kernel says of its process, as the supervisor gets it."""

from __future__ import annotations

from dataclasses import replace

from muster.agent.evidence.proc import cgroup_state, process_state
from muster.agent.values.actions import ReportEvidence, Seen
from muster.core.typed_json import Unreadable, encode
from muster.health.hang import flight_recorder, stacks
from muster.health.hang.evidence import NO_SPY, RankEvidence
from muster.protocol.to_supervisor import EvidenceReady

#: Of one rank's evidence on the wire; of what is larger the flight recorder is left out.
MOST_BYTES = 1 << 18
#: Threads and frames that are reported of a rank.
MOST_THREADS, MOST_FRAMES = 32, 40


def assemble(gathered: ReportEvidence, host: str) -> EvidenceReady:
    """Reads ``/proc`` of each rank: no rank steps while this is done."""
    if gathered.exited is not None:
        others = tuple(encode(_after_exit(seen, host)).decode() for seen in gathered.seen)
        ranks = (gathered.exited, *others)
        return EvidenceReady(attempt=gathered.attempt, ranks=ranks, exited=gathered.exited_rank)
    missing = (gathered.missing,) if gathered.missing else ()
    ranks = tuple(_evidence(gathered, seen, host) for seen in gathered.seen)
    return EvidenceReady(attempt=gathered.attempt, ranks=ranks, ras=gathered.ras, missing=missing)


def _after_exit(seen: Seen, host: str) -> RankEvidence:
    """A rank that lived when another exited; what its process does by now is the order to end."""
    threads = _threads(seen, has_spy=True, missing=[])
    return RankEvidence(rank=seen.rank, host=host, pid=seen.pid, step=seen.step, answers=True, threads=threads)


def _evidence(gathered: ReportEvidence, seen: Seen, host: str) -> str:
    missing: list[str] = []
    found = RankEvidence(
        rank=seen.rank,
        host=host,
        pid=seen.pid,
        step=seen.step,
        process=process_state(seen.pid),
        cgroup=cgroup_state(seen.pid),
        answers=seen.captured is not None,
        recorder=_recorder(seen, gathered.limit_s, missing),
        threads=_threads(seen, has_spy=gathered.has_spy, missing=missing),
        findings=seen.findings,
    )
    found = replace(found, missing=tuple(missing))
    text = encode(found).decode()
    if len(text) > MOST_BYTES:
        left_out = f"its flight recorder is too large: more than {MOST_BYTES} bytes"
        text = encode(replace(found, recorder=None, missing=(*missing, left_out))).decode()
    return text


def _recorder(seen: Seen, limit_s: float, missing: list[str]) -> flight_recorder.Recorder | None:
    if seen.captured is None:
        missing.append(f"its own thread did not answer within {limit_s:g} s")
        return None
    missing += seen.captured.problems
    found = []
    for text in seen.captured.recorders:
        try:
            found.append(flight_recorder.parse(text))
        except Unreadable as error:
            missing.append(str(error))
    if not found:
        return None
    placed = flight_recorder.placed(flight_recorder.merged(found), seen.captured.groups)
    return flight_recorder.shortened(placed)


def _threads(seen: Seen, *, has_spy: bool, missing: list[str]) -> tuple[stacks.Thread, ...] | None:
    """As seen from outside, else in the rank's own words."""
    texts = [] if seen.spied is None else [seen.spied.decode(errors="replace")]
    texts += [] if seen.captured is None else [seen.captured.stacks]
    for text in texts:
        try:
            return _bounded(stacks.parse(text))
        except Unreadable as error:
            missing.append(str(error))
    if not has_spy:
        missing.append(NO_SPY)
    return None


def _bounded(threads: tuple[stacks.Thread, ...]) -> tuple[stacks.Thread, ...]:
    """The main thread first."""
    main = stacks.main_thread(threads)
    ordered = sorted(threads, key=lambda one: one is not main)[:MOST_THREADS]
    return tuple(replace(one, main=one is main, frames=one.frames[:MOST_FRAMES]) for one in ordered)
