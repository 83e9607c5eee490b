"""What a rank receives when it starts, and its connection to its host's agent."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Literal, Protocol

from muster.core.batch_schedule import BatchSegment
from muster.core.layout import Layout
from muster.core.snapshots import SnapshotCopy, Tier
from muster.core.typed_json import Count, Json, Port, Record, Seconds, Step
from muster.protocol.values import Address, CommandRanks, TraceSteps

#: Messages of a rank whose peer died: a consequence, never the cause.
LOST_PEER = re.compile(
    r"Connection (reset|closed|refused)|connection closed|Broken pipe|gloo.*(transport|peer|timed out)|NCCL.*abort"
    r"|Timed out waiting|recvValue|Socket closed|DistNetworkError|Socket operation|Transport endpoint"
    r"|ncclRemoteError|remote process exited",
    re.IGNORECASE,
)


@dataclass(frozen=True, kw_only=True)
class ShardSource(Record):
    """One rank's state, on this host or in another one's memory."""

    path: Annotated[str, "its file; one that is being fetched appears under this name when it is whole"]
    copy: Annotated[SnapshotCopy, "what the file must hold, and whose copy it is"]
    address: Annotated[
        Address | None, "the replicator of the host whose ring ``path`` names, to read slices of it; None: it is here"
    ] = None


@dataclass(frozen=True, kw_only=True)
class Restore(Record):
    """Where a rank's state comes from, when not from the checkpoint folder."""

    step: Annotated[Step, "last applied step; training continues with the next one"]
    attempt: Annotated[Count, "the attempt that took the snapshots: versions of two attempts never mix"] = 0
    tier: Tier = "memory"
    sources: Annotated[Mapping[Count, ShardSource], "rank of the earlier world -> its state"] = field(
        default_factory=dict
    )
    layout: Annotated[Layout, "layout of the world that took the snapshots"] = field(default_factory=Layout)
    share_verification: Annotated[
        bool, "all ranks of the host read these: of another layout's that are here, each verifies its share"
    ] = False


@dataclass(frozen=True, kw_only=True)
class RankContext(Record):
    """One rank's place in the world."""

    run_id: str
    run_dir: str
    attempt: Count
    host: str
    rank: Count
    local_rank: Count
    world_size: Count
    local_world_size: Count
    layout: Layout
    master_addr: str
    master_port: Port
    host_memory: Annotated[str | None, "the host's folder in memory; None: no agent runs"] = None
    snapshot_dir: Annotated[str | None, "folder in memory (tmpfs) for this rank's snapshots; None: take none"] = None
    restore: Restore | None = None
    replicate_snapshots: Annotated[
        bool, "another host gets copies of snapshots, the next one when all ranks' hosts hold the one before"
    ] = False
    batch_schedule: Annotated[tuple[BatchSegment, ...], "changes of batch size and learning rate"] = ()
    kept_rank: Annotated[
        Count | None, "the rank of the previous attempt whose process continues as this one; None: a new process"
    ] = None
    failures: Annotated[Count, "that the supervisor has seen: for the interval of saves (``core.intervals``)"] = 0
    observed_s: Annotated[Seconds, "the time in which it saw them"] = 0.0
    skip_steps: Annotated[
        tuple[Step, ...],
        "steps whose update is not applied: their batch is not finite each time (``recovery.on_nonfinite_step: skip``)",
    ] = ()


#: Exit code of a rank that leaves on request while the run continues (the number of ranks grows).
RESIZE_EXIT_CODE = 76
#: Exit codes of ranks that were asked to exit: stopped by the user, preempted, given another layout.
REQUESTED_EXIT_CODES = (130, 75, RESIZE_EXIT_CODE)
#: Exit codes of a rank that completed, or was asked to exit. It reports them itself: the kernel's answer is lost when
#: its fork server has died.
EXPECTED_EXIT_CODES = (0, *REQUESTED_EXIT_CODES)


#: How a drill asks a rank to break: a file in the run's folder, ``{"fault": "exception", "rank": 1, "always": false}``.
FAULT_FILE = "inject_fault.json"


def fault_done_file(fault: str) -> str:
    """The file that holds the step at which the rank injected ``fault``."""
    return f"inject_fault.{fault}.done"


@dataclass(frozen=True, kw_only=True)
class Command:
    """A command of the supervisor to the ranks, through the agent."""

    kind: Literal["stop", "save"]
    """stop: save and leave after the current step."""
    save: bool = True
    exit_code: int = 0
    """Exit code of the run: 130 the user stopped it, 75 it was preempted. ``RESIZE_EXIT_CODE``: it continues with
    another number of ranks."""
    deadline_s: float | None = None
    """Seconds from when it was received."""
    received_s: float = field(default_factory=time.monotonic, compare=False)
    """When it was received, on this process's monotonic clock."""

    @classmethod
    def received(cls, sent: CommandRanks) -> Command:
        """As it has just arrived."""
        return cls(kind=sent.kind, save=sent.save, exit_code=sent.exit_code, deadline_s=sent.deadline_s)


class AgentClient(Protocol):
    """A rank's connection to its agent. Calls return at once and never raise for a slow reader."""

    def emit(self, kind: str, *, step: int | None = None, phase: str | None = None, **detail: Json) -> None:
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

    def next_trace(self) -> TraceSteps | None:
        """The oldest request for a trace not yet taken, or None."""
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
