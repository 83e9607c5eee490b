"""What the pool of a host's ranks asks of the fork server and of the snapshots, as callables."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass

from muster.core.snapshots import SnapshotCopy
from muster.protocol.ranks import RankContext
from muster.protocol.to_agent import StartAttempt


@dataclass(frozen=True, kw_only=True)
class Forks:
    """What the pool asks of the fork server."""

    spawn: Callable[[Iterable[int]], None]
    """A standby for each of these local ranks, unless it is on its way."""
    reaps: Callable[[int], bool]
    """Whether it will report the exit codes of this parent's children, and that a signal stops one."""
    opens_contexts: Callable[[], bool]
    """Whether standbys hold a CUDA context."""
    give_up_contexts: Callable[[], None]
    order_store: Callable[[], None]
    """A rendezvous store for the attempt after this one."""


@dataclass(frozen=True, kw_only=True)
class Snapshots:
    """What the pool asks of the host's snapshots."""

    begin: Callable[[StartAttempt], Sequence[RankContext]]
    """An attempt's ranks here, with the state that each starts from and where it keeps its own."""
    held: Callable[[], tuple[SnapshotCopy, ...]]
    drop: Callable[[Collection[SnapshotCopy]], None]
    """These are not intact."""
    on_ready: Callable[[], None]
    """A rank has one more."""
    on_step: Callable[[int], None]
    """This attempt takes steps."""
