"""Values that messages of several channels hold."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal, TypeAlias

from muster.core.snapshots import SnapshotCopy
from muster.core.typed_json import Count, Int64, JsonObject, Port, Record, Seconds, Step

#: Host name or IP address, and port.
Address: TypeAlias = tuple[str, Port]


@dataclass(frozen=True, kw_only=True)
class CommandRanks(Record):
    """A command of the supervisor to all ranks, through the agents."""

    kind: Annotated[Literal["stop", "save"], "stop: leave after the current step; save: save and continue"]
    save: Annotated[bool, "save before leaving"] = True
    exit_code: Annotated[
        Int64,
        "of the run: 130 the user stopped it, 75 it was preempted; 76: it continues with another number of ranks",
    ] = 0
    deadline_s: Annotated[Seconds | None, "seconds from when it is received"] = None


@dataclass(frozen=True, kw_only=True)
class TraceSteps(Record):
    """To a rank: write a trace of the next steps that begin, and report it (``trace.written``)."""

    request: Annotated[str, "for the report"]
    steps: Count = 3


@dataclass(frozen=True, kw_only=True)
class LastWords(Record):
    """Why a rank ends, as it says itself."""

    exception: Annotated[str, "the class of what was raised"] = ""
    message: str = ""
    hint: str | None = None
    traceback: str = ""
    exit_code: Annotated[Int64 | None, "that an error of Muster's own asks for"] = None
    not_finite: Annotated[bool, "a loss or a gradient was not finite"] = False
    left: Annotated[Int64 | None, "the exit code of a rank that completed, or ended on a command"] = None
    rejected: Annotated[tuple[SnapshotCopy, ...], "copies that it was to start from and that are not intact"] = ()


@dataclass(frozen=True, kw_only=True)
class RankEvent(Record):
    """An event of a rank (or of its host's agent): its line in the log without the host."""

    kind: str
    attempt: Count
    mono_ns: Int64
    wall_ns: Int64
    rank: Count | None = None
    step: Step | None = None
    phase: str | None = None
    detail: JsonObject


@dataclass(frozen=True, kw_only=True)
class HostLook(Record):
    """What a host's own look at its hardware saw (``muster.probe``)."""

    part: Literal["passive", "full"]
    output: Annotated[str, "the probe's, as it wrote it; cut where it is"]
    node: Annotated[str, "the machine's name, for the command that takes it out of service"] = ""
    own: Annotated[tuple[str, ...] | None, "PCI addresses of the GPUs that the run may use; None: all"] = None
    seconds: Seconds = 0.0


@dataclass(frozen=True, kw_only=True)
class StoreAddress(Record):
    """The rendezvous store of the next attempt."""

    store: Address
