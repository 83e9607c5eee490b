"""Attempts, the steps they applied, and the final lineage: the one chain of steps that the last state rests on."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from muster.core.event_details.attempts import AttemptEnded, AttemptStarted
from muster.core.event_details.checkpoints import DURABLE, CheckpointCommitted, CheckpointRestored
from muster.core.typed_json import INT64_MAX
from muster.report.ledger.file_log import UNKNOWN, Flags, Floats, Ints, StepColumns
from muster.report.ledger.time_axis import Aligned, Timed

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


@dataclass(eq=False)
class Steps:
    """Applied steps as columns, in time order."""

    columns: StepColumns
    rows: Ints
    """Which of ``columns`` these are."""
    attempt: Ints
    step: Ints
    begin_ns: Ints
    """On the axis; the microseconds until an event was written are its step's."""
    end_ns: Ints
    world_size: Ints
    number: Ints
    """Counted from 0 in its attempt."""
    final: Flags
    """The last state rests on it."""
    lost_to: Ints
    """The attempt that discarded a step; 0: none did."""
    causes: Mapping[int, str | None]
    """Attempt -> the incident whose recovery it is."""

    def __len__(self) -> int:
        return len(self.rows)

    def counts(self, name: str, default: int = 0) -> Ints:
        """A whole number of their details."""
        values = self.columns.ints(name)[self.rows]
        return np.where(values == UNKNOWN, default, values)

    def numbers(self, name: str) -> Floats:
        """A number of their details; NaN where it is not known."""
        return self.columns.floats(name)[self.rows]

    @cached_property
    def tokens(self) -> Ints:
        return self.counts("tokens")

    @cached_property
    def length_ns(self) -> Ints:
        return self.end_ns - self.begin_ns

    @cached_property
    def measured_ns(self) -> Ints:
        """As the trainer measured it, and never more than the axis has room for."""
        logged = self.counts("step_ns")
        return np.where(logged > 0, np.minimum(logged, self.length_ns), self.length_ns)

    @cached_property
    def in_lineage(self) -> Ints:
        """Positions of the final ones, in the order of their numbers."""
        positions = np.flatnonzero(self.final)
        return positions[np.argsort(self.step[positions], kind="stable")]

    @cached_property
    def _seen(self) -> tuple[Ints, Ints]:
        """The final lineage's steps, and the tokens up to the end of each."""
        return self.step[self.in_lineage], np.cumsum(self.tokens[self.in_lineage])

    def tokens_seen(self, step: int) -> int | None:
        """Tokens of the final lineage up to the end of ``step``; None where it is none of its steps."""
        numbers, tokens = self._seen
        at = int(np.searchsorted(numbers, step))
        return int(tokens[at]) if at < len(numbers) and numbers[at] == step else None

    def step_at_tokens(self, most: int) -> int | None:
        """The last step of the final lineage with at most ``most`` tokens up to its end; None: there is none."""
        numbers, tokens = self._seen
        at = int(np.searchsorted(tokens, most, "right"))
        return int(numbers[at - 1]) if at else None

    def upto(self, step: int) -> Ints:
        """Positions of the final lineage up to ``step``, in order."""
        return self.in_lineage[: int(np.searchsorted(self._seen[0], step, "right"))]


@dataclass
class ResumedRange:
    """Steps of one attempt in rising order, and the step they started from."""

    attempt: int
    resume_step: int
    last_step: int
    """``resume_step`` where there are none."""
    positions: Ints = field(default_factory=lambda: np.empty(0, np.int64))
    """Of ``Lineage.steps``."""


@dataclass
class Lineage:
    """What became of every applied step."""

    attempts: list[Attempt]
    steps: Steps
    """Every applied step; ``final``: those that count."""
    resumed_ranges: list[ResumedRange]
    fenced: int = 0
    """Step events of an attempt that had already been replaced: they changed nothing."""
    missing: int = 0
    """Steps of the final lineage that have no event: a rank was killed before it wrote it, or a log lost its tail."""
    reached: dict[int, int] = field(default_factory=dict)
    """Attempt -> the highest step that it applied, what it applied after its end was decided included."""

    def last_end_ns(self, default: int) -> int:
        """When the last step ended; ``default``: there was none."""
        return int(self.steps.end_ns.max()) if len(self.steps) else default


