"""Which snapshots in a host's memory folder are no longer needed: an old one is dropped only once a new one exists."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterable
from pathlib import Path

from muster.checkpoint_format.snapshot_ring import Ring, file_name
from muster.core.errors import CheckpointError


def begin_layout(memory: Path, *, layout: str, origin: str | None, step: int, attempt: int) -> None:
    """Ranks of ``layout`` start after ``step`` of ``attempt``, which is in rings of layout ``origin`` (None: in none).

    Newer versions in those rings were abandoned; any third layout's are older, and their memory is needed. (Ranks drop
    abandoned versions of their own layout when they open their rings.)
    """
    drop_other_layouts(memory, keep={layout, origin})
    for path in memory.glob("*.ring"):
        if f".{layout}." in path.name or path.name.startswith("fetched."):
            continue
        with contextlib.suppress(CheckpointError):
            ring = Ring.open(path, writable=True)
            ring.forget_after(step, attempt=attempt)
            ring.close()


def has_snapshots(
    memory: Path,
    *,
    layout: str,
    ranks: Iterable[int],
    attempt: int,
    replicate_snapshots: bool,
    copies_of: Iterable[int] = (),
) -> bool:
    """Whether each of this host's ranks has a version of ``attempt`` in memory and, where copies are made, its peer
    one too, and whether one of each of the ranks ``copies_of`` is here.

    Ranks copy no version of ``attempt`` before every rank's peer holds the one that it started from.
    """
    for rank in ranks:
        try:
            ring = Ring.open(memory / file_name("own", layout, rank))
        except CheckpointError:
            return False
        held = any(version.attempt == attempt for version in ring.versions())
        copied = not replicate_snapshots or ring.copied()[1] == attempt
        ring.close()
        if not (held and copied):
            return False
    for rank in copies_of:
        try:
            ring = Ring.open(memory / file_name("peer", layout, rank))
        except CheckpointError:
            return False
        held = any(version.attempt == attempt for version in ring.versions())
        ring.close()
        if not held:
            return False
    return True


def drop_other_layouts(memory: Path, *, keep: Collection[str | None]) -> None:
    """Delete snapshots of other layouts than these, own and peers'."""
    for path in memory.glob("*.ring"):
        if not path.name.startswith("fetched.") and path.name.split(".")[1] not in keep:
            path.unlink(missing_ok=True)


def drop_other_copies(memory: Path, *, layout: str, ranks: Iterable[int]) -> bool:
    """Delete copies of other ranks' snapshots than these of ``layout``: former partners'. Whether there were any."""
    keep = {file_name("peer", layout, rank) for rank in ranks}
    found = [path for path in memory.glob("peer.*.ring") if path.name not in keep]
    for path in found:
        path.unlink(missing_ok=True)
    return bool(found)


def drop_fetched(memory: Path) -> None:
    """Delete what was fetched for the start of an attempt."""
    for path in memory.glob("fetched.*"):
        path.unlink(missing_ok=True)
