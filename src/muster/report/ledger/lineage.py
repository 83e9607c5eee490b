"""Attempts, the steps they applied, and the final lineage: the one chain of steps that the last state rests on."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from muster.core.event_details import training
from muster.core.event_details.attempts import AttemptEnded, AttemptStarted
from muster.core.event_details.checkpoints import DURABLE, CheckpointCommitted, CheckpointRestored
from muster.report.ledger.time_axis import Timed

#: A step's event is stamped microseconds after the step's end: a smaller gap is ignored.
_SEAM_NS = 1_000_000


@dataclass
class Attempt:
    """One world of ranks, from its start until it was ended or replaced. Times on the axis."""

    number: int
    start_ns: int
    end_ns: int
    hosts: dict[str, list[int]]
    world_size: int
    layout: Mapping[str, int] = field(default_factory=dict)
    resume_step: int | None = None
    resume_attempt: int | None = None
    """The attempt whose snapshot it started from."""
    tier: str | None = None
    cause: str | None = None
    end_reason: str | None = None
    closed: bool = False


@dataclass
class Step:
    """One optimizer step that was applied, in some attempt."""

    attempt: int
    step: int
    begin_ns: int
    end_ns: int
    world_size: int
    detail: training.Step
    final: bool = False
    lost_to: str | None = None
    """The incident whose recovery discarded this step."""

    @property
    def tokens(self) -> int:
        return self.detail.tokens or 0

    @property
    def length_ns(self) -> int:
        """On the axis, the microseconds until its event was written included."""
        return self.end_ns - self.begin_ns

    @property
    def measured_ns(self) -> int:
        """As the trainer measured it, and never more than the axis has room for."""
        logged = self.detail.step_ns
        return min(logged, self.length_ns) if logged > 0 else self.length_ns


@dataclass
class ResumedRange:
    """Steps of one attempt in rising order, and the step they started from."""

    attempt: int
    resume_step: int
    steps: list[Step] = field(default_factory=list)

    @property
    def last_step(self) -> int:
        return self.steps[-1].step if self.steps else self.resume_step


@dataclass
class Lineage:
    """What became of every applied step."""

    attempts: list[Attempt]
    steps: list[Step]
    """Every applied step, in time order; ``final``: those that count."""
    resumed_ranges: list[ResumedRange]
    fenced: int = 0
    """Step events of an attempt that had already been replaced: they changed nothing."""
    missing: int = 0
    """Steps of the final lineage that have no event: a rank was killed before it wrote it, or a log lost its tail."""
    reached: dict[int, int] = field(default_factory=dict)
    """Attempt -> the highest step that it applied, what it applied after its end was decided included."""

    @property
    def final(self) -> list[Step]:
        """The final lineage, in step order."""
        return sorted((step for step in self.steps if step.final), key=lambda step: step.step)


def trace(events: Sequence[Timed], end_ns: int, outcome: str | None) -> Lineage:
    """Fold attempts and steps out of the events. ``end_ns`` closes what is still open; ``outcome`` None: runs.

    A run that ended without success keeps only what a disk or bucket checkpoint holds: memory ended with it.
    """
    attempts = _attempts(events, end_ns)
    by_number = {attempt.number: attempt for attempt in attempts}
    steps: list[Step] = []
    fenced = 0
    last_end: dict[int, int] = {}
    reached: dict[int, int] = {}
    for timed in events:
        event = timed.event
        if event.kind != training.Step.kind or event.step is None or event.rank not in (0, None):
            continue
        attempt = by_number.get(event.attempt)
        if attempt is None:
            continue
        reached[event.attempt] = max(event.step, reached.get(event.attempt, 0))
        if timed.t_ns > attempt.end_ns and attempt.closed:
            fenced += 1
            continue
        floor = last_end.get(event.attempt, attempt.start_ns)
        detail = event.read(training.Step)
        length = max(0, detail.step_ns)
        begin = max(floor, timed.t_ns - length)
        if begin - floor < max(_SEAM_NS, length // 100):
            begin = floor
        end = max(begin, timed.t_ns)
        last_end[event.attempt] = end
        steps.append(
            Step(
                attempt=event.attempt,
                step=event.step,
                begin_ns=begin,
                end_ns=end,
                world_size=attempt.world_size,
                detail=detail,
            )
        )
    resumed_ranges = _resumed_ranges(attempts, steps, _restored(events))
    missing = _mark_final(resumed_ranges, by_number, _durable_limit(events, outcome))
    return Lineage(
        attempts=attempts,
        steps=steps,
        resumed_ranges=resumed_ranges,
        fenced=fenced,
        missing=missing,
        reached=reached,
    )


def _attempts(events: Sequence[Timed], end_ns: int) -> list[Attempt]:
    result: dict[int, Attempt] = {}
    for timed in events:
        event = timed.event
        if event.kind == AttemptStarted.kind and event.attempt not in result:
            detail = event.read(AttemptStarted)
            result[event.attempt] = Attempt(
                number=event.attempt,
                start_ns=timed.t_ns,
                end_ns=end_ns,
                hosts={host: list(ranks) for host, ranks in detail.hosts.items()},
                world_size=detail.world_size,
                layout=detail.layout,
                resume_step=detail.resume_step,
                resume_attempt=detail.resume_attempt,
                tier=detail.tier,
                cause=detail.cause,
            )
        elif event.kind == AttemptEnded.kind and event.attempt in result and not result[event.attempt].closed:
            attempt = result[event.attempt]
            attempt.end_ns, attempt.closed = max(attempt.start_ns, timed.t_ns), True
            attempt.end_reason = event.read(AttemptEnded).reason
    if not result:
        _attempts_of_ranks(events, end_ns, result)
    ordered = sorted(result.values(), key=lambda attempt: attempt.number)
    for attempt, following in itertools.pairwise(ordered):
        if attempt.end_ns > following.start_ns or not attempt.closed:
            attempt.end_ns, attempt.closed = max(attempt.start_ns, following.start_ns), True
    return ordered


def _attempts_of_ranks(events: Sequence[Timed], end_ns: int, result: dict[int, Attempt]) -> None:
    """A log without a supervisor (a lone trainer): attempts are read from its ranks' events."""
    for timed in events:
        event = timed.event
        if event.rank is None:
            continue
        attempt = result.setdefault(
            event.attempt, Attempt(number=event.attempt, start_ns=timed.t_ns, end_ns=end_ns, hosts={}, world_size=0)
        )
        ranks = attempt.hosts.setdefault(event.host, [])
        if event.rank not in ranks:
            ranks.append(event.rank)
            attempt.world_size += 1


