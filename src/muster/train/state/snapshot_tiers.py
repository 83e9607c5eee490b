"""Which tiers of snapshots a world has: the same on all its ranks, and fewer where there is no room."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from muster.checkpoint_format.snapshot_ring import NoRoom
from muster.protocol.ranks import RankContext
from muster.train.distributed.process_groups import all_reduce
from muster.train.state.snapshot import Snapshots

_NOBODY = 1 << 40
_WITHOUT = {
    1: "copies in another host's memory; a lost host costs the steps since the last save "
    "(checkpoint.replicate_snapshots: false asks for no copies)",
    0: "snapshots in memory; any failure costs the steps since the last save "
    "(checkpoint.snapshot_every_steps: 0 asks for none)",
}


def open_together(
    context: RankContext,
    sharded: Mapping[str, Tensor],
    *,
    extra: Mapping[str, Any] | None = None,
    group: dist.ProcessGroup | None,
    say: Callable[[str], None],
) -> Snapshots | None:
    """Every rank's snapshots in the same tiers; None: in none. Collective over ``group`` (None: one rank).

    Where one rank's host has no room, the run goes on with fewer tiers: without copies in other hosts' memory, else
    without snapshots. One of those ranks says so.
    """
    taken, trouble = None, None
    try:
        taken = Snapshots(context, sharded, extra=extra, say=say)
        trouble = taken.no_room
    except NoRoom as error:
        trouble = error
    tiers = 0 if taken is None else 1 if trouble is not None else 2
    reached = taken.reached if taken is not None else -1
    found = torch.tensor(
        [tiers, context.rank if trouble is not None else _NOBODY, reached if reached >= 0 else _NOBODY]
    )
    if group is not None:
        all_reduce(found, group, op=dist.ReduceOp.MIN).wait()
    tiers, speaker, reached = (int(value) for value in found)
    if trouble is not None and speaker == context.rank:
        say(f"{trouble}: the run goes on without {_WITHOUT[tiers]}")
    if taken is None or tiers == 0:
        if taken is not None:
            taken.let_go()
        return None
    taken.begin(copies=tiers == 2, reached=reached if reached != _NOBODY else -1)
    return taken
