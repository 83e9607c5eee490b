"""Which ranks hang: judged by progress and by process state, never by a heartbeat alone. Pure but for /proc.

A rank says something with every step, and nothing wakes it or its agent in between. One that a signal stops is told by
its parent, the fork server, which the kernel wakes for it; the agent then looks at the process until it is sure. What
no parent tells (a debugger's stop, any stop while the fork server is away, or itself stopped) it sees by looks at the
processes of ranks that are silent, at deadlines (``due_s``).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from muster.agent.ranks.rank_process import Worker, is_stopped
from muster.config.spec import Recovery
from muster.core.heartbeat_timing import CONFIRM_SHARE, EARLY_SHARE, LOOK_SHARE, HeartbeatTiming


@dataclass(frozen=True, kw_only=True)
class Limits:
    """What is a hang. Before a rank's first step the supervisor watches the start."""

    timing: HeartbeatTiming
    step_s: float
    """The longest time without a micro-batch, for ranks that have taken a step."""
    start_s: float = math.inf
    """At least this long for those in their first step, or in one that a previous agent saw begin."""
    reports_stops: Callable[[int], bool] = lambda parent: False
    """Whether this parent process tells of stops."""

    @classmethod
    def of(cls, given: Recovery, *, step_s: float, reports_stops: Callable[[int], bool]) -> Limits:
        """Of a run's ``recovery`` section."""
        return cls(
            timing=given.timing,
            step_s=step_s,
            start_s=given.start_timeout_s,
            reports_stops=reports_stops,
        )

    def progress_s(self, worker: Worker) -> float:
        if worker.stepped:
            return self.step_s
        return max(self.step_s, self.start_s) if worker.first_step is not None else math.inf

    def silence_of(self, worker: Worker) -> float:
        """How long this one may be silent until it is found to be stopped."""
        would_be_reported = not worker.stop_reported and self.reports_stops(worker.parent)
        return self.timing.rank_silence_s(reports_stops=would_be_reported)


def find_hung_ranks(workers: Iterable[Worker], limits: Limits, *, host: str, now_s: float) -> list[tuple[Worker, str]]:
    """(worker, evidence) of each rank that is stopped, or makes no progress; each is reported once."""
    hung = []
    for worker in workers:
        if worker.reported_hang or worker.retained:
            continue
        limit_s = limits.progress_s(worker)
        reason = None
        if stays_stopped(worker, now_s=now_s, silence_s=limits.silence_of(worker)):
            reason = f"is stopped, silent for {now_s - worker.seen_s:.2f} s"
        elif now_s >= worker.progress_s + limit_s:
            reason = f"made no progress for {now_s - worker.progress_s:.1f} s (limit {limit_s:.1f} s)"
        if reason is not None:
            worker.reported_hang = True
            hung.append((worker, f"rank {worker.rank} on {host} {reason} at step {worker.step}"))
    return hung


def due_s(workers: Iterable[Worker], limits: Limits) -> float:
    """When ``find_hung_ranks`` may find one, or has to look, if none of them says anything until then."""
    times_s = [
        min(look_s(worker, limits.silence_of(worker)), worker.progress_s + limits.progress_s(worker))
        for worker in workers
        if not (worker.reported_hang or worker.retained)
    ]
    return min(times_s, default=math.inf)


def stays_stopped(worker: Worker, *, now_s: float, silence_s: float) -> bool:
    """Whether the kernel holds it stopped, by two looks at its process; one is taken where it is due."""
    early_s = EARLY_SHARE * silence_s if worker.stopped_s is None else 0.0
    if now_s < look_s(worker, silence_s) - early_s:
        return False
    worker.looked_s, before = now_s, worker.stopped_s
    worker.stopped_s = None
    worker.stop_reported = is_stopped(worker.pid)
    if worker.stop_reported:
        worker.stopped_s = now_s if before is None else before
    return before is not None and worker.stopped_s is not None


def look_s(worker: Worker, silence_s: float) -> float:
    """When its process is to be looked at next."""
    if worker.stopped_s is not None:
        return max(worker.looked_s, worker.stopped_s) + CONFIRM_SHARE * silence_s
    return max(worker.looked_s, worker.seen_s) + LOOK_SHARE * silence_s
