"""Goodput while a run goes on, from its events alone: the definition of the ledger's figure, in constant memory.

The ledger (``ledger.figures.goodput``) reads a whole log. Here the reference of a run that measured none is the median
of the newest of its clean steps (``_NEWEST``), and a step that was lost counts until the next attempt resumes.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from statistics import median

from muster.core.event_details.attempts import AttemptStarted
from muster.core.event_details.checkpoints import CheckpointRestored
from muster.core.event_details.hosts import HostAllocated, HostReleased
from muster.core.event_details.training import BaselineRate, Step
from muster.core.events import Event
from muster.report.ledger.categories import MIN_CLEAN_STEPS, WARMUP_STEPS

#: Clean steps that a reference rests on, and steps that a recovery may take back.
_NEWEST, _TAKEN_BACK = 501, 4096


@dataclass
class RunningGoodput:
    """Feed it every event of a run, in order."""

    _attempt: int = 0
    _world: int = 0
    _steps: int = 0
    """Of this attempt."""
    _tokens: int = 0
    """Of the steps that count."""
    _counted: deque[tuple[int, int]] = field(default_factory=lambda: deque(maxlen=_TAKEN_BACK))
    """The newest of them: (step, tokens), in rising order."""
    _newest: int = -1
    _clean: dict[int, deque[tuple[int, float]]] = field(default_factory=dict)
    """Ranks -> the newest clean steps: (step, nanoseconds for a token)."""
    _measured: tuple[float, int] | None = None
    """(tokens per second, of so many ranks), with fault tolerance off."""
    _held: dict[str, tuple[int, int]] = field(default_factory=dict)
    """Host -> (since when, its ranks)."""
    _rank_ns: int = 0
    """Of hosts that were released."""
    _any_since_ns: int = 0
    _any_ns: int = 0
    """In which any host was held, up to when none was."""

    def add(self, event: Event) -> None:
        """Take one event; kinds that do not matter are ignored."""
        if event.kind == Step.kind:
            self._on_step(event)
        elif event.kind == AttemptStarted.kind and event.attempt > self._attempt:
            begun = event.read(AttemptStarted)
            self._attempt, self._world, self._steps = event.attempt, begun.world_size, 0
            if begun.resume_step is not None:
                self._take_back(begun.resume_step)
        elif event.kind == CheckpointRestored.kind and event.step is not None and event.attempt == self._attempt:
            self._take_back(event.step)
        elif event.kind == BaselineRate.kind:
            rate = event.read(BaselineRate)
            self._measured = (rate.tokens_per_s, rate.world_size)
        elif event.kind == HostAllocated.kind and event.host not in self._held:
            if not self._held:
                self._any_since_ns = event.wall_ns
            self._held[event.host] = (event.wall_ns, max(1, event.read(HostAllocated).gpus))
        elif event.kind == HostReleased.kind and event.host in self._held:
            since_ns, ranks = self._held.pop(event.host)
            self._rank_ns += ranks * max(0, event.wall_ns - since_ns)
            if not self._held:
                self._any_ns += max(0, event.wall_ns - self._any_since_ns)

    def _on_step(self, event: Event) -> None:
        if event.step is None or event.rank not in (0, None) or event.attempt < self._attempt:
            return  # of an attempt that was replaced: fenced
        detail = event.read(Step)
        tokens = detail.tokens or 0
        self._steps += 1
        if event.step > self._newest:
            self._newest = event.step
            self._tokens += tokens
            self._counted.append((event.step, tokens))
        if self._steps > WARMUP_STEPS and tokens and detail.step_ns > 0:
            waits = max(0, (detail.data_wait_ns or 0) + (detail.stall_ns or 0))
            clean = self._clean.setdefault(self._world, deque(maxlen=_NEWEST))
            clean.append((event.step, max(1, detail.step_ns - waits) / tokens))

    def _take_back(self, resume_step: int) -> None:
        """What was applied beyond it is taken again."""
        while self._counted and self._counted[-1][0] > resume_step:
            step, tokens = self._counted.pop()
            self._tokens -= tokens
            self._newest = step - 1
        for clean in self._clean.values():
            while clean and clean[-1][0] > resume_step:
                clean.pop()

    def _reference(self) -> tuple[float, int] | None:
        """R*: (tokens per second, of so many ranks)."""
        if self._measured is not None:
            return self._measured
        worlds = [world for world, clean in self._clean.items() if len(clean) >= MIN_CLEAN_STEPS]
        if not worlds:
            return None
        return 1e9 / median(per_token_ns for _, per_token_ns in self._clean[max(worlds)]), max(worlds)

    def of(self, wall_ns: int) -> dict[str, float]:
        """``active`` and ``purchased`` at this moment; empty before there is a reference or a host."""
        reference = self._reference()
        if reference is None:
            return {}
        tokens_per_s, world = reference
        open_ns = sum(ranks * max(0, wall_ns - since_ns) for since_ns, ranks in self._held.values())
        bought = (self._rank_ns + open_ns) * tokens_per_s / max(1, world)
        any_ns = self._any_ns + (max(0, wall_ns - self._any_since_ns) if self._held else 0)
        capacity = {"active": min(any_ns * tokens_per_s, bought), "purchased": bought}
        return {of: self._tokens * 1e9 / most for of, most in capacity.items() if most > 0}
