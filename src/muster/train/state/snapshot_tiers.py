"""Which snapshot tiers a world has: the same on all its ranks, and fewer if memory is short."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor

from muster.checkpoint_format.snapshot_ring import NoRoom
from muster.core.typed_json import JsonObject
from muster.protocol.ranks import AgentClient, RankContext
from muster.train.distributed.process_groups import all_reduce
from muster.train.state.snapshot import Snapshots

_NONE = 1 << 40
_WITHOUT = {
    1: "copies in another host's memory; a lost host costs the steps since the last save "
    "(checkpoint.replicate_snapshots: false asks for no copies)",
    0: "snapshots in memory; any failure costs the steps since the last save "
    "(checkpoint.snapshot_every_steps: 0 asks for none)",
}


def open_together(
    context: RankContext,
    sharded: Callable[[], Mapping[str, Tensor]],
    *,
    every_steps: int | Literal["auto"],
    extra: JsonObject | None = None,
    group: dist.ProcessGroup | None,
    agent: AgentClient,
) -> Snapshots | None:
    """Every rank's snapshots of ``sharded`` in the same tiers; None: in no tier, or none are asked for.

    ``extra``: as in a checkpoint. Collective over ``group`` (None: one rank). If one rank's host has too little memory,
    the run continues with fewer tiers: without copies in other hosts' memory, or without snapshots. One such rank
    reports it.
    """
    if context.snapshot_dir is None or every_steps == 0:
        return None

    def report(text: str) -> None:
        agent.emit("run.message", text=text)

    snapshots, error = None, None
    try:
        snapshots = Snapshots(context, sharded(), extra=extra, report=report)
        error = snapshots.no_room
    except NoRoom as no_room:
        error = no_room
    tiers = 0 if snapshots is None else 1 if error is not None else 2
    replicated_step = snapshots.replicated_step if snapshots is not None else -1
    minima = torch.tensor(
        [tiers, context.rank if error is not None else _NONE, replicated_step if replicated_step >= 0 else _NONE]
    )
    if group is not None:
        all_reduce(minima, group, op=dist.ReduceOp.MIN).wait()
    tiers, reporter, replicated_step = (int(value) for value in minima)
    if error is not None and reporter == context.rank:
        report(f"{error}: the run continues without {_WITHOUT[tiers]}")
    if snapshots is None or tiers == 0:
        if snapshots is not None:
            snapshots.release_if_empty()
        return None
    snapshots.start(copies=tiers == 2, replicated_step=replicated_step if replicated_step != _NONE else -1)
    return snapshots
