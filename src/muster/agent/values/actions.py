"""What ``decide`` has the agent do, as values that its edge carries out in order."""

from __future__ import annotations

import signal
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from muster.agent.values.events import PeerId
from muster.agent.values.rank import Gathering
from muster.config.spec import RunSpec
from muster.core.event_details.run import Outcome
from muster.core.snapshots import SnapshotCopy
from muster.core.typed_json import Record
from muster.health.verdicts import Finding
from muster.protocol.hello import AgentHello
from muster.protocol.to_agent import StartAttempt
from muster.protocol.to_supervisor import RankExit, RanksEnded
from muster.protocol.values import Address, RankEvent

# ---------------------------------------------------------------- connections


@dataclass(frozen=True)
class SendTo:
    """A closed peer swallows it."""

    peer: PeerId
    message: Record


@dataclass(frozen=True)
class ReportSnapshots:
    """To the supervisor, where one is connected, with the snapshots that are held as it is sent."""

    message: AgentHello | RanksEnded


@dataclass(frozen=True)
class Connect:
    """To a supervisor, in a thread."""

    address: Address


@dataclass(frozen=True)
class Disconnect:
    """From the supervisor; answered by ``PeerLost``."""


# ---------------------------------------------------------------- processes


@dataclass(frozen=True)
class WatchProcess:
    """``log``: of a rank; None: a child of the fork server that has not registered."""

    pid: int
    log: str | None


@dataclass(frozen=True)
class Kill:
    """SIGKILL, answered by ``Killed``. To a process that is watched it goes by its descriptor: pids are reused."""

    pid: int


@dataclass(frozen=True)
class Look:
    """Whether the kernel holds a process stopped."""

    pid: int


@dataclass(frozen=True)
class Program:
    """``argv``: a module of Muster's with its arguments, or (``is_tool``) a program of the system's."""

    name: str
    argv: tuple[str, ...]
    is_tool: bool = False
    reads: Literal["lines", "all", "nothing"] = "nothing"
    writes: bool = False
    env: Literal["own", "run", "ranks"] = "own"
    """own: as this process; run: with the run file's variables and its secrets; ranks: and what ranks need."""
    spec: RunSpec | None = None
    """Of ``env``."""
    ends_with_output: bool = False
    """The end of its output counts as its own: a driver's call may hold it for longer."""
    ends_with_session: bool = False
    """What it started in its session is killed with it."""
    with_stderr: bool = False
    most_bytes: int = 1 << 20


@dataclass(frozen=True)
class StartProgram:
    """In place of the one with the same name, of which nothing more is heard."""

    program: Program


@dataclass(frozen=True)
class StopProgram:
    """``leave``: hear nothing more of it, but get what it wrote (``ProgramEnded`` without a code) at once."""

    program: str
    number: int = signal.SIGKILL
    leave: bool = False


@dataclass(frozen=True)
class WriteProgram:
    """``droppable``: not while what was written before still waits. ``unless``: this file in memory is there."""

    program: str
    message: Record
    droppable: bool = False
    unless: str = ""


# ---------------------------------------------------------------- this host's files


@dataclass(frozen=True)
class OpenLog:
    attempt: int


@dataclass(frozen=True)
class Log:
    kind: str
    detail: Mapping[str, Any]
    rank: int | None = None


@dataclass(frozen=True)
class LogRankEvent:
    """Log it as a rank sent it, then report it; not what a dead agent had logged. ``peer`` is closed where it is no
    event."""

    event: RankEvent
    peer: PeerId | None = None


@dataclass(frozen=True)
class PrepareState:
    """Open the attempt's log and find what its ranks start from."""

    order: StartAttempt
    spec: RunSpec


@dataclass(frozen=True)
class DropCopies:
    copies: Collection[SnapshotCopy]


@dataclass(frozen=True)
class StateStepped:
    attempt: int


@dataclass(frozen=True)
class ListSnapshots:
    """``refusal``: why the supervisor cannot be spoken to, to be judged with what is held; empty: to save them."""

    refusal: str = ""


@dataclass(frozen=True)
class ReadLease:
    pass


@dataclass(frozen=True)
class CheckMemory:
    pass


@dataclass(frozen=True)
class CheckSetup:
    spec: RunSpec


@dataclass(frozen=True)
class FindForkServer:
    pass


@dataclass(frozen=True)
class RecordForkServer:
    pid: int


@dataclass(frozen=True)
class WriteReplicatorRecord:
    record: Record


@dataclass(frozen=True)
class FetchRunFile:
    """In a thread, where the run's home is no folder."""


# ---------------------------------------------------------------- hardware and evidence


@dataclass(frozen=True)
class ListHardware:
    pass


@dataclass(frozen=True)
class OpenKernelLog:
    pass


@dataclass(frozen=True)
class ReadCounters:
    step: int
    attempt: int
    pids: tuple[int, ...]


@dataclass(frozen=True)
class ReadOomKills:
    exit: RankExit


@dataclass(frozen=True)
class AskRas:
    """NCCL's RAS, in a thread, within ``limit_s``."""

    limit_s: float


@dataclass(frozen=True)
class ReportEvidence:
    """With what the kernel says of each process."""

    gathered: Gathering
    findings: Mapping[int, tuple[Finding, ...]]
    """Of a rank's host and GPU since its last step, by rank; empty for an exit."""


# ---------------------------------------------------------------- the end


@dataclass(frozen=True)
class FinishTrackers:
    """Wait until they have everything, in a bounded time."""

    outcome: Outcome


ConnectionAction: TypeAlias = SendTo | ReportSnapshots | Connect | Disconnect
ProcessAction: TypeAlias = (
    WatchProcess | Kill | Look | FindForkServer | RecordForkServer
)  # fmt: skip
ProgramAction: TypeAlias = StartProgram | StopProgram | WriteProgram | FinishTrackers
FileAction: TypeAlias = (
    OpenLog | Log | LogRankEvent | PrepareState | DropCopies | StateStepped | ListSnapshots | ReadLease | CheckMemory
    | CheckSetup | WriteReplicatorRecord | FetchRunFile
)  # fmt: skip
HardwareAction: TypeAlias = (
    ListHardware | OpenKernelLog | ReadCounters | ReadOomKills | AskRas | ReportEvidence
)  # fmt: skip
Action: TypeAlias = ConnectionAction | ProcessAction | ProgramAction | FileAction | HardwareAction
