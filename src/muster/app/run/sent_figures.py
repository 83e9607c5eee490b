"""A run's figures, sent to an external service again and again: what all such receivers have in common.

Counters count from the run's begin, so that what a receiver did not take is in what is sent next: nothing is kept.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import ClassVar

from muster.app.run.event_writer import Sink
from muster.app.run.run_figures import RunFigures
from muster.core.clock import SystemClock
from muster.core.events import Event
from muster.core.protocols import Clock

#: Characters of a receiver's complaint that are shown.
MOST_TOLD = 200


@dataclass
class SentFigures(Sink):
    """Sends them every ``tend_every_s`` and at the end. That they were not taken is said once, until they are again."""

    figures: RunFigures
    url: str
    say: Callable[[str], None]
    clock: Clock = field(default_factory=SystemClock)
    key: ClassVar[str]
    """Of the run file: what it is switched on by."""
    every_s: ClassVar[float]
    _sent_s: float = float("-inf")
    _refused: bool = False

    def __post_init__(self) -> None:
        self.tend_every_s = self.every_s

    def event(self, event: Event) -> None:
        self.figures.add(event)
        self.tend()  # where events never stop there is no other call

    def left_out(self, count: int) -> None:
        self.figures.missed()

    def tend(self) -> None:
        if time.monotonic() - self._sent_s >= self.every_s:
            self._send()

    def end(self, code: int | None) -> None:
        self._send()

    def problem(self) -> str:
        """Send what is known now; what was wrong, empty: it was taken."""
        raise NotImplementedError

    def _send(self) -> None:
        if not self.figures.began_ns:
            return
        self._sent_s = time.monotonic()
        problem = self.problem()
        if problem and not self._refused:
            self.say(f"the run's figures were not taken at {self.url}: {problem} ({self.key})")
        self._refused = bool(problem)
