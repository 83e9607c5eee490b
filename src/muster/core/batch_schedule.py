"""How batch size and learning rate changed with the number of ranks. Pure.

By default nothing changes: the global batch is the same on any number of ranks. A user's policy may choose
otherwise. Then the data order is a function of (seed, schedule, step), and the schedule is in the event
log, so that a resume repeats and skips nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from muster.core.errors import UsageError
from muster.core.typed_json import JsonObject, Record


@dataclass(frozen=True, kw_only=True)
class BatchSegment(Record):
    """Sequences per step and factor of the learning rate, from ``first_step`` until the next segment."""

    first_step: int
    global_batch_size: int
    learning_rate_scale: float = 1.0

    def to_json(self) -> JsonObject:
        return dict(vars(self))


@dataclass(frozen=True)
class BatchSchedule:
    """The segments of a run, in order; the first begins at step 1."""

    stretches: tuple[BatchSegment, ...]

    @classmethod
    def of(cls, global_batch_size: int, changes: Iterable[BatchSegment] = ()) -> BatchSchedule:
        """The run file's batch from step 1 on, and what was changed since."""
        first = BatchSegment(first_step=1, global_batch_size=global_batch_size)
        return cls((first, *changes))

    def at(self, step: int) -> BatchSegment:
        """The segment of ``step``."""
        return next(stretch for stretch in reversed(self.stretches) if stretch.first_step <= step or step < 1)

    def sequences_before(self, step: int) -> int:
        """Sequences that the steps before ``step`` take: the offset of its own in the run's endless list."""
        ends = [stretch.first_step for stretch in self.stretches[1:]] + [step]
        return sum(
            max(0, min(end, step) - stretch.first_step) * stretch.global_batch_size
            for stretch, end in zip(self.stretches, ends, strict=True)
        )

    def last_step(self, sequences: int) -> int:
        """The first step at whose end ``sequences`` sequences have been taken."""
        stretch = next(
            stretch
            for stretch in reversed(self.stretches)
            if self.sequences_before(stretch.first_step) < sequences or stretch is self.stretches[0]
        )
        left = sequences - self.sequences_before(stretch.first_step)
        return max(1, stretch.first_step - 1 + -(-left // stretch.global_batch_size))


def changed(
    changes: Iterable[BatchSegment], *, resume_step: int, batch: int, requested: Mapping[str, object]
) -> tuple[BatchSegment, ...]:
    """``changes`` with what a policy's ``adjust`` requests after ``resume_step``; empty: the batch never changed.

    Raises:
        UsageError: the policy requests an invalid batch or rate.
    """
    kept = tuple(change for change in changes if change.first_step <= resume_step)
    now = BatchSchedule.of(batch, kept).at(resume_step + 1)
    if unknown := set(requested) - {"global_batch_size", "learning_rate_scale"}:
        raise UsageError(
            f"recovery.policy: adjust() requests {', '.join(sorted(unknown))}",
            hint="it may give global_batch_size and learning_rate_scale",
        )
    size = requested.get("global_batch_size", batch)
    scale = requested.get("learning_rate_scale", 1.0)
    if not isinstance(size, int) or isinstance(size, bool) or size < 1:
        raise UsageError(f"recovery.policy: adjust() requests a global batch of {size!r}", hint="give 1 or more")
    if isinstance(scale, bool) or not isinstance(scale, int | float) or not 0 < scale < float("inf"):
        raise UsageError(f"recovery.policy: adjust() requests the rate times {scale!r}", hint="give a number above 0")
    new = BatchSegment(first_step=resume_step + 1, global_batch_size=size, learning_rate_scale=float(scale))
    if (now.global_batch_size, now.learning_rate_scale) == (new.global_batch_size, new.learning_rate_scale):
        return kept
    return (*kept, new)
