"""Details of checkpoints and in-memory snapshots."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal, TypeAlias

from muster.core.event_detail import Detail
from muster.core.snapshots import SnapshotCopy

Tier: TypeAlias = Literal["memory", "peer", "disk", "bucket"]
#: What is still there once every host is gone.
DURABLE: tuple[Tier, ...] = ("disk", "bucket")


@dataclass(frozen=True, kw_only=True)
class CheckpointBegun(Detail):
    kind: ClassVar = "checkpoint.begun"
    doc: ClassVar = "Bytes start to move."
    tier: Annotated[Tier, "memory, peer, disk, bucket"]
    uri: Annotated[str, "where"]


@dataclass(frozen=True, kw_only=True)
class CheckpointCommitted(Detail):
    kind: ClassVar = "checkpoint.committed"
    doc: ClassVar = "The commit marker is written: this version can be restored."
    tier: Annotated[Tier, "memory, peer, disk, bucket"]
    uri: Annotated[str, "where"]
    bytes: Annotated[int, "all ranks"]
    duration_ns: Annotated[int | None, "begun to committed"] = None
    stall_ns: Annotated[int | None, "training held up"] = None


@dataclass(frozen=True, kw_only=True)
class CheckpointFailed(Detail):
    kind: ClassVar = "checkpoint.failed"
    doc: ClassVar = "Not written; training continues."
    tier: Annotated[Tier, "which"]
    uri: Annotated[str, "where"]
    reason: Annotated[str, "why"]


@dataclass(frozen=True, kw_only=True)
class CheckpointRejected(Detail):
    kind: ClassVar = "checkpoint.rejected"
    doc: ClassVar = "A checkpoint that exists but is not usable."
    uri: Annotated[str, "where"]
    reason: Annotated[str, "incomplete, truncated, foreign..."]


@dataclass(frozen=True, kw_only=True)
class FenceRebuilt(Detail):
    kind: ClassVar = "fence.rebuilt"
    doc: ClassVar = "The file that says which attempt may commit was damaged or gone: it was written again."
    reason: Annotated[str, "where, what was found, and what it was made from"]


@dataclass(frozen=True, kw_only=True)
class SnapshotRejected(Detail):
    kind: ClassVar = "snapshot.rejected"
    doc: ClassVar = "A copy in a host's memory is damaged: it is passed over and not chosen again."
    copy: Annotated[SnapshotCopy, "which: step, attempt, rank, layout, host, tier"]
    reason: Annotated[str, "what was found"]


@dataclass(frozen=True, kw_only=True)
class SnapshotInterval(Detail):
    kind: ClassVar = "snapshot.interval"
    doc: ClassVar = "How often ranks take snapshots in memory: when an attempt knows, and when that changes."
    every_steps: Annotated[int, "steps from one to the next"]
    reason: Annotated[str, "a sentence: the interval, what one costs, which rule"]


@dataclass(frozen=True, kw_only=True)
class CheckpointRestored(Detail):
    kind: ClassVar = "checkpoint.restored"
    doc: ClassVar = "Training state was read."
    tier: Annotated[Tier, "which"]
    uri: Annotated[str, "where"]
    bytes: Annotated[int | None, "read by this rank"] = None
    fetched_bytes: Annotated[int | None, "that other hosts sent for it, from their memory"] = None
    duration_ns: Annotated[int | None, "time it took"] = None


@dataclass(frozen=True, kw_only=True)
class CheckpointRemoved(Detail):
    kind: ClassVar = "checkpoint.removed"
    doc: ClassVar = "Beyond keep_last."
    uri: Annotated[str, "where"]


@dataclass(frozen=True, kw_only=True)
class MemoryLost(Detail):
    kind: ClassVar = "memory.lost"
    doc: ClassVar = (
        "A host's folder in memory was emptied from outside, with the snapshots in it: training goes on, the next ones "
        "lie there again."
    )
    reason: Annotated[str, "what was found and done"]


DETAILS: tuple[type[Detail], ...] = (
    CheckpointBegun, CheckpointCommitted, CheckpointFailed, CheckpointRejected, SnapshotRejected, SnapshotInterval,
    CheckpointRestored, CheckpointRemoved, FenceRebuilt, MemoryLost,
)  # fmt: skip
