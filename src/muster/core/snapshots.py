"""In-memory snapshots: how one copy is named everywhere, and the ring's sizes, which the plan counts too."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from muster.core.errors import CheckpointError
from muster.core.layout import LayoutKey
from muster.core.typed_json import Count, Record

Tier = Literal["memory", "peer"]

#: Slots of a rank's own ring where no copy is made: one being written, one complete.
OWN_SLOTS = 2
#: With copies: what is being copied, the newest, and one being written. While copies take longer than a step, a fourth
#: for the version that all peers hold (see ``train.state.snapshot``); it is reserved when that first happens.
COPIED_SLOTS = 3
MAX_SLOTS = 4
#: A peer's: the version that all peers hold, and the one that arrives.
PEER_SLOTS = 2
FETCHED_SLOTS = 1


@dataclass(frozen=True, kw_only=True, order=True)
class SnapshotCopy(Record):
    """One whole version of one rank's state in one host's memory, as the host reports it."""

    step: Count
    attempt: Count
    rank: Annotated[Count, "that took it; what a host holds for a twin in another replica bears the twin's number"]
    layout: Annotated[LayoutKey, "``Layout.key`` of the world that took it"]
    host: Annotated[str, "that holds it"]
    tier: Annotated[Tier, "memory: in the rank's own ring; peer: a copy held for another host"]


class SnapshotNotIntact(CheckpointError):
    """Snapshots in memory do not hold what was written; they are never restored, and not chosen again."""

    def __init__(self, message: str, *, copies: tuple[SnapshotCopy, ...]) -> None:
        """``copies``: those that failed."""
        super().__init__(message)
        self.copies = copies
