"""Ranks that outlive their attempt, as their agent sees them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from muster.agent.ranks.rank_process import Worker, is_stopped


@dataclass
class Keep:
    """Which ranks are to stand still, and until when."""

    deadline_s: float = 0.0

    def begin(
        self, living: Iterable[Worker], attempt: int, ranks: set[int], *, now_s: float, pause_s: float
    ) -> list[Worker]:
        """The workers of ``ranks`` that can be asked to stand still within ``pause_s``; no other is kept any longer."""
        self.deadline_s = now_s + pause_s
        kept = []
        for worker in living:
            if worker.attempt != attempt:
                continue
            worker.kept = worker.rank in ranks and worker.peer is not None
            worker.paused = None
            if worker.kept:
                kept.append(worker)
        return kept

    def chosen(self, living: Iterable[Worker], contexts: Iterable[Mapping[str, Any]]) -> list[Worker]:
        """The workers that stand still and have a place in the new attempt."""
        wanted = {context.get("kept_rank") for context in contexts} - {None}
        return [worker for worker in living if worker.paused is not None and worker.rank in wanted and worker.peer]

    def lagging(self, living: Iterable[Worker], *, now_s: float, silence_s: float) -> list[Worker]:
        """Workers that should stand still by now and do not, or that never will: silent, and stopped by the kernel."""
        return [
            worker
            for worker in living
            if worker.kept
            and worker.paused is None
            and (now_s >= self.deadline_s or (now_s - worker.seen_s > silence_s and is_stopped(worker.pid)))
        ]
