"""What a rank receives when it starts, and its connection to its host's agent."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from muster.core.types import Layout

#: Messages of a rank whose peer died: a consequence, never the cause.
LOST_PEER = re.compile(
    r"Connection (reset|closed|refused)|connection closed|Broken pipe|gloo.*(transport|peer|timed out)|NCCL.*abort"
    r"|Timed out waiting|recvValue|Socket closed|DistNetworkError|Socket operation|Transport endpoint",
    re.IGNORECASE,
)


@dataclass(frozen=True, kw_only=True)
class Restore:
    """Where a rank's state comes from, when not from the checkpoint folder."""

    step: int
    """Last applied step; training continues with the next one."""
    attempt: int = 0
    """The attempt that took the snapshots: versions of two attempts never mix."""
    tier: str = "memory"
    """memory or peer."""
    shards: Mapping[str, str] = field(default_factory=dict)
    """Rank of the earlier world (as text) -> snapshot file on this host; one that is being fetched appears
    under its name when it is whole."""
    layout: Layout = field(default_factory=Layout)
    """Layout of the world that took the snapshots."""


@dataclass(frozen=True, kw_only=True)
class RankContext:
    """One rank's place in the world."""

    run_id: str
    run_dir: str
    attempt: int
    host: str
    rank: int
    local_rank: int
    world_size: int
    local_world_size: int
    layout: Layout
    master_addr: str
    master_port: int
    snapshot_dir: str | None = None
    """Folder in memory (tmpfs) for this rank's snapshots; None: take none."""
    restore: Restore | None = None
    replicate_snapshots: bool = False
    """Another host gets copies of snapshots, the next one when all ranks' hosts hold the one before."""
    batch_schedule: Sequence[Mapping[str, Any]] = ()
    """Changes of batch size and learning rate (``core.batch_schedule.BatchSegment``)."""
    kept_rank: int | None = None
    """The rank of the previous attempt whose process continues as this one; None: a new process."""
    failures: int = 0
    """Failures of the run that the supervisor has seen, and the seconds in which it saw them: for the interval of
    saves (``core.intervals``)."""
    observed_s: float = 0.0
    skip_steps: tuple[int, ...] = ()
    """Steps whose update is not applied: their batch is not finite each time (``recovery.on_nonfinite_step: skip``)."""

    def to_json(self) -> dict[str, Any]:
        # Not asdict, which copies deeply: a start message of 1,024 ranks holds as many of these.
        restore = self.restore
        layout, schedule = dict(vars(self.layout)), list(self.batch_schedule)
        result = {**vars(self), "layout": layout, "restore": None, "batch_schedule": schedule}
        if restore is not None:
            result["restore"] = {**vars(restore), "shards": dict(restore.shards), "layout": dict(vars(restore.layout))}
        return result

    @classmethod
    def from_json(cls, result: Mapping[str, Any]) -> RankContext:
        """The inverse of ``to_json``. Raises TypeError on unknown or missing keys."""
        given = dict(result)
        given["layout"] = Layout(**given["layout"])
        given["skip_steps"] = tuple(int(step) for step in given.get("skip_steps", ()))
        if given.get("restore") is not None:
            restore = dict(given["restore"])
            restore["layout"] = Layout(**restore["layout"])
            given["restore"] = Restore(**restore)
        return cls(**given)


#: Exit code of a rank that leaves on request while the run continues (the number of ranks grows).
RESIZE_EXIT_CODE = 76


@dataclass(frozen=True, kw_only=True)
class Command:
    """A command of the supervisor to the ranks, through the agent."""

    kind: str
    """``stop``: save and leave after the current step."""
    save: bool = True
    exit_code: int = 0
    """Exit code of the run: 130 the user stopped it, 75 it was preempted. ``RESIZE_EXIT_CODE``: it continues with
    another number of ranks."""
    deadline_s: float | None = None
    """Seconds from when it was received."""
    received_s: float = field(default_factory=time.monotonic, compare=False)
    """When it was received, on this process's monotonic clock; not sent."""


class AgentClient(Protocol):
    """A rank's connection to its agent. Calls return at once and never raise for a slow reader."""

    def emit(self, kind: str, *, step: int | None = None, phase: str | None = None, **detail: Any) -> None:
        """Send one event of a kind in ``core.events``."""
        ...

    def beat(self, step: int) -> None:
        """Progress: micro-batches and steps, for the watchdog."""
        ...

    def progress(self, *, for_s: float = 0.0) -> None:
        """Progress outside a step (an evaluation, a save): the step watchdog's time starts again.

        Cheap enough for every batch. ``for_s``: the operation that follows cannot report progress; it counts as
        progress for this long, or until the next call.
        """
        ...

    def next_command(self) -> Command | None:
        """The oldest command not yet taken, or None."""
        ...

    def pause_requested(self) -> bool:
        """Whether this rank is to leave its attempt and to continue in the next one with its state."""
        ...

    def on_pause(self, act: Callable[[], None]) -> None:
        """Call ``act``, from another thread, as soon as a pause is requested: it frees a rank that waits for a peer."""
        ...

    def wait_for_assignment(self, step: int) -> RankContext | None:
        """Report that the rank is paused after ``step`` and wait for its place in the next attempt.

        None: it gets none, and the failure that ended its attempt is final.
        """
        ...