def _restored(events: Sequence[Timed]) -> dict[int, int]:
    """Attempt -> the step that its ranks restored."""
    return {
        timed.event.attempt: timed.event.step
        for timed in events
        if timed.event.kind == CheckpointRestored.kind and timed.event.step is not None
    }


def _durable_limit(events: Sequence[Timed], outcome: str | None) -> int | None:
    """Newest restorable step of a run that failed or was stopped; None: no limit."""
    if outcome in (None, "succeeded"):
        return None
    committed = (timed.event for timed in events if timed.event.kind == CheckpointCommitted.kind)
    durable = (event for event in committed if event.read(CheckpointCommitted).tier in DURABLE)
    return max((event.step or 0 for event in durable), default=0)


def _resumed_ranges(attempts: Sequence[Attempt], steps: Sequence[Step], restored: dict[int, int]) -> list[ResumedRange]:
    """Cut each attempt's steps where the numbers do not rise: a rollback within the attempt."""
    result: list[ResumedRange] = []
    for attempt in attempts:
        own = [step for step in steps if step.attempt == attempt.number]
        planned = attempt.resume_step if attempt.resume_step is not None and attempt.resume_step >= 0 else None
        resume = own[0].step - 1 if own else restored.get(attempt.number, planned)
        if resume is None:
            continue  # it never held a state
        if planned is not None:
            resume = min(resume, planned)  # the event of its first step may be missing
        resumed = ResumedRange(attempt=attempt.number, resume_step=max(0, resume))
        for step in own:
            if step.step <= resumed.last_step and resumed.steps:
                result.append(resumed)
                resumed = ResumedRange(attempt=attempt.number, resume_step=step.step - 1)
            resumed.steps.append(step)
        result.append(resumed)
    return result


def _mark_final(resumed_ranges: Sequence[ResumedRange], attempts: dict[int, Attempt], limit: int | None) -> int:
    """Walk back from the last state and mark what it rests on; returns how many of its steps have no event.

    What is not on that path was lost to the recovery that discarded it.
    """
    if not resumed_ranges:
        return 0
    missing = 0
    position: int | None = len(resumed_ranges) - 1
    newest = resumed_ranges[-1].last_step if limit is None else min(limit, resumed_ranges[-1].last_step)
    while position is not None:
        resumed = resumed_ranges[position]
        for step in resumed.steps:
            step.final = limit is None or step.step <= limit
        missing += max(0, newest - resumed.resume_step - sum(step.final for step in resumed.steps))
        newest = limit = resumed.resume_step if limit is None else min(limit, resumed.resume_step)
        position = _base(resumed_ranges, position, limit, attempts)
    for position, resumed in enumerate(resumed_ranges):
        for step in resumed.steps:
            if not step.final:
                discarding = (later for later in resumed_ranges[position + 1 :] if later.resume_step < step.step)
                step.lost_to = next((attempts[discard.attempt].cause for discard in discarding), None)
    return missing


def _base(
    resumed_ranges: Sequence[ResumedRange], position: int, limit: int, attempts: dict[int, Attempt]
) -> int | None:
    """The earlier range that the state of step ``limit`` at ``position`` comes from; None: it starts the run.

    The range of the attempt that took the snapshot, where the log names it: a rank that is killed after its snapshot
    and before its step's event leaves a range that ends below ``limit``. Else the newest that reached ``limit`` (a
    restart that stepped back and was itself replaced by one that stepped back less discards nothing), else the newest
    that began below it.
    """
    earlier = [at for at in range(position) if resumed_ranges[at].resume_step <= limit]
    own = resumed_ranges[position].attempt
    if position == 0 or resumed_ranges[position - 1].attempt != own:  # not a rollback within the attempt
        named = [at for at in earlier if resumed_ranges[at].attempt == attempts[own].resume_attempt]
        if named:
            return named[-1]
    reached = [at for at in earlier if limit <= resumed_ranges[at].last_step]
    return max(reached or earlier, default=None)
