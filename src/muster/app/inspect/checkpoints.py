"""Checkpoints of a run, over every tier: what is where, how old it is, and which one a restart would take.

Disk and bucket are read by their markers. The hosts' memories are read where they are on this machine (a run here, or
this host's share of a Slurm job): a snapshot is a file on tmpfs. Of a memory out of reach only
the run's own last word is passed on.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from muster import backends
from muster.app.inspect.home_view import bring
from muster.app.inspect.status import spec_of, supervisor_status
from muster.checkpoint_format import manifest, snapshot_ring
from muster.checkpoint_format.manifest import Manifest
from muster.core import event_log
from muster.core.errors import CheckpointError, MusterError
from muster.core.event_details.training import Step
from muster.core.event_log import Damage
from muster.core.events import Event
from muster.core.snapshots import SnapshotCopy, Tier
from muster.core.typed_json import Json
from muster.core.types import Layout
from muster.protocol.held_snapshots import Choice, newest_complete, replica_peers
from muster.storage import run_registry, uris
from muster.storage.memory_dir import MemoryDir
from muster.storage.run_registry import RunDir
from muster.storage.store import open_store

TIERS = ("memory", "peer", "disk", "bucket")
#: A supervisor that is there answers at once.
ASK_TIMEOUT_S = 2.0


@dataclass(frozen=True, kw_only=True)
class Version:
    """One step's state in one tier."""

    step: int
    attempt: int
    tier: str
    layout: str
    """``Layout.key`` of the world that wrote it."""
    ranks: tuple[int, ...]
    """Whose shards are there."""
    missing: tuple[int, ...]
    """Whose are not, and no other replica's in their stead."""
    hosts: tuple[str, ...]
    """In whose memory; empty for disk and bucket."""
    bytes: int
    uri: str
    written_ns: int | None
    """Wall clock; None: no event of that step is known."""
    problem: str | None = None
    """Why it could not be used, though it is there."""
    heldout_loss: float | None = None
    """Of disk and bucket, where a save came with an evaluation."""
    used: bool = False
    """A restart would begin from it (or from it and the other memory tier's shards)."""

    @property
    def complete(self) -> bool:
        """This tier alone would do."""
        return not self.missing and self.problem is None


@dataclass(frozen=True, kw_only=True)
class Catalogue:
    """What there is of a run's state."""

    run: RunDir
    directory: str
    versions: tuple[Version, ...]
    """Newest first; of one step the nearest tier first."""
    committed: tuple[Manifest, ...]
    skipped: tuple[tuple[str, str], ...]
    """(URI, reason)."""
    unseen: tuple[str, ...] = ()
    """Hosts of the run whose memory is not on this machine."""
    reported: tuple[tuple[str, int], ...] = ()
    """(tier, newest step there) as the run's last step said it."""
    now_ns: int = 0
    damaged: tuple[Damage, ...] = ()
    """Places of the event log that were left out."""

    @property
    def used(self) -> Version | None:
        return next((version for version in self.versions if version.used), None)

    def age_s(self, version: Version) -> float | None:
        """Seconds since it was written."""
        return None if version.written_ns is None else max(0, self.now_ns - version.written_ns) / 1e9

    def to_json(self) -> dict[str, Json]:
        return {
            "run_id": self.run.run_id,
            "directory": self.directory,
            "versions": [
                {**asdict(version), "complete": version.complete, "age_s": self.age_s(version)}
                for version in self.versions
            ],
            "would_use": None if self.used is None else {"step": self.used.step, "tier": self.used.tier},
            "committed": [
                {"step": record.step, "uri": record.uri, "attempt": record.attempt, "bytes": record.bytes}
                for record in self.committed
            ],
            "skipped": [{"uri": uri, "reason": reason} for uri, reason in self.skipped],
            "unseen_hosts": list(self.unseen),
            "told": dict(self.reported),
            "damaged": [damage.to_json() for damage in self.damaged],
        }


def checkpoints(reference: str) -> Catalogue:
    """Look, change nothing. Sizes of files are compared with what their marker promises; checksums, only at a restore.

    Raises:
        MusterError: no such run, or its folder of checkpoints cannot be read.
    """
    run = run_registry.find(reference)
    spec = spec_of(run)
    damaged: list[Damage] = []
    bring(run, spec.backend, "events", damaged.append)
    directory = spec.checkpoint_uri(run.path)
    skipped: list[tuple[str, str]] = []
    committed = manifest.committed(open_store(), directory, on_skip=lambda uri, reason: skipped.append((uri, reason)))
    events = event_log.merged(run.events, on_damage=damaged.append)
    steps = {(event.step, event.attempt): event for event in events if event.kind == "step"}
    connected, active = _hosts(run)
    lying = memories(run)
    result = [*in_memory(lying, connected=connected, steps=steps.values()), *(_on_disk(record) for record in committed)]
    last = max(steps.values(), key=lambda event: event.wall_ns, default=None)
    return Catalogue(
        run=run,
        directory=directory,
        versions=tuple(
            sorted(_chosen(result), key=lambda version: (-version.step, -version.attempt, TIERS.index(version.tier)))
        ),
        committed=tuple(committed),
        skipped=tuple(skipped),
        unseen=tuple(sorted(set(active) - set(lying))),
        reported=_reported(last) if set(active) - set(lying) else (),
        now_ns=time.time_ns(),
        damaged=tuple(damaged),
    )


