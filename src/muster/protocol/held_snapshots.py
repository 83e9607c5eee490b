"""Snapshots that hosts hold in memory, as they report them: the newest version that all shards of are there. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from muster.core.layout import Layout


@dataclass(frozen=True, kw_only=True, order=True)
class Snapshot:
    """One rank's in-memory snapshot as a host reports it."""

    step: int
    attempt: int
    rank: int
    layout: str
    """``Layout.key`` of the world that took it."""
    host: str
    tier: str
    """memory (its own) or peer."""

    @classmethod
    def reported(cls, host: str, item: Mapping[str, Any]) -> Snapshot:
        """One of a host's list. Raises LookupError, TypeError or ValueError where it is unusable."""
        step, attempt, rank = (int(item[name]) for name in ("step", "attempt", "rank"))
        layout, tier = str(item["layout"]), str(item["tier"])
        return cls(step=step, attempt=attempt, rank=rank, layout=layout, host=host, tier=tier)


@dataclass(frozen=True, kw_only=True)
class Choice:
    """A complete version and where each of its shards is."""

    step: int
    attempt: int
    layout: Layout
    shards: Mapping[int, Snapshot]
    """Rank of that attempt -> where its state is; with replicas perhaps under a replica peer's rank."""
    holders: Mapping[int, Sequence[Snapshot]] = field(default_factory=dict)
    """All snapshots that hold it."""

    def nearest(self, rank: int, host: str) -> Snapshot:
        """Where ``host`` takes a rank's state from: its own memory before any other host's, a peer's copy included."""
        here = (held for held in self.holders.get(rank, ()) if held.host == host)
        return next(here, self.shards[rank])

    def shards_on(self, host: str) -> list[dict[str, Any]]:
        """The shards for which ``host`` was chosen, as an order to flush them names each."""
        mine = ((rank, held) for rank, held in sorted(self.shards.items()) if held.host == host)
        return [{"rank": rank, "tier": held.tier, "held_as": held.rank} for rank, held in mine]


def newest_complete(snapshots: Sequence[Snapshot]) -> Choice | None:
    """The newest step whose every shard exists on a living host; None when there is none.

    Shards of one version are of one layout, one step and one attempt: versions never mix. A replica's
    shard replaces that of its peer in another replica (``dp_replicate`` > 1: the same state).
    """
    versions: dict[tuple[int, int, str], dict[int, list[Snapshot]]] = {}
    for found in snapshots:
        versions.setdefault((found.step, found.attempt, found.layout), {}).setdefault(found.rank, []).append(found)
    for (step, attempt, key), ranks in sorted(versions.items(), reverse=True):
        layout = Layout.from_key(key)
        places: dict[int, list[Snapshot]] = {}
        for rank in range(layout.world_size):
            holders = [
                held
                for twin in (rank, *replica_peers(layout, rank))
                for held in sorted(ranks.get(twin, ()), key=lambda found: found.tier != "memory")
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
    that the host holds."""
    return [
        next((twin for twin in (rank, *replica_peers(choice.layout, rank)) if choice.shards[twin].host == name), rank)
        for rank in range(choice.layout.ranks_per_replica)
    ]


def has_replica_on_other_host(layout: Layout, ranks: Mapping[int, str], name: str) -> bool:
    """Whether the state of every rank on host ``name`` is on another host too, in another replica."""
    mine = [rank for rank, host in ranks.items() if host == name]
    return bool(mine) and all(any(ranks.get(twin) != name for twin in replica_peers(layout, rank)) for rank in mine)