def trace(aligned: Aligned, outcome: str | None) -> Lineage:
    """Fold attempts and steps out of the events. The last event closes what is still open; ``outcome`` None: runs.

    A run that ended without success keeps only what a disk or bucket checkpoint holds: memory ended with it.
    """
    events = aligned.events
    attempts = _attempts(events, aligned.span_ns[1])
    by_number = {attempt.number: attempt for attempt in attempts}
    steps, reached, fenced = _applied(aligned, by_number)
    resumed_ranges = _resumed_ranges(attempts, steps, _restored(events))
    missing = _mark_final(resumed_ranges, by_number, _durable_limit(events, outcome), steps)
    return Lineage(
        attempts=attempts,
        steps=steps,
        resumed_ranges=resumed_ranges,
        fenced=fenced,
        missing=missing,
        reached=reached,
    )


def _applied(aligned: Aligned, attempts: Mapping[int, Attempt]) -> tuple[Steps, dict[int, int], int]:
    """The steps that changed something; attempt -> the highest it applied; how many were fenced."""
    numbers, t_ns = aligned.steps.ints("attempt"), aligned.step_ns
    rows = np.lexsort((t_ns, numbers))  # attempt by attempt, each in time order
    rows = rows[np.isin(numbers[rows], list(attempts))]
    applied = aligned.steps.ints("step")
    of_rows, at = np.unique(numbers[rows], return_inverse=True)
    own = [attempts[number] for number in of_rows.tolist()]
    reached = np.zeros(len(own), np.int64)
    np.maximum.at(reached, at, applied[rows])
    closed_ns = np.array([attempt.end_ns if attempt.closed else INT64_MAX for attempt in own], np.int64)
    kept = t_ns[rows] <= closed_ns[at]
    fenced, rows, at = int((~kept).sum()), rows[kept], at[kept]
    start = np.array([attempt.start_ns for attempt in own], np.int64)[at]
    end = np.maximum(t_ns[rows], start)
    first = np.diff(at, prepend=-1) != 0
    floor = np.where(first, start, np.roll(end, 1))
    took = np.maximum(0, aligned.steps.ints("step_ns")[rows])
    begin = np.maximum(floor, t_ns[rows] - took)
    begin = np.where(begin - floor < np.maximum(_SEAM_NS, took // 100), floor, begin)
    position = np.arange(len(rows))
    number = position - np.maximum.accumulate(np.where(first, position, 0))
    in_time = np.lexsort((rows, t_ns[rows]))
    rows, at = rows[in_time], at[in_time]
    steps = Steps(
        columns=aligned.steps,
        rows=rows,
        attempt=numbers[rows],
        step=applied[rows],
        begin_ns=begin[in_time],
        end_ns=end[in_time],
        world_size=np.array([attempt.world_size for attempt in own], np.int64)[at],
        number=number[in_time],
        final=np.zeros(len(rows), np.bool_),
        lost_to=np.zeros(len(rows), np.int64),
        causes={attempt.number: attempt.cause for attempt in attempts.values()},
    )
    return steps, dict(zip(of_rows.tolist(), reached.tolist(), strict=True)), fenced


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


def _resumed_ranges(attempts: Sequence[Attempt], steps: Steps, restored: dict[int, int]) -> list[ResumedRange]:
    """Cut each attempt's steps where the numbers do not rise: a rollback within the attempt."""
    result: list[ResumedRange] = []
    for attempt in attempts:
        own = np.flatnonzero(steps.attempt == attempt.number)
        numbers = steps.step[own]
        planned = attempt.resume_step if attempt.resume_step is not None and attempt.resume_step >= 0 else None
        resume = int(numbers[0]) - 1 if len(own) else restored.get(attempt.number, planned)
        if resume is None:
            continue  # it never held a state
        if planned is not None:
            resume = min(resume, planned)  # the event of its first step may be missing
        resume = max(0, resume)
        for piece in np.split(own, np.flatnonzero(np.diff(numbers) <= 0) + 1):
            last = int(steps.step[piece[-1]]) if len(piece) else resume
            if len(piece) and piece[0] != own[0]:
                resume = int(steps.step[piece[0]]) - 1
            result.append(ResumedRange(attempt.number, resume, last, piece))
    return result


def _mark_final(
    resumed_ranges: Sequence[ResumedRange], attempts: dict[int, Attempt], limit: int | None, steps: Steps
) -> int:
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
        counts = steps.step[resumed.positions] <= (INT64_MAX if limit is None else limit)
        steps.final[resumed.positions] = counts
        missing += max(0, newest - resumed.resume_step - int(counts.sum()))
        newest = limit = resumed.resume_step if limit is None else min(limit, resumed.resume_step)
        position = _base(resumed_ranges, position, limit, attempts)
    for position, resumed in enumerate(resumed_ranges):
        lost = resumed.positions[~steps.final[resumed.positions]]
        for later in resumed_ranges[position + 1 :]:
            if not len(lost):
                break
            discarded = steps.step[lost] > later.resume_step
            steps.lost_to[lost[discarded]] = later.attempt
            lost = lost[~discarded]
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
