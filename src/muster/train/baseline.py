"""The baseline rate: some steps near the run's start without snapshots and saves, and their throughput."""

from __future__ import annotations

from dataclasses import dataclass, field
from statistics import median

from muster.config.validation import REFERENCE_AFTER, REFERENCE_SETTLE
from muster.core.typed_json import JsonObject, whole


@dataclass
class BaselineWindow:
    """The steps without fault tolerance. The same on every rank: it follows from the step numbers alone.

    A step's time counts from the end of the previous step, without the wait for data (which is not fault tolerance).
    The first few steps are ignored: copies of earlier snapshots may still be in progress. Heartbeats, events and the
    small all-reduce of commands stay on, because a supervised rank needs them.
    """

    first: int
    last: int
    """Smaller than ``first``: no window."""
    world_size: int
    _per_token_ns: list[float] = field(default_factory=list)
    _mfu: list[float] = field(default_factory=list)

    @classmethod
    def planned(cls, steps: int, *, resumed_at: int, world_size: int) -> BaselineWindow:
        """The window of ``steps`` (0: none), for an attempt that continues after step ``resumed_at``.

        An attempt that starts later than the run's first steps has none: its own warm-up would be measured, and it
        would lack snapshots right after a failure.
        """
        first = REFERENCE_AFTER + 1
        if steps <= 0 or resumed_at + REFERENCE_SETTLE > REFERENCE_AFTER:
            return cls(first=first, last=first - 1, world_size=world_size)
        return cls(first=first, last=REFERENCE_AFTER + steps, world_size=world_size)

    def covers(self, step: int) -> bool:
        """Whether ``step`` runs without snapshots and saves."""
        return self.first <= step <= self.last

    def add(self, step: int, detail: JsonObject) -> dict[str, float] | None:
        """Add a ``step`` event's detail; after the last step, returns the ``baseline_rate`` event's."""
        if not self.covers(step):
            return None
        net_ns = whole(detail, "step_ns") - whole(detail, "data_wait_ns")
        tokens = whole(detail, "tokens")
        if step >= self.first + REFERENCE_SETTLE and tokens and net_ns > 0:
            self._per_token_ns.append(net_ns / tokens)
            if isinstance(mfu := detail.get("mfu"), float):
                self._mfu.append(mfu)
        if step < self.last or not self._per_token_ns:
            return None
        per_token_ns = median(self._per_token_ns)
        rates = {
            "tokens_per_s": 1e9 / per_token_ns,
            "world_size": self.world_size,
            "steps": len(self._per_token_ns),
            "spread": 1.4826 * median(abs(value - per_token_ns) for value in self._per_token_ns) / per_token_ns,
            "first_step": self.first,
        }
        return {**rates, "mfu": median(self._mfu)} if self._mfu else rates
