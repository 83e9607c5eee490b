"""Rank and agent. A rank is a standby until it is assigned."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, TypeAlias, get_args

from muster.core.typed_json import Count, Record, Step
from muster.protocol.channel import Channel
from muster.protocol.fork_server import ForkServerHello
from muster.protocol.ranks import RankContext
from muster.protocol.values import CommandRanks, LastWords, RankEvent, TraceSteps


@dataclass(frozen=True, kw_only=True)
class StandbyHello(Record):
    """A process that waits for a rank."""

    pid: Count
    local_rank: Annotated[Count, "what it was forked for"]
    bound: Annotated[bool, "it holds a CUDA context on that rank's GPU"]


@dataclass(frozen=True, kw_only=True)
class RankHello(Record):
    """A rank whose agent has died, to that agent's successor."""

    pid: Count
    attempt: Count
    rank: Count
    step: Step


@dataclass(frozen=True, kw_only=True)
class StandbyWarm(Record):
    """The standby has run the work of a first step in advance."""


@dataclass(frozen=True, kw_only=True)
class StandbyUnfit(Record):
    """The standby could not open a context on its GPU, or that one is dead."""


@dataclass(frozen=True, kw_only=True)
class RankBeat(Record):
    """Where a rank is."""

    step: Annotated[Step, "the one that it works on"]
    micro: Annotated[Count, "micro-batches so far"]


@dataclass(frozen=True, kw_only=True)
class RankProgress(Record):
    """Progress outside of a step."""

    attempt: Count
    rank: Count


@dataclass(frozen=True, kw_only=True)
class Paused(Record):
    """The rank waits for its place in the next attempt."""

    attempt: Annotated[Count, "the one that it has left"]
    step: Annotated[Step, "the last applied one"]


@dataclass(frozen=True, kw_only=True)
class RankCaptured(Record):
    """The answer to ``CaptureRank``, from a thread of its own."""

    stacks: Annotated[str, "of all threads, in the form of Python's faulthandler, the main thread last"]
    recorders: Annotated[
        tuple[str, ...], "PyTorch's flight recorders, JSON; of a build with NCCL first NCCL's, then gloo's"
    ] = ()
    groups: Annotated[
        Mapping[str, tuple[Count, ...]], "the process groups of this attempt by their names in the recorders: ranks"
    ] = field(default_factory=dict)
    problems: Annotated[tuple[str, ...], "why a recorder is not there, a sentence each"] = ()


@dataclass(frozen=True, kw_only=True)
class WarmUp(Record):
    """To a standby: warm up now; to one that has, with a context on a GPU: see whether that still works."""


@dataclass(frozen=True, kw_only=True)
class RunRank(Record):
    """To a standby: become this rank."""

    context: RankContext
    log: Annotated[str, "the file of its output"]


@dataclass(frozen=True, kw_only=True)
class Pause(Record):
    """Leave the attempt and keep the state."""


@dataclass(frozen=True, kw_only=True)
class TakePlace(Record):
    """To a paused rank: continue as this one."""

    context: RankContext


@dataclass(frozen=True, kw_only=True)
class CaptureRank(Record):
    """Say what every thread does, and which operations among ranks were called."""

    recorders: Annotated[bool, "with the flight recorders, which are large"] = True


FromRank: TypeAlias = (
    StandbyWarm | StandbyUnfit | RankBeat | RankProgress | RankEvent | LastWords | Paused | RankCaptured
)
ToRank: TypeAlias = WarmUp | RunRank | CommandRanks | Pause | TakePlace | CaptureRank | TraceSteps
#: Who connects to the agent's socket says so first.
HostGreeting: TypeAlias = ForkServerHello | StandbyHello | RankHello
FROM_RANK: Channel[FromRank] = Channel(
    name="rank to agent", sender="rank", receiver="agent", over="Unix socket", messages=get_args(FromRank)
)
TO_RANK: Channel[ToRank] = Channel(
    name="agent to rank", sender="agent", receiver="rank", over="Unix socket", messages=get_args(ToRank)
)
HOST_GREETING: Channel[HostGreeting] = Channel(
    name="first message to the agent",
    sender="fork server or rank",
    receiver="agent",
    over="Unix socket",
    messages=get_args(HostGreeting),
)
