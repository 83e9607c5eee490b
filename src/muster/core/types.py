"""Values that packages exchange: frozen, keyword-only, units in the names."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Annotated, Literal

from muster.core.incidents import IncidentTraits, traits_of
from muster.core.layout import Layout as Layout
from muster.core.typed_json import Record


@dataclass(frozen=True, kw_only=True)
class Offer:
    """Machines that a back end can provide, and what they cost."""

    backend: str
    machine: str
    location: str
    accelerator: str
    gpus_per_node: int
    gpu_memory_bytes: int
    usd_per_node_hour: float | None
    """None: unknown, never guessed. 0.0: really free (the user's own machine)."""
    peak_flops_per_gpu: float | None
    max_nodes: int
    mode: str
    """Provisioning mode: owned, on_demand, spot, flex_start, calendar, reservation."""


@dataclass(frozen=True, kw_only=True)
class Topology(Record):
    """A host's place, as far as its labels say: what one fault may take together with it."""

    block: Annotated[str, "racks with a network of their own; empty: unknown"] = ""
    rack: Annotated[str, "hosts that share power and a switch; its name counts within the block; empty: unknown"] = ""


@dataclass(frozen=True, kw_only=True)
class TaskSpec:
    """One kind of process in a job: how many copies, what they run."""

    name: str
    argv: tuple[str, ...]
    count: int = 1
    env: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class JobRequest:
    """Exactly what is submitted: printing it shows everything that submitting it would do."""

    run_id: str
    backend: str
    run_dir: str
    tasks: tuple[TaskSpec, ...]
    labels: Mapping[str, str] = field(default_factory=dict)
    files: Mapping[str, str] = field(default_factory=dict)
    """Relative name -> text: the rendered script or manifests, where a back end has them."""


@dataclass(frozen=True, kw_only=True)
class JobHandle:
    """Enough to find the submitted job again from another machine."""

    run_id: str
    backend: str
    job_id: str
    run_dir: str
    warnings: tuple[str, ...] = field(default=(), compare=False)
    """Of one that has just been submitted: what the place may do to it, a sentence each."""


class JobState(StrEnum):
    """State of a job, common to all back ends."""

    WAITING = "waiting"
    RUNNING = "running"
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    STOPPED = "stopped"
    PREEMPTED = "preempted"
    ABSENT = "absent"

    @property
    def ended(self) -> bool:
        return self not in (JobState.WAITING, JobState.RUNNING)


@dataclass(frozen=True, kw_only=True)
class JobStatus:
    """One look at a job."""

    state: JobState
    reason: str
    """One sentence: the reason for the state."""
    exit_code: int | None = None
    tasks: Mapping[str, str] = field(default_factory=dict)
    """Task name -> its state (``running (pid 123)``)."""


@dataclass(frozen=True, kw_only=True)
class LogChunk:
    """Some output of one task."""

    task: str
    text: str
    next_offset: int


@dataclass(frozen=True, kw_only=True)
class Checksum(Record):
    """The checksum of some bytes (``checkpoint_format.checksum`` computes it), with its algorithm."""

    algorithm: Annotated[Literal["xxh3-64"], "how it was computed"] = "xxh3-64"
    value: Annotated[str, "16 hexadecimal digits"]


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """One complete version of the training state."""

    step: int
    tier: str
    """memory, peer, disk or bucket."""
    uri: str
    bytes: int
    layout: Layout
    committed: bool


class Action(StrEnum):
    """What can be done about it."""

    RESTART = "restart"
    RESET = "reset"
    SWAP = "swap"
    SHRINK = "shrink"
    GROW = "grow"
    WAIT = "wait"
    STOP = "stop"
    IGNORE = "ignore"


@dataclass(frozen=True, kw_only=True)
class Incident:
    """What went wrong: enough for a policy to decide, and for a person to understand."""

    incident_id: str
    kind: str
    """A row of ``muster.core.incidents``."""
    attempt: int
    step: int | None = None
    host: str | None = None
    rank: int | None = None
    evidence: str = ""
    """One sentence, with values: ``rank 3 on host-1 was killed by signal 9 during step 412``."""
    detected_ns: int = 0
    detail: Mapping[str, object] = field(default_factory=dict)

    @property
    def traits(self) -> IncidentTraits:
        """How its kind is treated. Raises UsageError on a kind that is not in the table."""
        return traits_of(self.kind)


@dataclass(frozen=True, kw_only=True)
class Decision:
    """What to do about an incident, and why."""

    incident_id: str
    action: Action
    reason: str
    host: str | None = None
    replacement: str | None = None
    wait_s: float = 0.0
    exit_code: int = 1
    """Used by STOP alone."""
    detail: Mapping[str, object] = field(default_factory=dict)
