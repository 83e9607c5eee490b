"""What lies in a host's memory folder, and when it has served: an old copy goes only once a new one stands."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterable
from pathlib import Path

from muster.checkpoint_format.snapshot_ring import Ring, file_name
from muster.core.errors import CheckpointError


def begin_course(memory: Path, *, layout: str, origin: str | None, step: int, attempt: int) -> None:
    """A world of ``layout`` begins after ``step`` of ``attempt``, which lies in rings of ``origin`` (None: nowhere).

    Newer versions in those were given up; what any third layout left is older, and its room is needed. (Versions of its
    own layout its ranks forget, when they open their rings.)
    """
    drop_other_layouts(memory, keep={layout, origin})
    for path in memory.glob("*.ring"):
        if f".{layout}." in path.name or path.name.startswith("fetched."):
            continue
        with contextlib.suppress(CheckpointError):
            ring = Ring.open(path, writable=True)
            ring.forget_after(step, attempt=attempt)
            ring.close()


def stands(memory: Path, *, layout: str, ranks: Iterable[int], attempt: int, replicate_snapshots: bool) -> bool:
    """Whether every one of this host's ranks has a version of ``attempt`` in memory and, where copies are made, its
    peer one too."""
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
    return True


def drop_other_layouts(memory: Path, *, keep: Collection[str | None]) -> None:
    """Snapshots of other layouts than these, own and peers', have served."""
    for path in memory.glob("*.ring"):
        if not path.name.startswith("fetched.") and path.name.split(".")[1] not in keep:
            path.unlink(missing_ok=True)


def drop_fetched(memory: Path) -> None:
    """What was fetched for the start of a world that steps has served."""
    for path in memory.glob("fetched.*"):
        path.unlink(missing_ok=True)
