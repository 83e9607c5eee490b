"""What will happen when: acts in order of time, and of their entry where the times are equal."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable


class EventQueue:
    """Acts at integer nanoseconds."""

    def __init__(self) -> None:
        self._heap: list[tuple[int, int, Callable[[], None]]] = []
        self._order = itertools.count()

    def push(self, at_ns: int, act: Callable[[], None]) -> None:
        """Do ``act`` then."""
        heapq.heappush(self._heap, (at_ns, next(self._order), act))

    def pop(self, until_ns: int, advance: Callable[[int], None]) -> Callable[[], None] | None:
        """The next act, after ``advance`` has been told its time; None: nothing is left before ``until_ns``, to
        which the clock was then advanced if anything was to happen later."""
        if not self._heap:
            return None
        if self._heap[0][0] > until_ns:
            advance(until_ns)
            return None
        at_ns, _, act = heapq.heappop(self._heap)
        advance(at_ns)
        return act
