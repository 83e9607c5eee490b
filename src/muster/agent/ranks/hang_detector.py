"""Which ranks hang: judged by progress and by the kernel's word, never by a heartbeat alone. Pure but for /proc."""

from __future__ import annotations

import math
from collections.abc import Iterable

from muster.agent.ranks.rank_process import Worker, is_stopped


def hanging(
    workers: Iterable[Worker],
    *,
    host: str,
    now_s: float,
    silence_s: float,
    step_s: float,
    start_s: float = math.inf,
) -> list[tuple[Worker, str]]:
    """(worker, evidence) of each rank that is stopped, or makes no progress; each is named once.

    ``silence_s``: a rank that says nothing for so long is looked at; ``step_s``: the longest time without a
    micro-batch, for ranks that have taken a step; ``start_s``: at least so long for those that are in their first (or
    in one that a former agent saw begin). Before that the supervisor watches the start.
    """
    found = []
    for worker in workers:
        if worker.reported_hang or worker.kept:
            continue
        silent = now_s - worker.seen_s
        stuck = now_s - worker.progress_s
        what = None
        if silent > silence_s and is_stopped(worker.pid):
            what = f"is stopped, silent for {silent:.2f} s"
        elif worker.stepped or worker.first_step is not None:
            limit_s = step_s if worker.stepped else max(step_s, start_s)
            if stuck > limit_s:
                what = f"made no progress for {stuck:.1f} s (limit {limit_s:.1f} s)"
        if what is not None:
            worker.reported_hang = True
            found.append((worker, f"rank {worker.rank} on {host} {what} at step {worker.step}"))
    return found
