"""Useful share of wall time, from the failure rate of the mode and what a recovery costs.

Tiers as the trainer has them: a snapshot in the host's own memory survives what kills a process, a peer's copy or the
bucket what kills a machine. Formulas of interval and waste are in ``core.intervals``.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from muster.catalog.rows import Mode
from muster.core import intervals
from muster.plan.constants import Constants
from muster.plan.step_time import local_state_bytes
from muster.plan.workload import Setting, Workload

DAY_S = 86400.0
#: Seconds from a fault to the first new step, without the step itself: detection, new ranks from warm standby, state
#: from memory; and with a replacement machine. Modelled; the first agrees with what local runs show.
PROCESS_RECOVERY_S = 15.0
MACHINE_RECOVERY_S = 300.0
#: First start: images, imports, first compile.
START_S = 600.0


@dataclass(frozen=True, kw_only=True)
class Goodput:
    """Where wall time goes over a whole run."""

    share: float
    """Useful step time over wall time, start-up left out."""
    failures_per_day: float
    preemptions_per_day: float
    checkpoint_every_s: float
    checkpoint_every_steps: int
    restore_s: float
    tier: str
    """What survives the loss of a machine: peer or bucket."""

    @property
    def interruptions_per_day(self) -> float:
        return self.failures_per_day + self.preemptions_per_day


def goodput(
    work: Workload,
    setting: Setting,
    mode: Mode,
    num_nodes: int,
    step_s: float,
    constants: Constants,
    *,
    preemptions_per_node_day: float | None = None,
) -> Goodput:
    """The useful share of a long run at this step time; ``work.snapshot_every`` is a number by now.

    ``preemptions_per_node_day``: instead of the mode's own middle value (its low and high give a plan's bounds).
    """
    per_day = mode.failures_per_node_day * num_nodes
    rate = mode.preemptions_per_node_day.value if preemptions_per_node_day is None else preemptions_per_node_day
    preempted = rate * num_nodes
    state = local_state_bytes(work, setting) * setting.layout.ranks_per_replica
    drain = state / (constants.store_bytes_per_s_per_node * num_nodes)
    stall = local_state_bytes(work, setting) / constants.device_to_host_bytes_per_s
    if not work.asynchronous:
        stall, drain = drain, 0.0
    restore = state * setting.layout.dp_replicate / (constants.store_bytes_per_s_per_node * num_nodes)
    memory, every = work.snapshot_every != 0, work.snapshot_every or 1
    copied = memory and num_nodes > 1 and work.replicate_snapshots is not False
    # Preemptions take several machines at once, with every copy (skypilot-org/spot-traces): the bucket is what is left.
    to_bucket = intervals.disk_share(memory=memory, peer=copied)
    bucket_rate = to_bucket * per_day + preempted
    to_memory = intervals.PROCESS_SHARE if memory else 0.0
    process = to_memory * per_day * (PROCESS_RECOVERY_S + every * step_s / 2) / DAY_S
    to_peer = 1 - to_memory - to_bucket
    peer = to_peer * per_day * (MACHINE_RECOVERY_S + every * step_s) / DAY_S
    bucket = intervals.Tier(
        name="bucket",
        stall_s=stall,
        drain_s=drain,
        recovery_s=MACHINE_RECOVERY_S + restore,
        mtbf_s=DAY_S / bucket_rate if bucket_rate else math.inf,
    )
    every_s, every_steps = _interval(work, bucket, step_s)
    lost = intervals.waste(every_s, bucket) + process + peer
    return Goodput(
        share=math.exp(-lost),  # first-order waste beyond 1 means no progress at all; this agrees and stays positive
        failures_per_day=per_day,
        preemptions_per_day=preempted,
        checkpoint_every_s=every_s,
        checkpoint_every_steps=every_steps,
        restore_s=restore,
        tier="peer" if copied else "bucket",
    )


def _interval(work: Workload, bucket: intervals.Tier, step_s: float) -> tuple[float, int]:
    """(seconds, steps) between saves: the run file's, or the optimum; never beyond the run's end."""
    length = work.steps
    if work.checkpoint_every:
        steps = min(work.checkpoint_every, length)
    elif work.checkpoint_every == 0 or math.isinf(bucket.mtbf_s):
        steps = length
    else:
        best = intervals.automatic(bucket)
        steps = intervals.whole_steps(best, step_s, lambda t: 1 - intervals.waste(t, bucket))
        steps = max(1, min(steps, length))
    return steps * step_s, steps
