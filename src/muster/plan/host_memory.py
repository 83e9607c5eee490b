"""What the snapshots of a training take of a machine's own memory, and whether it has that.

The trainer's rules (``checkpoint_format.snapshot_ring``): a rank's own ring has two slots, three where another host
gets copies; that host holds two of each rank's. A save is staged in addition. While copies take longer than a step a
fourth slot is reserved where there is room; it is not counted here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from muster.catalog import gke
from muster.core.snapshots import COPIED_SLOTS, OWN_SLOTS, PEER_SLOTS
from muster.plan.step_time import local_state_bytes
from muster.plan.workload import Setting, Workload

GIB = 1 << 30


@dataclass(frozen=True, kw_only=True)
class HostMemory:
    """Bytes of one machine."""

    items: Mapping[str, int]
    limit_bytes: int | None
    """Of ``/dev/shm``, which holds all but the staged save; None: the machine is not in the catalogue."""
    without_copies_bytes: int
    """In ``/dev/shm`` with ``checkpoint.replicate_snapshots: false``."""

    @property
    def snapshot_bytes(self) -> int:
        """In ``/dev/shm``."""
        return sum(count for name, count in self.items.items() if name != STAGED)

    @property
    def warning(self) -> str | None:
        """What will happen where it is too little, and which key helps."""
        if self.limit_bytes is None or self.snapshot_bytes <= self.limit_bytes:
            return None
        text = f"snapshots need {_gb(self.snapshot_bytes)} of a host's memory, /dev/shm has {_gb(self.limit_bytes)}"
        if self.without_copies_bytes <= self.limit_bytes:
            return f"{text}: no copies on other hosts (as with checkpoint.replicate_snapshots: false)"
        return f"{text}: no snapshots in memory (as with checkpoint.snapshot_every_steps: 0)"


STAGED = "staged save"


def host_memory(work: Workload, setting: Setting, *, machine: str, gpus_per_node: int, num_nodes: int) -> HostMemory:
    """Of one machine of this plan."""
    state = round(local_state_bytes(work, setting) * gpus_per_node)
    # Peers in other replicas replace copies, unless the run file requests both.
    twins = setting.layout.dp_replicate > 1 and work.replicate_snapshots is None
    copied = num_nodes > 1 and work.replicate_snapshots is not False and not twins
    items: dict[str, int] = {}
    if work.snapshot_every != 0:
        items["own snapshots"] = state * (COPIED_SLOTS if copied else OWN_SLOTS)
        if copied:
            items["another host's copies"] = state * PEER_SLOTS
    if work.asynchronous:
        items[STAGED] = round(state / setting.layout.dp_replicate)
    return HostMemory(
        items=items, limit_bytes=_limit_bytes(machine), without_copies_bytes=state * OWN_SLOTS if items else 0
    )


def _limit_bytes(name: str) -> int | None:
    result = (family.machines[name] for family in gke.families().values() if name in family.machines)
    machine = next(result, None)
    return None if machine is None else machine.shared_memory_gib * GIB


def _gb(count: int) -> str:
    return f"{count / 1e9:,.0f} GB"
