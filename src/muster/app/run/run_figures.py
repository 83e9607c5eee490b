"""A run's figures, kept in its supervisor's process from its events: past ones, those to come, and those left out."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from muster.core import event_log
from muster.core.events import Event
from muster.report.exposition import RunMetrics, Sample


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
        """The next event."""
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
