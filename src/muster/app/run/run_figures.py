"""A run's figures, kept in its supervisor's process from its events: past ones, those to come, and those left out."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

from muster.app.run.event_writer import Sink
from muster.core import event_log
from muster.core.clock import SystemClock
from muster.core.events import Event
from muster.core.protocols import Clock
from muster.report.exposition import RunMetrics, Sample

#: Characters of a receiver's complaint that are shown.
MOST_TOLD = 200


@dataclass
class RunFigures:
    """``add`` and ``missed`` from one thread, the rest from any.

    From the first event on the supervisor holds the run, and everything earlier is in the run's folder.
    """

    run_dir: Path
    run_id: str
    metrics: RunMetrics = field(init=False)
    began_ns: int = 0
    """Wall clock at the run's first event; 0: none has come."""
    _whole: bool = False
    """Everything before the next event is in ``metrics``."""
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def __post_init__(self) -> None:
        self.metrics = RunMetrics(self.run_id)

    def add(self, event: Event) -> None:
        if not self._whole:
            metrics, began_ns = RunMetrics(self.run_id), event.wall_ns
            for earlier in event_log.merged(self.run_dir / "events"):
                if earlier.wall_ns < event.wall_ns:
                    began_ns = min(began_ns, earlier.wall_ns)
                    metrics.add(earlier)
            self.metrics, self.began_ns, self._whole = metrics, began_ns, True
        with self._lock:
            self.metrics.add(event)

    def missed(self) -> None:
        """Events were left out. A counter without them would mislead: with the next one the folder is read again."""
        self._whole = False

    def page(self, wall_ns: int) -> str:
        """For Prometheus."""
        with self._lock:
            return self.metrics.page(wall_ns)

    def samples(self, wall_ns: int) -> Sequence[Sample]:
        with self._lock:
            return list(self.metrics.samples(wall_ns))


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
