"""The reference rate: some steps at the run's beginning without snapshots and saves, and what they come to."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from muster.config.validation import REFERENCE_AFTER, REFERENCE_SETTLE


@dataclass
class BaselineWindow:
    """The steps that run without fault tolerance. The same on every rank: it follows from the step numbers alone.

    Steps count from the end of the step before, without the wait for data (which is no fault tolerance), after
    the first few: by then copies of earlier snapshots are no longer on their way. What stays on, since it cannot be
    taken off a rank that is to be watched: heartbeats, events, and the small sum in which orders are agreed upon.
    """

    first: int
    last: int
    """Smaller than ``first``: there is none."""
    world_size: int
    _per_token_ns: list[float] = field(default_factory=list)
    _mfu: list[float] = field(default_factory=list)

    @classmethod
    def planned(cls, steps: int, *, resumed_at: int, world_size: int) -> BaselineWindow:
        """The window of a run that wants ``steps`` (0: none), for an attempt that goes on after step ``resumed_at``.

        An attempt that begins later than the run's first steps has none: its own warm-up would be measured, and
        snapshots that a failure has just proved to be needed would be missing.
        """
        first = REFERENCE_AFTER + 1
        if steps <= 0 or resumed_at + REFERENCE_SETTLE > REFERENCE_AFTER:
            return cls(first=first, last=first - 1, world_size=world_size)
        return cls(first=first, last=REFERENCE_AFTER + steps, world_size=world_size)

    def covers(self, step: int) -> bool:
        """Whether ``step`` is to be made without snapshots and saves."""
        return self.first <= step <= self.last

    def add(self, step: int, detail: Mapping[str, Any]) -> dict[str, Any] | None:
        """Take a ``step`` event's detail; after the last one the ``reference`` event's."""
        if not self.covers(step):
            return None
        net_ns = int(detail["step_ns"]) - int(detail.get("data_wait_ns", 0))
        if step >= self.first + REFERENCE_SETTLE and detail["tokens"] and net_ns > 0:
            self._per_token_ns.append(net_ns / detail["tokens"])
            if detail.get("mfu") is not None:
                self._mfu.append(float(detail["mfu"]))
        if step < self.last or not self._per_token_ns:
            return None
        middle = median(self._per_token_ns)
        found = {
            "tokens_per_s": 1e9 / middle,
            "world_size": self.world_size,
            "steps": len(self._per_token_ns),
            "spread": 1.4826 * median(abs(each - middle) for each in self._per_token_ns) / middle,
            "first_step": self.first,
        }
        return {**found, "mfu": median(self._mfu)} if self._mfu else found
