"""Every time that follows from a run's ``recovery.heartbeat_timeout_s``; ``spec.recovery.timing`` is the run's."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

#: Heartbeats sent within a timeout, and those that must be missing before a host counts as silent, so that one late
#: heartbeat never loses a host. Each wakes the watchdog, which costs a tenth of a millisecond on busy cores.
SENT, MISSING = 4, 3
#: The longest time between two heartbeats, for any timeout.
MAX_INTERVAL_S = 3600.0
#: Hosts copy the lease from a bucket every 3 s (``LEASE_COPY_S``), and a request that is refused is made again.
ADOPTION_S, BUCKET_ADOPTION_S = 5.0, 15.0
#: Each look at a process wakes the agent: one that is seldom stopped, or whose parent reports stops, is looked at less.
SELDOM_STOPPED_S = 3.0
#: Shares of a silence limit. A process is looked at after the first, and again if it is stopped after the second: one
#: that stays stopped is found within the limit, one that a profiler or debugger holds for a moment is not. An agent
#: that is awake anyway looks earlier by the third, so that the looks at all its processes coincide.
LOOK_SHARE, CONFIRM_SHARE, EARLY_SHARE = 0.75, 0.25, 0.25


@dataclass(frozen=True)
class HeartbeatTiming:
    """Times in seconds."""

    timeout_s: float

    @property
    def interval_s(self) -> float:
        """Between two heartbeats of a watchdog."""
        return min(self.timeout_s / SENT, MAX_INTERVAL_S)

    @property
    def unacknowledged_s(self) -> float:
        """Data of a watchdog that is not acknowledged for so long ends its connection: after a cut the kernel backs off
        its retries, and heartbeats stay lost long after the link is back."""
        return max(1.0, 6 * self.interval_s)

    def host_lost_after_s(self, interval_s: float) -> float:
        """Silence after which a host counts as lost. ``interval_s`` is the one that it announced: the timeout may be
        lowered while watchdogs keep their interval."""
        return max(self.timeout_s, MISSING * interval_s)

    def shortest_s(self, intervals_s: Iterable[float]) -> float:
        """The shortest timeout that works for watchdogs of these intervals."""
        return MISSING * max(intervals_s, default=0.0)

    def first_heartbeat_after_s(self, interval_s: float) -> float:
        """Time that a starting host has until its first heartbeat."""
        return 10 * self.host_lost_after_s(interval_s)

    @property
    def own_pause_s(self) -> float:
        """A supervisor that ran this late does not count the time as silence."""
        return self.timeout_s / 10

    def adoption_s(self, *, in_bucket: bool) -> float:
        """Time for hosts to learn of a new supervisor and connect: their silence is no failure until then."""
        return max(BUCKET_ADOPTION_S if in_bucket else ADOPTION_S, self.timeout_s)

    def rank_silence_s(self, *, reports_stops: bool) -> float:
        """Silence within which a stopped rank is found. ``reports_stops``: its parent reports a stop at once."""
        return max(self.timeout_s, SELDOM_STOPPED_S) if reports_stops else self.timeout_s

    @property
    def replicator_stopped_after_s(self) -> float:
        """A replicator stopped for so long is replaced. No step waits for it, but no copy leaves the host."""
        return max(self.timeout_s, SELDOM_STOPPED_S)

    @property
    def cut_off_after_s(self) -> float:
        """A Slurm node that reaches neither supervisor nor controller for so long is cut off."""
        return max(3 * self.timeout_s, 6.0)
