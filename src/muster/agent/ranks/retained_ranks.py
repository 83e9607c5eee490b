"""Ranks that outlive their attempt: they pause, and continue in the next one."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from muster.agent.ranks.hang_detector import look_s, stays_stopped
from muster.agent.ranks.rank_process import Worker
from muster.protocol.ranks import RankContext


@dataclass
class RetainedRanks:
    """Which ranks are to pause, and by when."""

    deadline_s: float = 0.0

    def select(
        self, living: Iterable[Worker], attempt: int, ranks: set[int], *, now_s: float, pause_s: float
    ) -> list[Worker]:
        """The workers of ``ranks`` that can be asked to pause within ``pause_s``; all others are no longer retained."""
        self.deadline_s = now_s + pause_s
        selected = []
        for worker in living:
            if worker.attempt != attempt:
                continue
            worker.retained = worker.rank in ranks and worker.peer is not None
            worker.paused = None
            if worker.retained:
                selected.append(worker)
        return selected

    def assigned(self, living: Iterable[Worker], contexts: Iterable[RankContext]) -> list[Worker]:
        """The paused workers that have a rank in the new attempt."""
        ranks = {context.kept_rank for context in contexts} - {None}
        return [worker for worker in living if worker.paused is not None and worker.rank in ranks and worker.peer]

    def overdue(self, living: Iterable[Worker], *, now_s: float, silence_s: float) -> list[Worker]:
        """Workers that should have paused by now, or that never will: silent, and stopped by the kernel. Each is named
        once, and no longer retained: one may take long to go, or never do."""
        found = [
            worker
            for worker in living
            if worker.retained
            and worker.paused is None
            and (now_s >= self.deadline_s or stays_stopped(worker, now_s=now_s, silence_s=silence_s))
        ]
        for worker in found:
            worker.retained = False
        return found

    def due_s(self, living: Iterable[Worker], *, silence_s: float) -> float:
        """When ``overdue`` may name one, or has to look."""
        waited_for = [worker for worker in living if worker.retained and worker.paused is None]
        return min([self.deadline_s, *(look_s(each, silence_s) for each in waited_for)]) if waited_for else math.inf
