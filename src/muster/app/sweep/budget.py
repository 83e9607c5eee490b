"""``limits`` of the run file, for a sweep as a whole: the same guard that a run has, over the hosts of all trials.

Hours are those in which any trial holds hosts. Of the dollars each trial has a share set aside for it, so that they
hold without a watcher, too: a sweep that was killed leaves trials behind that stop in time.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

from muster.config.spec import Limits
from muster.core.event_details.hosts import HostAllocated
from muster.core.events import Event
from muster.supervise.process.limits import EARLIER_SHARE, HOUR_NS, LimitsGuard

LEAST_SHARE = 0.01


@dataclass
class Budget:
    """Counts every trial's hosts, and what is left."""

    limits: Limits
    grace_s: float
    parallel: int
    _events: dict[int, Sequence[Event]] = field(default_factory=dict)
    _shares: dict[int, float] = field(default_factory=dict)
    """Trial under way -> dollars that it may cost in all."""

    def note(self, number: int, events: Sequence[Event]) -> None:
        """What is known of a trial's hosts: all of it."""
        self._events[number] = list(events)

    def spent(self, number: int) -> None:
        """The trial has ended: what is left of its share is free."""
        self._shares.pop(number, None)

    def reached(self, wall_ns: int) -> str | None:
        """The limit that the sweep has come to; None: none yet."""
        guard = self._guard(self._events.values())
        limit = guard.next(wall_ns)
        if limit is not None and limit.at_wall_ns <= wall_ns:
            return limit.reason
        # With no host held, the guard foresees nothing.
        hours, usd = self.limits.max_hours, self.limits.max_usd
        if hours is not None and self._hours(self._events.values(), wall_ns) >= hours * (1 - EARLIER_SHARE):
            return f"limits.max_hours {hours:g}"
        return f"limits.max_usd {usd:g}" if usd is not None and guard.spent_usd(wall_ns) >= usd else None

    def share(self, number: int, wall_ns: int) -> float | None:
        """Dollars that this trial may cost in all: what it has cost, and an equal part of what is not assigned."""
        if self.limits.max_usd is None:
            return None
        self._shares.pop(number, None)
        self._shares[number] = self._cost(number, wall_ns) + self._free_each(wall_ns)
        return self._shares[number]

    def allows(self, number: int, wall_ns: int) -> bool:
        """Whether what is left is worth beginning, or going on with, a trial: a hundredth of the whole at least."""
        if self.limits.max_usd is None:
            return True
        self._shares.pop(number, None)
        return self._free_each(wall_ns) >= LEAST_SHARE * self.limits.max_usd

    def limits_of(self, number: int, max_usd: float | None, wall_ns: int) -> tuple[str, ...]:
        """``limits`` of one trial, as overrides: its share of the dollars, and all hours that are left."""
        dollars = () if max_usd is None else (f"limits.max_usd={max_usd!r}",)
        if self.limits.max_hours is None:
            return dollars
        left = self.limits.max_hours - self._hours(self._events.values(), wall_ns)
        own = self._hours([self._events.get(number, ())], wall_ns)
        return (*dollars, f"limits.max_hours={max(1e-3, own + left)!r}")

    def _free_each(self, wall_ns: int) -> float:
        assert self.limits.max_usd is not None
        over = sum(self._cost(other, wall_ns) for other in self._events if other not in self._shares)
        free = self.limits.max_usd - over - sum(self._shares.values())
        return max(0.0, free) / max(1, self.parallel - len(self._shares))

    def _cost(self, number: int, wall_ns: int) -> float:
        return self._guard([self._events.get(number, ())]).spent_usd(wall_ns)

    def _guard(self, trials: Iterable[Sequence[Event]]) -> LimitsGuard:
        guard = LimitsGuard(limits=self.limits, grace_s=self.grace_s)
        for event in _of_all(trials):
            guard.add(event)
        return guard

    def _hours(self, trials: Iterable[Sequence[Event]], wall_ns: int) -> float:
        """In which any of their hosts was held."""
        total_ns, held, since_ns = 0, set[str](), 0
        for event in _of_all(trials):
            at_ns, host = event.wall_ns, event.host
            if event.kind == HostAllocated.kind:
                since_ns = since_ns if held else at_ns
                held.add(host)
            elif host in held:
                held.remove(host)
                total_ns += 0 if held else at_ns - since_ns
        return (total_ns + (wall_ns - since_ns if held else 0)) / HOUR_NS


def _of_all(trials: Iterable[Sequence[Event]]) -> list[Event]:
    """In the order of their times; the hosts of several trials have names of their own."""
    named = [replace(event, host=f"{index}/{event.host}") for index, events in enumerate(trials) for event in events]
    return sorted(named, key=lambda event: event.wall_ns)
