"""What a rank gets when it starts, and its connection to its host's agent."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from muster.core.types import Layout

#: Errors of a rank that lost a peer: a consequence, never the cause.
LOST_PEER = re.compile(
    r"Connection (reset|closed|refused)|connection closed|Broken pipe|gloo.*(transport|peer|timed out)|NCCL.*abort"
    r"|Timed out waiting|recvValue|Socket closed|DistNetworkError|Socket operation|Transport endpoint",
    re.IGNORECASE,
)


@dataclass(frozen=True, kw_only=True)
class Restore:
    """The snapshots from which a rank restores its state, instead of the checkpoint folder."""

    step: int
    """Last applied step; training continues with the next one."""
    attempt: int = 0
    """The attempt that took the snapshots: versions of different attempts are never mixed."""
    tier: str = "memory"
    """memory or peer."""
    shards: Mapping[str, str] = field(default_factory=dict)
    """Rank of the earlier world (as text) -> snapshot file on this host; a fetched file appears when it is complete."""
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
    """Another host gets copies of snapshots: the next one once all ranks' peers hold the previous one."""
    batch_schedule: Sequence[Mapping[str, Any]] = ()
    """Changes of batch and rate during the run (``core.batch_schedule``)."""
    kept_rank: int | None = None
    """The rank of the previous attempt whose process continues as this one; None: a new process."""
    failures: int = 0
    """Failures of the run so far, and the seconds of observation (``observed_s``), for the interval of saves
    (``core.intervals``)."""
    observed_s: float = 0.0
    skip_steps: tuple[int, ...] = ()
    """Steps whose update is skipped: their batch is not finite each time (``recovery.on_nonfinite_step: skip``)."""

    def to_json(self) -> dict[str, Any]:
        # Not asdict, which copies deeply: a start message of 1,024 ranks holds as many of these.
        restore = self.restore
        message = {**vars(self), "layout": dict(vars(self.layout)), "restore": None}
        message["batch_schedule"] = list(self.batch_schedule)
        if restore is not None:
            message["restore"] = {**vars(restore), "shards": dict(restore.shards), "layout": dict(vars(restore.layout))}
        return message

    @classmethod
    def from_json(cls, message: Mapping[str, Any]) -> RankContext:
        """The inverse of ``to_json``. Raises TypeError on unknown or missing keys."""
        values = dict(message)
        values["layout"] = Layout(**values["layout"])
        values["skip_steps"] = tuple(int(step) for step in values.get("skip_steps", ()))
        if values.get("restore") is not None:
            restore = dict(values["restore"])
            restore["layout"] = Layout(**restore["layout"])
            values["restore"] = Restore(**restore)
        return cls(**values)


#: Exit code of a rank that ends for a resize; the run continues in another world.
RESIZE_EXIT_CODE = 76


@dataclass(frozen=True, kw_only=True)
class Command:
    """A command of the supervisor to the ranks, through the agent."""

    kind: str
    """``stop``: save and exit after the current step; ``save``: save only."""
    save: bool = True
    exit_code: int = 0
    """130: stopped by the user, 75: preempted. ``RESIZE_EXIT_CODE``: the run continues in another world."""
    deadline_s: float | None = None
    """Seconds from its receipt."""
    received_s: float = field(default_factory=time.monotonic, compare=False)
    """Time of receipt on this process's monotonic clock; not sent."""


class AgentClient(Protocol):
    """A rank's end of the connection to its agent. Calls return at once and never raise for a slow reader."""

    def emit(self, kind: str, *, step: int | None = None, phase: str | None = None, **detail: Any) -> None:
        """Send one event of ``core.events``."""
        ...

    def beat(self, step: int) -> None:
        """Progress: micro-batches and steps, for the watchdog."""
        ...

    def progress(self, *, for_s: float = 0.0) -> None:
        """Progress in something other than a step (an evaluation, a save): restarts the step watchdog.

        Cheap enough for every batch. ``for_s``: the following work cannot report; it counts as progress for this
        time, or until the next call.
        """
        ...

    def next_command(self) -> Command | None:
        """The oldest command not yet taken, or None."""
        ...

    def pause_requested(self) -> bool:
        """Whether this rank is to leave its world, and to continue in another one with its state."""
        ...

    def on_pause(self, act: Callable[[], None]) -> None:
        """Call ``act``, from another thread, as soon as a pause is requested: it frees a rank that waits for a peer."""
        ...

    def wait_for_assignment(self, step: int) -> RankContext | None:
        """Report that the rank paused after ``step``, and wait for its place in the next attempt.

        None: it gets none, so the error that broke its world is its own.
        """
        ...
