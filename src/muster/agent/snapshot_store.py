"""The snapshots in a host's memory: what an attempt starts from, what is held, and what is no longer needed."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection
from dataclasses import replace
from pathlib import Path

from muster.agent.replicator import snapshot_cleanup
from muster.checkpoint_format.snapshot_ring import Ring, file_name, forget_refusal, list_snapshots, ring_of
from muster.core.errors import CheckpointError
from muster.core.snapshots import SnapshotCopy
from muster.protocol.ranks import RankContext, ShardSource
from muster.protocol.replicator_orders import CopyTo, FetchVersion
from muster.protocol.to_agent import StartAttempt
from muster.protocol.to_supervisor import SnapshotsRejected


class SnapshotStore:
    """One folder of rings. Other hosts' shards come through the replicator."""

    def __init__(
        self,
        *,
        memory: Callable[[], Path],
        host: str,
        takes_snapshots: Callable[[], bool],
        copy_to: Callable[[CopyTo], None],
        fetch: Callable[[FetchVersion], None],
        forget_fetches: Callable[[], None],
    ) -> None:
        """``memory``: the folder, which may be made anew. ``copy_to`` and what follows are the replicator's."""
        self._folder, self._host = memory, host
        self._takes_snapshots, self._copy_to = takes_snapshots, copy_to
        self._fetch, self._forget_fetches = fetch, forget_fetches
        self._copies: CopyTo | None = None
        """Of the attempt here."""
        self._fetched_dropped = 0
        """Attempt that has taken a step, so that its fetched snapshots were dropped."""
        self._layouts_dropped = 0
        """Attempt that has snapshots of its own, so that those of other layouts and former partners were dropped."""

    @property
    def _memory(self) -> Path:
        return self._folder()

    def held(self) -> tuple[SnapshotCopy, ...]:
        """Every whole version, a rank's own and the copies for other hosts."""
        return tuple(SnapshotCopy(host=self._host, **vars(found)) for found in list_snapshots(self._memory))

    def drop(self, copies: Collection[SnapshotCopy]) -> None:
        """Those of this host are not intact: they are held no longer."""
        for copy in copies:
            with contextlib.suppress(CheckpointError):  # its ring is gone, or no ring any more: it is not listed
                if copy.host == self._host:
                    self._drop(copy)

    def rejected(self, found: SnapshotsRejected) -> SnapshotsRejected:
        """The replicator came upon copies that are not intact: they are dropped. The same, for the supervisor."""
        copies = tuple(replace(copy, host=self._host) for copy in found.copies)
        self.drop(copies)
        return replace(found, copies=copies)

    def _drop(self, copy: SnapshotCopy) -> None:
        ring = Ring.open(self._memory / ring_of(copy), writable=True)
        version = ring.find(copy.step, copy.attempt)
        if version is not None:
            ring.drop(version)
        ring.close()

    def begin(self, order: StartAttempt) -> list[RankContext]:
        """The contexts of an attempt's ranks with what only this host knows: its folder in memory, and where in it each
        needed shard is. One that another host holds will be there if a rank takes its place; of another layout's the
        ranks read parts, from that host."""
        sources, memory = self._sources(order), str(self._memory)
        # A retained rank has its state and reads none: it would not do its share.
        share = all(context.kept_rank is None for context in order.contexts)
        completed = []
        for context in order.contexts:
            restore = context.restore and replace(context.restore, sources=sources, share_verification=share)
            snapshot_dir = memory if self._takes_snapshots() else None
            completed.append(replace(context, host_memory=memory, snapshot_dir=snapshot_dir, restore=restore))
        return completed

    def _sources(self, order: StartAttempt) -> dict[int, ShardSource]:
        if not order.contexts:
            return {}
        first = order.contexts[0]
        layout, ranks = first.layout.key, tuple(context.rank for context in order.contexts)
        self._copies = CopyTo(
            attempt=order.attempt, peer=order.peer, layout=layout, ranks=ranks, copies_of=order.copies_of
        )
        self._copy_to(self._copies)
        restore = first.restore
        if restore is None:
            snapshot_cleanup.begin_layout(self._memory, layout=layout, origin=None, step=-1, attempt=0)
            return {}
        origin = restore.layout.key
        snapshot_cleanup.begin_layout(
            self._memory, layout=layout, origin=origin, step=restore.step, attempt=restore.attempt
        )
        sources = {}
        for shard in order.fetch:
            held = ring_of(shard.copy)
            path = self._memory / held
            if shard.address is not None and origin != layout:  # its ranks read the parts that they need
                sources[shard.rank] = ShardSource(path=held, copy=shard.copy, address=shard.address)
                continue
            if shard.address is not None:
                path = self._memory / file_name("fetched", origin, shard.rank)
                forget_refusal(path)
                self._fetch(FetchVersion(address=shard.address, file=held, target=path.name, copy=shard.copy))
            sources[shard.rank] = ShardSource(path=str(path), copy=shard.copy)
        return sources

    def on_step(self, attempt: int) -> None:
        """The attempt takes steps: drop what was fetched for its start, and soon what is of another layout or a former
        partner."""
        if self._fetched_dropped != attempt:
            self._fetched_dropped = attempt
            snapshot_cleanup.drop_fetched(self._memory)
            self._forget_fetches()
        copies = self._copies
        if self._layouts_dropped == attempt or copies is None or not self._takes_snapshots():
            return
        if snapshot_cleanup.has_snapshots(
            self._memory,
            layout=copies.layout,
            ranks=copies.ranks,
            attempt=attempt,
            replicate_snapshots=copies.peer is not None,
            copies_of=copies.copies_of,
        ):
            self._layouts_dropped = attempt
            snapshot_cleanup.drop_other_layouts(self._memory, keep={copies.layout})
            snapshot_cleanup.drop_other_copies(self._memory, layout=copies.layout, ranks=copies.copies_of)
