"""How long a step of the attempt takes, and so how long one may take."""

from __future__ import annotations

import statistics
from collections import deque

#: Steps that the median is taken of.
WINDOW = 20


class StepClock:
    """Fed by one rank's steps: all ranks take them together."""

    def __init__(self) -> None:
        self._steps_s: deque[float] = deque(maxlen=WINDOW)
        self._last_s: float | None = None
        self._limit_s = 600.0

    def on_step(self, now_s: float) -> None:
        if self._last_s is not None:
            self._steps_s.append(now_s - self._last_s)
            self._limit_s = max(30.0, 10 * statistics.median(self._steps_s))
        self._last_s = now_s

    def timeout_s(self, limit_s: float | None) -> float:
        """The limit given, or ten median steps and at least 30 s."""
        return self._limit_s if limit_s is None else limit_s
