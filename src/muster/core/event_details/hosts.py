"""Details of hosts and their agents."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

from muster.core.event_detail import Detail, OpenDetail
from muster.core.types import Topology


@dataclass(frozen=True, kw_only=True)
class HostRequested(OpenDetail):
    kind: ClassVar = "host.requested"
    doc: ClassVar = "Asked for; the queue begins."
    count: Annotated[int, "hosts"]


@dataclass(frozen=True, kw_only=True)
class HostAllocated(Detail):
    kind: ClassVar = "host.allocated"
    doc: ClassVar = "Bought: from here a host costs money."
    gpus: Annotated[int, "on this host (CPU: ranks)"]
    role: Annotated[str, "active or spare"]
    usd_per_hour: Annotated[float | None, "price of the whole host; absent: unknown"] = None
    machine: Annotated[str | None, "type"] = None
    location: Annotated[str | None, "zone"] = None
    peak_flops: Annotated[float | None, "per rank"] = None


@dataclass(frozen=True, kw_only=True)
class HostPlaced(Detail):
    kind: ClassVar = "host.placed"
    doc: ClassVar = "Its place in the network, by its labels: at first, and after another machine took its name."
    place: Annotated[Topology, "its block and rack"]


@dataclass(frozen=True, kw_only=True)
class HostReleased(Detail):
    kind: ClassVar = "host.released"
    doc: ClassVar = "Given back: costs nothing from here."
    reason: Annotated[str | None, "why"] = None


@dataclass(frozen=True, kw_only=True)
class HostLost(Detail):
    kind: ClassVar = "host.lost"
    doc: ClassVar = "Gone or silent."
    evidence: Annotated[str, "what was seen"]
    silent_s: Annotated[float, "seconds since it was heard of"] = 0.0


@dataclass(frozen=True, kw_only=True)
class HostReset(Detail):
    kind: ClassVar = "host.reset"
    doc: ClassVar = "Its GPUs were reset between two attempts."
    gpus: Annotated[tuple[int, ...], "their numbers on the host"]
    ok: Annotated[bool, "whether it worked"]
    evidence: Annotated[str | None, "what the tool said"] = None


@dataclass(frozen=True, kw_only=True)
class HostSetAside(Detail):
    kind: ClassVar = "host.set_aside"
    doc: ClassVar = "It could not prepare; not used until it can."
    reason: Annotated[str, "why"]
    needed: Annotated[bool, "whether the run cannot go on without it"]


@dataclass(frozen=True, kw_only=True)
class HostHealth(Detail):
    kind: ClassVar = "host.health"
    doc: ClassVar = "A detector's report on a host."
    incident: Annotated[str, "kind: a row of muster.core.incidents"]
    evidence: Annotated[str, "one sentence with values"]
    resettable: Annotated[tuple[int, ...], "GPUs that a reset may heal"] = ()
    verdict: Annotated[str | None, "reset, drain (leave once there is a spare) or replace"] = None
    sound_step: Annotated[int | None, "of an error of memory: no snapshot of a later step is restored"] = None
    sound_attempt: Annotated[int | None, "that took those snapshots"] = None


@dataclass(frozen=True, kw_only=True)
class HostCheck(Detail):
    kind: ClassVar = "host.check"
    doc: ClassVar = "A host has looked at its hardware before ranks use it."
    part: Annotated[str, "passive, or full (GPUs loaded)"]
    verdict: Annotated[str, "healthy, app, note, incomplete, reset, drain or replace: the gravest finding's"]
    findings: Annotated[tuple[str, ...], "what is not simply healthy, the gravest first: at most 16"] = ()
    took_s: Annotated[float, "seconds"] = 0.0
    node: Annotated[str | None, "the machine's name"] = None
    command: Annotated[str | None, "what takes the machine out of its cluster, where it is faulty"] = None


@dataclass(frozen=True, kw_only=True)
class HostUsage(Detail):
    kind: ClassVar = "host.usage"
    doc: ClassVar = "What a host's steps up to this one used: every 10 s at most, of many hosts more rarely."
    steps: Annotated[int, "that this is of"]
    interval_ns: Annotated[int, "in which they were taken"]
    cpu_ns: Annotated[int, "processor time of the ranks here, all their threads"]
    busy: Annotated[float | None, "share of the machine's processors that were not idle"] = None
    memory_bytes: Annotated[int | None, "of the machine, in use"] = None
    memory_total_bytes: Annotated[int | None, "of the machine"] = None
    received_bytes: Annotated[int | None, "over network interfaces and RDMA ports; not loopback"] = None
    sent_bytes: Annotated[int | None, "in the same way"] = None
    gpu_busy: Annotated[
        tuple[float, ...], "of each GPU that the run may use here: share of the time in which it computed (nvidia-smi)"
    ] = ()
    gpu_memory_bytes: Annotated[tuple[int, ...], "of each of them, in use"] = ()


@dataclass(frozen=True, kw_only=True)
class HostQuarantined(Detail):
    kind: ClassVar = "host.quarantined"
    doc: ClassVar = "Not used again, or not for now."
    reason: Annotated[str, "why"]
    for_s: Annotated[float | None, "seconds of quarantine"] = None
    until_return: Annotated[bool, "until the host has left and rejoined"] = False
    quarantined_for_error: Annotated[str | None, "error (step and words) that is looked for on another host"] = None


@dataclass(frozen=True, kw_only=True)
class HostReadmitted(Detail):
    kind: ClassVar = "host.readmitted"
    doc: ClassVar = "No longer quarantined: it may be used again."
    reason: Annotated[str, "why"]
    cause: Annotated[
        Literal["expired", "recurred", "returned"] | None,
        "its time was over, the error came on another host too, or the host left and rejoined",
    ] = None


@dataclass(frozen=True, kw_only=True)
class ClockOffset(Detail):
    kind: ClassVar = "clock.offset"
    doc: ClassVar = "A host's monotonic clock against the supervisor's, by round trips."
    offset_ns: Annotated[int, "add to the host's mono_ns"]
    error_ns: Annotated[int, "half the best round trip"]


@dataclass(frozen=True, kw_only=True)
class AgentStarted(OpenDetail):
    kind: ClassVar = "agent.started"
    doc: ClassVar = "An agent is ready."
    pid: Annotated[int, "process id"]
    ranks: Annotated[int, "ranks it can run"]
    boot_id: Annotated[str | None, "kernel's"] = None
    adopted: Annotated[tuple[int, ...], "ranks found alive"] = ()


@dataclass(frozen=True, kw_only=True)
class AgentEnded(Detail):
    kind: ClassVar = "agent.ended"
    doc: ClassVar = "An agent leaves."
    reason: Annotated[str, "why"]


@dataclass(frozen=True, kw_only=True)
class TerminationNotice(Detail):
    kind: ClassVar = "termination.notice"
    doc: ClassVar = "Announced in advance: preemption, maintenance, a time limit, a user's stop."
    notice: Annotated[str, "preemption, maintenance, time_limit, stop"]
    source: Annotated[str, "signal, endpoint..."]
    grace_s: Annotated[float | None, "time given"] = None
    exit_code: Annotated[int | None, "of a stop: what the run will answer"] = None
    save: Annotated[bool | None, "of a stop: whether the ranks save first"] = None


DETAILS: tuple[type[Detail], ...] = (
    HostRequested, HostAllocated, HostPlaced, HostReleased, HostLost, HostReset, HostSetAside, HostCheck, HostHealth,
    HostUsage, HostQuarantined, HostReadmitted, ClockOffset,
)  # fmt: skip
AGENT_DETAILS: tuple[type[Detail], ...] = (AgentStarted, AgentEnded)
