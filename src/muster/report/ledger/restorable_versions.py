"""When which state could be restored from where: saves from their commit events, memory from the step events."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from muster.core.event_details import training
from muster.core.event_details.checkpoints import CheckpointCommitted
from muster.report.ledger.lineage import Step
from muster.report.ledger.time_axis import Timed


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
        if event.kind == CheckpointCommitted.kind and event.step is not None:
            result[event.read(CheckpointCommitted).tier].append(_version(timed, event.step, ends))
        elif event.kind == training.Step.kind:  # a snapshot each step has no event of its own
            detail = event.read(training.Step)
            for tier, step in (("memory", detail.snapshot_step), ("peer", detail.peer_step)):
                if step is not None and not (result[tier] and result[tier][-1].step == step):
                    result[tier].append(_version(timed, step, ends))
    return {tier: sorted(held) for tier, held in result.items() if held}


def _version(timed: Timed, step: int, ends: Mapping[int, int]) -> Version:
    return Version(at_ns=timed.t_ns, taken_ns=min(ends.get(step, timed.t_ns), timed.t_ns), step=step)