def memories(run: RunDir) -> dict[str, Path]:
    """Host -> its folder of snapshots, for each that is on this machine; the next attempt's agents look there too."""
    return {host: memory.folder for host, memory in sorted(MemoryDir.of_run(run.path).items())}


def in_memory(
    lying: dict[str, Path], *, connected: Collection[str] | None, steps: Iterable[Event]
) -> Iterator[Version]:
    """What the hosts' memories hold. ``connected``: hosts that a living supervisor has; None: there is none."""
    written = {(event.step, event.attempt): event.wall_ns for event in steps}
    parts: dict[tuple[int, int, str, str, str | None], list[tuple[int, str, int]]] = {}
    for host, path in lying.items():
        gone = connected is not None and host not in connected
        problem = "the supervisor has lost the host" if gone else None
        for held in snapshot_ring.list_snapshots(path):
            key = (held.step, held.attempt, held.layout, held.tier, problem)
            parts.setdefault(key, []).append((held.rank, host, _slot_bytes(path, held)))
    for (step, attempt, layout, tier, problem), shards in parts.items():
        ranks = tuple(sorted({rank for rank, _, _ in shards}))
        yield Version(
            step=step,
            attempt=attempt,
            tier=tier,
            layout=layout,
            ranks=ranks,
            missing=tuple(missing_ranks(Layout.from_key(layout), ranks)),
            hosts=tuple(sorted({host for _, host, _ in shards})),
            bytes=sum(size for _, _, size in shards),
            uri="",
            written_ns=written.get((step, attempt)),
            problem=problem,
        )


def missing_ranks(layout: Layout, ranks: Collection[int]) -> list[int]:
    """Ranks of the layout whose state is in none of ``ranks``: a replica's shard replaces its peer's."""
    return [
        rank
        for rank in range(layout.world_size)
        if rank not in ranks and not any(twin in ranks for twin in replica_peers(layout, rank))
    ]


def _slot_bytes(path: Path, held: snapshot_ring.SnapshotInfo) -> int:
    try:
        result = snapshot_ring.Ring.open(path / snapshot_ring.ring_of(held))
    except CheckpointError:
        return 0  # gone since it was listed
    try:
        return int(result.slot_bytes)
    finally:
        result.close()


def _on_disk(result: Manifest) -> Version:
    ranks = tuple(range(result.layout.world_size))
    try:
        problem = manifest.missing(result)
    except (MusterError, OSError) as error:
        problem = f"its files cannot be looked at: {error}"
    return Version(
        step=result.step,
        attempt=result.attempt,
        tier="disk" if uris.is_local(result.uri) else "bucket",
        layout=result.layout.key,
        ranks=ranks,
        missing=(),
        hosts=(),
        bytes=result.bytes,
        heldout_loss=result.heldout_loss,
        uri=result.uri,
        written_ns=result.created_ns,
        problem=problem,
    )


def _chosen(result: Sequence[Version]) -> list[Version]:
    """Mark what a restart would take: the newest version that is whole, the hosts' memories together as one."""
    tiers: tuple[Tier, ...] = ("memory", "peer")
    memory = newest_complete(
        [
            SnapshotCopy(
                step=version.step, attempt=version.attempt, rank=rank, layout=version.layout, host="", tier=tier
            )
            for version in result
            for tier in tiers
            if version.tier == tier and version.problem is None
            for rank in version.ranks
        ]
    )
    saved = max(
        (version for version in result if version.tier in ("disk", "bucket") and version.complete),
        key=lambda version: (version.step, version.attempt),
        default=None,
    )
    if memory is not None and (saved is None or memory.step >= saved.step):
        return [replace(version, used=_is_of(version, memory)) for version in result]
    return [replace(version, used=version is saved) for version in result]


def _is_of(version: Version, choice: Choice) -> bool:
    same = (version.step, version.attempt, version.layout) == (choice.step, choice.attempt, choice.layout.key)
    needed = {shard.tier for shard in choice.shards.values()}
    return same and version.tier in needed and version.problem is None


def _hosts(run: RunDir) -> tuple[set[str] | None, set[str]]:
    """(hosts the supervisor is connected to, those that run ranks); (None, nothing) where none answers."""
    if not run.lease.exists() and backends.load(spec_of(run).backend).remote is None:
        return None, set()
    status = supervisor_status(run, timeout_s=ASK_TIMEOUT_S)
    if status is None:
        return None, set()
    connected = {name for name, host in status.hosts.items() if host.connected}
    return connected, {name for name in connected if status.hosts[name].active}


def _reported(last: Event | None) -> tuple[tuple[str, int], ...]:
    if last is None:
        return ()
    held = last.read(Step)
    return tuple(
        (tier, step) for tier, step in (("memory", held.snapshot_step), ("peer", held.peer_step)) if step is not None
    )
