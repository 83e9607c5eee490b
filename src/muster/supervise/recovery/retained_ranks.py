"""Which ranks keep their process in the next attempt: those of whole replicas other than the lost one. Pure.

A rank that is ended comes back from a standby; a rank of a healthy replica keeps its process, its device and its
model, and only the groups that cross replicas are rebuilt. That needs every rank of the replica, since they share
a sharded model, and a snapshot of the same step for those that are replaced.

Such a rank pauses where its whole replica does: after the current micro-batch or the next one, at the latest at the
end of its step (``train.distributed.pause_consensus``). So its time limit follows from step times.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

from muster.core.layout import Layout
from muster.supervise.recovery.context import SupervisorContext

#: Least time for a retained rank to pause, however short the steps are: the machine may be busy.
PAUSE_S = 4.0
#: Times the longest of the last steps: a step during a recovery is slower than those before.
PAUSE_STEPS = 1.5
#: Added for what is not computing: its last event, its snapshot.
PAUSE_MARGIN_S = 1.0


def retainable_ranks(ctx: SupervisorContext, hosts: Collection[str]) -> set[int]:
    """Ranks that could continue on ``hosts`` without a new process, as far as is known when their attempt is ended."""
    state, spec = ctx.state, ctx.settings.spec
    layout, size, progress = state.layout, state.layout.ranks_per_replica, state.progress
    replicated = max(layout.dp_replicate, spec.parallelism.dp_replicate) > 1  # one of several may be left
    if not (replicated and spec.replicas_survive):
        return set()
    if not progress.stepped or spec.command or not spec.checkpoint.snapshot_every_steps:
        return set()
    if spec.training is not None and not spec.training.optimizer.traits.restores_exactly:
        return set()  # the replicas would drift apart
    ranks_to_keep: set[int] = set()
    for replica in range(layout.dp_replicate):
        ranks = range(replica * size, (replica + 1) * size)
        if not any(rank in progress.exited or rank in progress.blamed for rank in ranks) and all(
            state.ranks.get(rank) in hosts and _stays(ctx, state.ranks[rank]) for rank in ranks
        ):
            ranks_to_keep |= set(ranks)
    return ranks_to_keep


def pause_s(ctx: SupervisorContext) -> float:
    """How long a retained rank may take to pause before it is replaced like any other."""
    needed_s = PAUSE_STEPS * max(ctx.state.recent_step_s, default=0.0) + PAUSE_MARGIN_S
    limit = ctx.settings.spec.recovery.step_timeout_s  # a step that takes longer is a hang
    return max(PAUSE_S, needed_s if limit is None else min(needed_s, limit))


def _stays(ctx: SupervisorContext, name: str) -> bool:
    host = ctx.state.hosts[name]
    return host.connected and not host.quarantined


def whole_replicas(layout: Layout, ranks: Mapping[int, str], retained: Mapping[str, set[int]]) -> list[tuple[int, ...]]:
    """The replicas of which every rank is paused on its host; each as its ranks, in order."""
    size = layout.ranks_per_replica
    every = [tuple(range(start, start + size)) for start in range(0, layout.world_size, size)]
    return [replica for replica in every if all(rank in retained.get(ranks.get(rank, ""), ()) for rank in replica)]


def prefer_hosts_of_whole_replicas(
    hosts: Sequence[str], ranks: Mapping[int, str], whole: Sequence[Sequence[int]]
) -> list[str]:
    """``hosts`` with those of whole replicas in front, so that a smaller attempt consists of them."""
    first = list(dict.fromkeys(ranks[rank] for replica in whole for rank in replica))
    return [name for name in first if name in hosts] + [name for name in hosts if name not in first]


def rank_mapping(
    old: Layout, before: Mapping[int, str], new: Layout, after: Mapping[int, str], whole: Sequence[Sequence[int]]
) -> dict[int, int]:
    """Rank of the new attempt -> the rank of the old one whose process continues as it.

    A replica continues as one on the same hosts in the same order: its ranks then hold the same shards.
    """
    if replace(old, dp_replicate=1) != replace(new, dp_replicate=1):
        return {}
    size = new.ranks_per_replica
    free = list(whole)
    mapping: dict[int, int] = {}
    starts = range(0, new.world_size, size)
    keeping_its_number = {replica[0] for replica in whole}
    for start in sorted(starts, key=lambda start: start not in keeping_its_number):
        places = [after[rank] for rank in range(start, start + size)]
        alike = [replica for replica in free if [before[rank] for rank in replica] == places]
        same = next((replica for replica in alike if replica[0] == start), next(iter(alike), None))
        if same is not None:
            free.remove(same)
            mapping |= {start + number: rank for number, rank in enumerate(same)}
    return mapping
