"""How long things take, and the state of a segment of steps at a moment. Pure arithmetic, in seconds."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field


@dataclass(frozen=True, kw_only=True)
class Stages:
    """How long things take, in seconds. Defaults: measured on CPU processes (docs/explanation/recovery.md)."""

    step_s: float = 0.3
    flush_s: float = 0.5
    """A host writes its share of a version in its memory."""
    detect_exit_s: float = 0.03
    detect_silence_s: float = 3.0
    end_ranks_s: float = 0.03
    start_s: float = 0.15
    """Group, build, shard, restore: from the start message to the first step's begin."""
    warmup_s: float = 0.0
    agent_start_s: float = 5.0
    first_start_s: float | None = None
    """Start and warm-up of the first attempt, where they differ (nothing is warm yet)."""
    relayout_s: float = 0.0
    """Added where the new attempt has another size: resharding, other communicators."""
    overhead: float = 0.0
    """What fault tolerance costs every step, as a share of it."""

    def starting(self, draw: Callable[[str, float], float], *, first: bool, other_size: bool) -> tuple[float, float]:
        """(start, warm-up) of an attempt, drawn. ``other_size``: than the world before."""
        start_s, warmup_s = draw("start", self.start_s), draw("warmup", self.warmup_s)
        if first:
            return (start_s, warmup_s) if self.first_start_s is None else (self.first_start_s, 0.0)
        return start_s + (draw("relayout", self.relayout_s) if other_size else 0.0), warmup_s

    def pace_s(self, active: int, requested: int, micro_batches: int, ranks_per_host: int) -> float:
        """A step on ``active`` of ``requested`` hosts, where none is slow: the batch is constant. ``micro_batches`` of
        it are computed whole, in rounds over all ranks; 0: they divide evenly."""
        share = requested / active if active else 1.0
        if micro_batches and active:
            share = -(-micro_batches // (active * ranks_per_host)) / -(-micro_batches // (requested * ranks_per_host))
        return self.step_s * (1 + self.overhead) * share


@dataclass(frozen=True, kw_only=True)
class DiskTier:
    """Checkpoints by the clock: after ``every_s`` of training, ``stall_s`` of stall, usable
    ``drain_s`` later. A restart begins a new interval."""

    every_s: float
    stall_s: float
    drain_s: float = 0.0
    restore_s: float = 0.0

    def productive_s(self, elapsed_s: float) -> float:
        """Training time within ``elapsed_s`` of stepping."""
        cycles, rest = divmod(elapsed_s, self.every_s + self.stall_s)
        return cycles * self.every_s + min(rest, self.every_s)

    def usable_s(self, elapsed_s: float) -> float:
        """Training time that the newest usable checkpoint holds; 0: none of this stretch."""
        cycles = int(max(0.0, elapsed_s - self.drain_s) / (self.every_s + self.stall_s) + 1e-9)
        return cycles * self.every_s

    def elapsed_s(self, productive_s: float) -> float:
        """The inverse of ``productive_s``: when so much training is done."""
        return productive_s + int(productive_s / self.every_s - 1e-9) * self.stall_s


@dataclass(frozen=True, kw_only=True)
class Pace:
    """From ``from_s`` of a segment's training time (and ``steps`` done) on, a step takes ``step_s``."""

    from_s: float
    steps: float
    step_s: float
    slow: float = 1.0
    """How many times longer than without a slow host."""


@dataclass(frozen=True, kw_only=True)
class Parts:
    """A segment's seconds: elapsed = applied + unfinished + stall; a slow host's share of applied is ``slow``."""

    elapsed_s: float
    applied_s: float
    unfinished_s: float
    stall_s: float
    slow_s: float


@dataclass(kw_only=True)
class StepSegment:
    """Steps without interruption: when they began, from which step, at which paces since."""

    began_ns: int
    first_step: int
    hosts: int
    paces: list[Pace] = field(default_factory=list)

    def steps(self, productive_s: float) -> float:
        """Steps done after so much training time."""
        pace = next(pace for pace in reversed(self.paces) if pace.from_s <= productive_s or pace is self.paces[0])
        return pace.steps + (productive_s - pace.from_s) / pace.step_s

    def productive_s(self, steps: float) -> float:
        """Training time by which so many steps are done: the inverse of ``steps``."""
        pace = next(pace for pace in reversed(self.paces) if pace.steps <= steps or pace is self.paces[0])
        return pace.from_s + (steps - pace.steps) * pace.step_s

    def when_s(self, steps: float, disk: DiskTier | None) -> float:
        """The clock when so many steps are done, saves included."""
        productive_s = self.productive_s(steps)
        return self.began_ns / 1e9 + (disk.elapsed_s(productive_s) if disk else productive_s)

    def slow_s(self, productive_s: float) -> float:
        """Training time that a slow host has cost by then."""
        ends = [pace.from_s for pace in self.paces[1:]] + [productive_s]
        spans = (
            (pace, max(0.0, min(end, productive_s) - pace.from_s)) for pace, end in zip(self.paces, ends, strict=True)
        )
        return sum(span * (1 - 1 / pace.slow) for pace, span in spans)

    def change(self, productive_s: float, step_s: float, slow: float) -> None:
        """From now on a step takes ``step_s``."""
        self.paces.append(Pace(from_s=productive_s, steps=self.steps(productive_s), step_s=step_s, slow=slow))

    def parts(self, elapsed_s: float, productive_s: float, steps: int) -> Parts:
        """Its seconds, once ``steps`` whole steps turned out to be done."""
        applied_s = min(productive_s, self.productive_s(steps))
        return Parts(
            elapsed_s=elapsed_s,
            applied_s=applied_s,
            unfinished_s=productive_s - applied_s,
            stall_s=elapsed_s - productive_s,
            slow_s=self.slow_s(applied_s),
        )
