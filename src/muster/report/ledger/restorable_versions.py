"""When which state could be restored from where: saves from their commit events, memory from the step events."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

import numpy as np

from muster.core.event_details.checkpoints import CheckpointCommitted
from muster.report.ledger.file_log import UNKNOWN, Ints
from muster.report.ledger.lineage import Steps
from muster.report.ledger.time_axis import Aligned


@dataclass(frozen=True, eq=False)
class Versions:
    """Of one tier, in the order in which they became restorable: from ``at_ns`` on ``step`` can be restored; its state
    is as old as the end of that step, ``taken_ns``."""

    at_ns: Ints
    taken_ns: Ints
    step: Ints

    @property
    def newest_ns(self) -> Ints:  # from each ``at_ns`` on
        return np.maximum.accumulate(self.taken_ns)


def versions(aligned: Aligned, steps: Steps) -> dict[str, Versions]:
    """By tier; tiers that never held one do not appear."""
    committed: dict[str, list[tuple[int, int]]] = defaultdict(list)
    for timed in aligned.events:
        if timed.event.kind == CheckpointCommitted.kind and timed.event.step is not None:
            committed[timed.event.read(CheckpointCommitted).tier].append((timed.t_ns, timed.event.step))
    held = {tier: np.array(rows, np.int64) for tier, rows in committed.items()}
    in_time = np.argsort(aligned.step_ns, kind="stable")
    for tier, name in (("memory", "snapshot_step"), ("peer", "peer_step")):  # a snapshot has no event of its own
        said = aligned.steps.ints(name)[in_time]
        known = np.flatnonzero(said != UNKNOWN)
        new = known[np.flatnonzero(np.diff(said[known], prepend=UNKNOWN))]
        rows = np.stack((aligned.step_ns[in_time[new]], said[new]), axis=1)
        held[tier] = np.concatenate((held[tier], rows)) if tier in held else rows
    order = np.argsort(steps.step, kind="stable")
    numbers, ends = steps.step[order], steps.end_ns[order]
    return {tier: _sorted(rows[:, 0], rows[:, 1], numbers, ends) for tier, rows in held.items() if len(rows)}


def _sorted(at_ns: Ints, step: Ints, numbers: Ints, ends: Ints) -> Versions:
    """``ends``: of the steps ``numbers``, which rise; the last one of a step that was taken twice is meant."""
    taken = at_ns.copy()
    if len(numbers):
        found = np.maximum(0, np.searchsorted(numbers, step, "right") - 1)
        taken = np.where(numbers[found] == step, np.minimum(ends[found], at_ns), at_ns)
    order = np.lexsort((step, taken, at_ns))
    return Versions(at_ns[order], taken[order], step[order])
