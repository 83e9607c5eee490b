"""A verb of another terminal, or a detector, and the supervisor: one message after the hello, one answer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, TypeAlias, get_args

from muster.core.typed_json import Count, Int64, Record, Seconds, Step
from muster.protocol.channel import Channel
from muster.protocol.hello import Refused
from muster.protocol.values import HostLook


@dataclass(frozen=True, kw_only=True)
class StopRun(Record):
    """End the run."""

    source: Annotated[str, "who asks, for the log"] = "muster stop"
    save: Annotated[bool, "save first"] = True
    force: Annotated[bool, "wait for nothing"] = False
    again: Annotated[bool, "the run will be started again (a scheduler's time limit): exit code 75"] = False


@dataclass(frozen=True, kw_only=True)
class RestartRun(Record):
    """The run file was corrected: start again on the hosts that are held."""


@dataclass(frozen=True, kw_only=True)
class AskStatus(Record):
    """Where is the run?"""


@dataclass(frozen=True, kw_only=True)
class CheckHosts(Record):
    """What does each host's hardware look like now? Asked again with the same number until all have answered."""

    number: Annotated[Count, "chosen by the client, not 0"]


@dataclass(frozen=True, kw_only=True)
class TraceRun(Record):
    """Have ranks write traces of their next steps, while they train."""

    request: Annotated[str, "names what the ranks report (``trace.written``)"]
    steps: Annotated[Count, "how many, from the next one that begins"] = 3
    ranks: Annotated[tuple[Count, ...], "which; none: every one"] = ()


@dataclass(frozen=True, kw_only=True)
class AskStacks(Record):
    """What does every rank do at this moment?"""

    limit_s: Annotated[Seconds, "how long the hosts may take to look"] = 2.0


@dataclass(frozen=True, kw_only=True)
class HealthReport(Record):
    """What a health check or another detector found on a host."""

    host: str
    kind: Annotated[str, "an incident kind (docs/explanation/recovery.md)"] = "host_unhealthy"
    evidence: str = ""
    resettable: Annotated[tuple[Count, ...], "GPUs that a reset may repair"] = ()


@dataclass(frozen=True, kw_only=True)
class HostStatus(Record):
    """One host, as the supervisor knows it."""

    connected: bool
    ready: bool
    active: Annotated[bool, "part of the current attempt"]
    ranks: tuple[Count, ...]


@dataclass(frozen=True, kw_only=True)
class Verdict(Record):
    """How the run will end."""

    exit_code: Int64
    reason: str


@dataclass(frozen=True, kw_only=True)
class SupervisorStatus(Record):
    """The answer to every message of a client."""

    phase: str
    reason: Annotated[str, "why it is there, for people"]
    attempt: Count
    step: Annotated[Step, "the last applied one"]
    hosts: Mapping[str, HostStatus] = field(default_factory=dict)
    verdict: Annotated[Verdict | None, "None: not decided"] = None
    looks: Annotated[Mapping[str, HostLook], "to CheckHosts: host -> what it saw; others have not answered yet"] = (
        field(default_factory=dict)
    )
    refused: Annotated[str | None, "why what was asked is not done; None: it is"] = None
    stacks: Annotated[tuple[str, ...], "of ``AskStacks``: health.hang.stack_groups.StackGroup as JSON"] = ()
    missing: Annotated[tuple[str, ...], "of ``AskStacks``: what is not in it, one sentence each"] = ()


FromClient: TypeAlias = StopRun | RestartRun | AskStatus | CheckHosts | TraceRun | AskStacks | HealthReport
ToClient: TypeAlias = SupervisorStatus | Refused
FROM_CLIENT: Channel[FromClient] = Channel(
    name="client to supervisor", sender="client", receiver="supervisor", over="TCP", messages=get_args(FromClient)
)
TO_CLIENT: Channel[ToClient] = Channel(
    name="supervisor to client", sender="supervisor", receiver="client", over="TCP", messages=get_args(ToClient)
)
