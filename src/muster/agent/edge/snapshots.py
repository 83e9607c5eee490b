"""The snapshots in a host's memory: what an attempt starts from, what is held, and what is no longer needed."""

from __future__ import annotations

import contextlib
from collections.abc import Collection
from dataclasses import replace
from pathlib import Path

from muster.agent.replicator import snapshot_cleanup
from muster.agent.values.events import MemoryChecked, StatePrepared
from muster.agent.values.host_identity import SOCKET, HostIdentity
from muster.checkpoint_format.snapshot_ring import Ring, file_name, forget_refusal, list_snapshots, ring_of
from muster.config.spec import RunSpec
from muster.core.errors import CheckpointError, MusterError
from muster.core.snapshots import SnapshotCopy
from muster.protocol.ranks import ShardSource
from muster.protocol.replicator_orders import CopyTo, FetchVersion
from muster.protocol.to_agent import StartAttempt
from muster.storage.memory_dir import MemoryDir
from muster.transport.connections import ConnectionPool
from muster.transport.stream import REPLICATOR_SOCKET


class SnapshotStore:
    """One folder of rings, which may be made again. Other hosts' shards come through the replicator."""

    def __init__(self, *, memory: MemoryDir, host: str) -> None:
        self._memory_dir, self._host = memory, host
        self._copies: CopyTo | None = None
        """Of the attempt here, where it takes snapshots."""
        self._fetched_dropped = 0
        """Attempt that has taken a step, so that its fetched snapshots were dropped."""
        self._layouts_dropped = 0
        """Attempt that has snapshots of its own, so that those of other layouts and former partners were dropped."""

    @property
    def _memory(self) -> Path:
        return self._memory_dir.folder

    def held(self) -> tuple[SnapshotCopy, ...]:
        """Every whole version, a rank's own and the copies for other hosts."""
        return tuple(SnapshotCopy(host=self._host, **vars(found)) for found in list_snapshots(self._memory))

    def drop(self, copies: Collection[SnapshotCopy]) -> None:
        """Those of this host are not intact: they are held no longer."""
        for copy in copies:
            with contextlib.suppress(CheckpointError):  # its ring is gone, or no ring any more: it is not listed
                if copy.host == self._host:
                    self._drop(copy)

    def _drop(self, copy: SnapshotCopy) -> None:
        ring = Ring.open(self._memory / ring_of(copy), writable=True)
        version = ring.find(copy.step, copy.attempt)
        if version is not None:
            ring.drop(version)
        ring.close()

    def prepare(self, order: StartAttempt, spec: RunSpec) -> StatePrepared:
        """The contexts of an attempt's ranks with what only this host knows: its folder in memory, and where in it each
        needed shard is. One that another host holds will be there if a rank takes its place; of another layout's the
        ranks read parts, from that host."""
        if not order.contexts:
            return StatePrepared(order.attempt, ())
        takes_snapshots = bool(spec.checkpoint.snapshot_every_steps)
        first = order.contexts[0]
        ranks = tuple(context.rank for context in order.contexts)
        copies = CopyTo(
            attempt=order.attempt, peer=order.peer, layout=first.layout.key, ranks=ranks, copies_of=order.copies_of
        )
        self._copies = copies if takes_snapshots else None
        sources, fetches = self._sources(order)
        memory = str(self._memory)
        # A retained rank has its state and reads none: it would not do its share.
        share = all(context.kept_rank is None for context in order.contexts)
        completed = []
        for context in order.contexts:
            restore = context.restore and replace(context.restore, sources=sources, share_verification=share)
            snapshot_dir = memory if takes_snapshots else None
            completed.append(replace(context, host_memory=memory, snapshot_dir=snapshot_dir, restore=restore))
        return StatePrepared(order.attempt, tuple(completed), copies, tuple(fetches))

    def _sources(self, order: StartAttempt) -> tuple[dict[int, ShardSource], list[FetchVersion]]:
        layout, restore = order.contexts[0].layout.key, order.contexts[0].restore
        if restore is None:
            snapshot_cleanup.begin_layout(self._memory, layout=layout, origin=None, step=-1, attempt=0)
            return {}, []
        origin = restore.layout.key
        snapshot_cleanup.begin_layout(
            self._memory, layout=layout, origin=origin, step=restore.step, attempt=restore.attempt
        )
        sources, fetches = {}, []
        for shard in order.fetch:
            held = ring_of(shard.copy)
            path = self._memory / held
            if shard.address is not None and origin != layout:  # its ranks read the parts that they need
                sources[shard.rank] = ShardSource(path=held, copy=shard.copy, address=shard.address)
                continue
            if shard.address is not None:
                path = self._memory / file_name("fetched", origin, shard.rank)
                forget_refusal(path)
                fetches.append(FetchVersion(address=shard.address, file=held, target=path.name, copy=shard.copy))
            sources[shard.rank] = ShardSource(path=str(path), copy=shard.copy)
        return sources, fetches

    def on_step(self, attempt: int) -> None:
        """The attempt takes steps: drop what was fetched for its start, and soon what is of another layout or a former
        partner."""
        if self._fetched_dropped != attempt:
            self._fetched_dropped = attempt
            snapshot_cleanup.drop_fetched(self._memory)
        copies = self._copies
        if self._layouts_dropped == attempt or copies is None:
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


class MemoryWatch:
    """Owns the socket file on which the agent listens."""

    def __init__(self, *, identity: HostIdentity, pool: ConnectionPool) -> None:
        self._identity, self._pool = identity, pool
        self._renewed = ""
        """How the folder was lost and made again, until that is reported."""
        self._listens = False

    def listen(self) -> None:
        """Accept the host's processes on the socket file, bound again. Raises OSError."""
        self._listens = False  # a bound file on which nothing accepts looks like one that is served
        self._pool.leave_socket_files()
        self._pool.listen(f"unix:{self._identity.memory.bind_address(SOCKET)}")
        self._listens = True

    def check(self) -> MemoryChecked:
        """Never raises: what cannot be repaired yet is tried again."""
        memory = self._identity.memory
        try:
            rebound = self._repair()
        except (OSError, MusterError) as error:
            return MemoryChecked(str(memory.path(SOCKET)), trouble=str(error))
        renewed, self._renewed = self._renewed, ""
        return MemoryChecked(str(memory.path(SOCKET)), renewed, rebound, memory.exists(REPLICATOR_SOCKET))

    def _repair(self) -> bool:
        """Whether the socket file was bound again."""
        identity, memory = self._identity, self._identity.memory
        if memory.is_lost():
            before = memory.folder
            memory.renew(identity.run_dir, run_id=identity.run_id, host=identity.host)
            name = "" if memory.folder == before else f" as {memory.folder}, for the name is taken"
            lost = f"{before} was deleted from outside, with the snapshots in it"
            self._renewed, self._listens = f"{lost}; recreated{name}", False
        if self._listens and memory.exists(SOCKET):
            return False
        self.listen()
        return True
