"""Which ranks hang: judged by progress and by process state, never by a heartbeat alone. Pure but for /proc."""

from __future__ import annotations

import math
from collections.abc import Iterable

from muster.agent.ranks.rank_process import Worker, is_stopped


def find_hung_ranks(
    workers: Iterable[Worker],
    *,
    host: str,
    now_s: float,
    silence_s: float,
    step_s: float,
    start_s: float = math.inf,
) -> list[tuple[Worker, str]]:
    """(worker, evidence) of each rank that is stopped, or makes no progress; each is reported once.

    ``silence_s``: a rank that is silent for longer is looked at; ``step_s``: the longest time without a
    micro-batch, for ranks that have taken a step; ``start_s``: at least this long for those in their first step (or
    in one that a previous agent saw begin). Before that the supervisor watches the start.
    """
    hung = []
    for worker in workers:
        if worker.reported_hang or worker.retained:
            continue
        silent = now_s - worker.seen_s
        stuck = now_s - worker.progress_s
        reason = None
        if silent > silence_s and is_stopped(worker.pid):
            reason = f"is stopped, silent for {silent:.2f} s"
        elif worker.stepped or worker.first_step is not None:
            limit_s = step_s if worker.stepped else max(step_s, start_s)
            if stuck > limit_s:
                reason = f"made no progress for {stuck:.1f} s (limit {limit_s:.1f} s)"
        if reason is not None:
            worker.reported_hang = True
            hung.append((worker, f"rank {worker.rank} on {host} {reason} at step {worker.step}"))
    return hung
