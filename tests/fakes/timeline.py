"""What happens later, on a clock that only moves where somebody sleeps."""

from __future__ import annotations

import datetime
import heapq
import itertools
from collections.abc import Callable

from fakes.clock import VirtualClock

EPOCH = datetime.datetime(2026, 11, 23, tzinfo=datetime.UTC)


class Timeline:
    """Things due at moments of ``clock``; ``settle`` lets everything happen that is due by now, in order.

    While something happens, ``now_s`` is the moment that it was due at, not the one at which somebody looked.
    """

    def __init__(self, clock: VirtualClock) -> None:
        self.clock = clock
        self._due: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = itertools.count()
        self._at_s: float | None = None

    @property
    def now_s(self) -> float:
        return float(self.clock.now_s) if self._at_s is None else self._at_s

    def after(self, seconds: float, happens: Callable[[], None]) -> None:
        heapq.heappush(self._due, (self.now_s + seconds, next(self._numbers), happens))

    def settle(self) -> None:
        if self._at_s is not None:
            return  # somebody looks from within what happens
        try:
            while self._due and self._due[0][0] <= self.clock.now_s:
                self._at_s, _, happens = heapq.heappop(self._due)
                happens()
        finally:
            self._at_s = None

    def sleep(self, seconds: float) -> None:
        """Let time pass and everything in it happen."""
        self.clock.sleep(seconds)
        self.settle()

    def stamp(self, ahead_s: float = 0.0) -> str:
        """Now, or a moment after now, as Google writes it."""
        return (EPOCH + datetime.timedelta(seconds=self.now_s + ahead_s)).isoformat().replace("+00:00", "Z")
