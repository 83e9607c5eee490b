"""When which state could be restored from where: saves from their commit events, memory from the step events."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from muster.report.ledger.lineage import Step
from muster.report.ledger.time_axis import Timed

#: Key of a ``step`` event's detail -> the tier it speaks of. A snapshot each step has no event of its own.
HELD = {"snapshot_step": "memory", "peer_step": "peer"}


@dataclass(frozen=True, order=True)
class Version:
    """From ``at_ns`` on ``step`` can be restored; its state is as old as the end of that step, ``taken_ns``."""

    at_ns: int
    taken_ns: int
    step: int


def versions(events: Sequence[Timed], steps: Sequence[Step]) -> dict[str, list[Version]]:
    """Tier -> its versions in the order in which they became restorable; tiers that never held one do not appear."""
    ends = {step.step: step.end_ns for step in steps}
    result: dict[str, list[Version]] = defaultdict(list)
    for timed in events:
        event = timed.event
        if event.kind == "checkpoint.committed" and event.step is not None:
            result[str(event.detail["tier"])].append(_version(timed, event.step, ends))
        elif event.kind == "step":
            for key, tier in HELD.items():
                step = event.detail.get(key)
                if step is not None and not (result[tier] and result[tier][-1].step == step):
                    result[tier].append(_version(timed, int(step), ends))
    return {tier: sorted(held) for tier, held in result.items() if held}


def _version(timed: Timed, step: int, ends: Mapping[int, int]) -> Version:
    return Version(at_ns=timed.t_ns, taken_ns=min(ends.get(step, timed.t_ns), timed.t_ns), step=step)
