"""Snapshots that hosts hold in memory, as they report them: the newest version that all shards of are there. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from muster.core.layout import Layout
from muster.core.snapshots import SnapshotCopy
from muster.protocol.to_agent import FlushShard


@dataclass(frozen=True, kw_only=True)
class Choice:
    """A complete version and where each of its shards is."""

    step: int
    attempt: int
    layout: Layout
    shards: Mapping[int, SnapshotCopy]
    """Rank of that attempt -> where its state is; with replicas perhaps under a replica peer's rank."""
    holders: Mapping[int, Sequence[SnapshotCopy]] = field(default_factory=dict)
    """All snapshots that hold it."""
    local_steps: int = 0
    """Replicas make so many steps by themselves: what a replica peer holds is another state."""

    def nearest(self, rank: int, host: str) -> SnapshotCopy:
        """Where ``host`` takes a rank's state from: its own memory before any other host's, a peer's copy included."""
        first = self.shards[rank]
        here = (
            held
            for held in self.holders.get(rank, ())
            if held.host == host and (not self.local_steps or held.rank == first.rank)
        )
        return next(here, first)

    def flush_shards(self, host: str) -> tuple[FlushShard, ...]:
        """The shards for which ``host`` was chosen, as an order to flush them names each."""
        local = ((rank, held) for rank, held in sorted(self.shards.items()) if held.host == host)
        return tuple(FlushShard(rank=rank, copy=held) for rank, held in local)


def newest_complete(snapshots: Sequence[SnapshotCopy], *, local_steps: int = 0) -> Choice | None:
    """The newest step whose every shard exists on a living host; None when there is none.

    Shards of one version are of one layout, one step and one attempt: versions never mix. A replica's
    shard replaces that of its peer in another replica (``dp_replicate`` > 1: the same state).

    With ``local_steps`` it is another state, with which a replica would have to restart: an older version that has
    every replica's own is taken before that, unless it is from before the replicas met last.
    """
    found = _newest(snapshots, twins=True)
    if not local_steps or found is None or all(held.rank == rank for rank, held in found.shards.items()):
        return found and replace(found, local_steps=local_steps)
    own = _newest(snapshots, twins=False)
    kept = own is not None and own.layout == found.layout and own.step >= found.step // local_steps * local_steps
    return replace(own if kept and own is not None else found, local_steps=local_steps)


def _newest(snapshots: Sequence[SnapshotCopy], *, twins: bool) -> Choice | None:
    versions: dict[tuple[int, int, str], dict[int, list[SnapshotCopy]]] = {}
    for snapshot in snapshots:
        versions.setdefault((snapshot.step, snapshot.attempt, snapshot.layout), {}).setdefault(
            snapshot.rank, []
        ).append(snapshot)
    for (step, attempt, key), ranks in sorted(versions.items(), reverse=True):
        layout = Layout.from_key(key)
        places: dict[int, list[SnapshotCopy]] = {}
        for rank in range(layout.world_size):
            holders = [
                held
                for twin in (rank, *(replica_peers(layout, rank) if twins else ()))
                for held in sorted(ranks.get(twin, ()), key=lambda snapshot: snapshot.tier != "memory")
            ]
            if not holders:
                break
            places[rank] = holders
        else:
            shards = {rank: holders[0] for rank, holders in places.items()}
            return Choice(step=step, attempt=attempt, layout=layout, shards=shards, holders=places)
    return None


def replica_peers(layout: Layout, rank: int) -> list[int]:
    """Ranks of other replicas that hold the same state."""
    size = layout.ranks_per_replica
    return [other for other in range(rank % size, layout.world_size, size) if other != rank]


def needed_shards(choice: Choice, name: str) -> list[int]:
    """Ranks whose shards a host needs to form any part of the state: one of each set of replica peers, preferably one
    that the host holds. With local steps every rank's own."""
    if choice.local_steps:
        return [rank for rank, held in sorted(choice.shards.items()) if held.rank == rank]
    return [
        next((twin for twin in (rank, *replica_peers(choice.layout, rank)) if choice.shards[twin].host == name), rank)
        for rank in range(choice.layout.ranks_per_replica)
    ]


def has_replica_on_other_host(layout: Layout, ranks: Mapping[int, str], name: str) -> bool:
    """Whether the state of every rank on host ``name`` is on another host too, in another replica."""
    local_ranks = [rank for rank, host in ranks.items() if host == name]
    return bool(local_ranks) and all(
        any(ranks.get(twin) != name for twin in replica_peers(layout, rank)) for rank in local_ranks
    )
