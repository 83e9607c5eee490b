"""The checksum of a snapshot: a sum over a version's bytes, compared before it is restored or written to a disk.

Needs no torch, since the replicator compares too. numpy is loaded by the first sum, not by an import of this module.
"""

from __future__ import annotations

from muster.checkpoint_format.snapshot_ring import Ring, Version
from muster.core.errors import CheckpointError


def checksum_of(data: memoryview) -> int:
    """The sum of the bytes as signed 64-bit words, wrapped; made by numpy, which takes one core and lets others run."""
    import numpy as np

    whole_bytes = len(data) // 8 * 8
    return int(np.frombuffer(data[:whole_bytes], dtype=np.int64).sum()) if whole_bytes else 0


def verify_checksum(ring: Ring, version: Version) -> None:
    """Raise CheckpointError where a version's bytes do not have its checksum; one without a checksum passes."""
    expected = ring.checksum(version)
    if expected is not None and checksum_of(ring.slot(version.slot)) != expected:
        raise CheckpointError(
            f"{ring.path.name}: the snapshot of step {version.step} of attempt {version.attempt}"
            " does not match its checksum"
        )
