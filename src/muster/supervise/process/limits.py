"""``limits`` of the run file: when a run has to stop because of them. A fold over events, and a timer for it.

At the end of the file: resource limits of the supervisor's own process.

Hours and dollars count from purchase to release of hosts, over all terms of the supervisor: the same spans as the
ledger's. Time between two lives of a run, in which it holds no host, is free and is not counted.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from datetime import datetime
from operator import attrgetter

from muster.config.spec import Limits
from muster.core import processes
from muster.core.event_details.hosts import HostAllocated, HostReleased
from muster.core.events import Event
from muster.core.protocols import Clock

SECOND_NS = 1_000_000_000
HOUR_NS = 3600 * SECOND_NS
#: To meet a limit with its save done, a run stops earlier: by the grace time, at most this share of the limit.
EARLIER_SHARE = 0.1
#: A resource limit that cannot be restored is logged again this often.
AGAIN_S = 60.0


@dataclass(frozen=True, kw_only=True)
class Reached:
    """A limit, and when the run has to be asked to stop because of it."""

    at_wall_ns: int
    reason: str


@dataclass
class LimitsGuard:
    """Feed it every event of the run, in order; ask it when the next limit is due."""

    limits: Limits
    grace_s: float
    _held: dict[str, tuple[int, float | None]] = field(default_factory=dict)
    """Host -> (bought at, dollars an hour; None: unknown)."""
    _usd: float = 0.0
    """Of hosts that were released."""
    _hours_ns: int = 0
    """During which any host was held, up to ``_since_ns``."""
    _since_ns: int | None = None

    def add(self, event: Event) -> None:
        """Take one event; kinds that do not matter are ignored."""
        if event.kind == HostAllocated.kind and event.host not in self._held:
            self._held[event.host] = (event.wall_ns, event.read(HostAllocated).usd_per_hour)
            self._since_ns = event.wall_ns if self._since_ns is None else self._since_ns
        elif event.kind == HostReleased.kind and event.host in self._held:
            bought_ns, price = self._held.pop(event.host)
            self._usd += (price or 0.0) * max(0, event.wall_ns - bought_ns) / HOUR_NS
            if not self._held and self._since_ns is not None:
                self._hours_ns += max(0, event.wall_ns - self._since_ns)
                self._since_ns = None

    def spent_usd(self, wall_ns: int) -> float:
        """Dollars by then, of the hosts whose price is known."""
        return self._usd + sum(
            (price or 0.0) * max(0, wall_ns - bought_ns) / HOUR_NS for bought_ns, price in self._held.values()
        )

    def next(self, wall_ns: int, *, clock_ns: int | None = None) -> Reached | None:
        """The limit that is due first with the hosts held now; None: none is set, or none will be reached.

        ``clock_ns``: the wall clock, where ``wall_ns`` is by a clock that is never stepped: deadlines are the wall
        clock's.
        """
        ahead_ns = 0 if clock_ns is None else clock_ns - wall_ns
        limits = (self._deadline(ahead_ns), self._hours(), self._dollars(wall_ns))
        return min((limit for limit in limits if limit), key=attrgetter("at_wall_ns"), default=None)

    @property
    def unpriced(self) -> list[str]:
        """Hosts whose price is unknown, so that ``limits.max_usd`` cannot be kept for them."""
        if self.limits.max_usd is None:
            return []
        return sorted(host for host, (_, price) in self._held.items() if price is None)

    def _deadline(self, ahead_ns: int) -> Reached | None:
        if self.limits.deadline is None:
            return None
        at_ns = int(datetime.fromisoformat(self.limits.deadline).timestamp() * SECOND_NS)
        at_ns -= int(self.grace_s * SECOND_NS) + ahead_ns
        return Reached(at_wall_ns=at_ns, reason=f"limits.deadline {self.limits.deadline}")

    def _hours(self) -> Reached | None:
        if self.limits.max_hours is None or self._since_ns is None:
            return None
        length_ns = int(self.limits.max_hours * HOUR_NS)
        left_ns = length_ns - self._earlier_ns(length_ns) - self._hours_ns
        return Reached(at_wall_ns=self._since_ns + left_ns, reason=f"limits.max_hours {self.limits.max_hours:g}")

    def _dollars(self, wall_ns: int) -> Reached | None:
        per_hour = sum(price or 0.0 for _, price in self._held.values())
        if self.limits.max_usd is None or per_hour <= 0:
            return None
        length_ns = int(self.limits.max_usd / per_hour * HOUR_NS)
        left_ns = int((self.limits.max_usd - self.spent_usd(wall_ns)) / per_hour * HOUR_NS)
        at_ns = wall_ns + left_ns - self._earlier_ns(length_ns)
        return Reached(at_wall_ns=at_ns, reason=f"limits.max_usd {self.limits.max_usd:g}")

    def _earlier_ns(self, length_ns: int) -> int:
        return min(int(self.grace_s * SECOND_NS), int(length_ns * EARLIER_SHARE))


@dataclass
class LimitsTimer:
    """The guard's limits on this process's clock."""

    guard: LimitsGuard
    clock: Clock
    asked: bool = False
    """A limit was reached, and the run asked to stop."""
    _wall_ahead_ns: int = 0
    """Wall clock minus monotonic clock, when this term began."""

    def __post_init__(self) -> None:
        self._wall_ahead_ns = self.clock.wall_ns() - self.clock.monotonic_ns()

    def add_now(self, event: Event) -> None:
        """An event of this moment."""
        self.guard.add(replace(event, wall_ns=self._steady_wall_ns()))

    def change(self, limits: Limits, grace_s: float) -> None:
        """The run file was corrected."""
        self.guard.limits, self.guard.grace_s, self.asked = limits, grace_s, False

    def due(self) -> tuple[int | None, str | None]:
        """When the next limit is due, on the monotonic clock, and its name once the run has to be asked to stop."""
        now_ns = self._steady_wall_ns()
        limit = None if self.asked else self.guard.next(now_ns, clock_ns=self.clock.wall_ns())
        if limit is None:
            return None, None
        left_ns = limit.at_wall_ns - now_ns
        self.asked = left_ns <= 0
        return self.clock.monotonic_ns() + max(0, left_ns), limit.reason if self.asked else None

    def _steady_wall_ns(self) -> int:
        """Wall time by a clock that is never stepped: a stepped wall clock must not change hours and dollars."""
        return self.clock.monotonic_ns() + self._wall_ahead_ns


@dataclass
class OwnLimits:
    """This process's resource limits, as they were when this was made. ``keep`` may be called from any thread."""

    notes: deque[str]
    """Messages for people."""
    now_s: Callable[[], float] = time.monotonic
    _before: Mapping[int, tuple[int, int]] = field(default_factory=processes.limits)
    _said: str = ""
    _said_s: float = 0.0

    def keep(self, run: str) -> None:
        """Restore limits that were lowered (``prlimit``): without descriptors no host connects."""
        low = processes.restore_limits(self._before)
        if low and (low != self._said or self.now_s() - self._said_s >= AGAIN_S):
            self._said_s = self.now_s()
            self.notes.append(
                f"{low}, and this process may not raise it: hosts may be unable to connect or to be started again "
                f"until root does (prlimit --pid); muster down {run}, then muster recover {run} restarts everything"
            )
        self._said = low
