"""Fork server and agent."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, TypeAlias, get_args

from muster.core.typed_json import Count, Int64, Record
from muster.protocol.channel import Channel
from muster.protocol.values import Address, StoreAddress


@dataclass(frozen=True, kw_only=True)
class ForkServerHello(Record):
    """A fork server, perhaps of an agent that has died."""

    pid: Count
    store: Annotated[Address, "the rendezvous store of the next attempt"]
    children: Annotated[tuple[Count, ...], "pids of those that live"] = ()
    unforkable: Annotated[str, "why its children are new processes; empty: they are forks"] = ""


@dataclass(frozen=True, kw_only=True)
class ChildExited(Record):
    """A standby or a rank has ended."""

    pid: Count
    code: Annotated[Int64, "exit code; -N: ended by signal N"]


@dataclass(frozen=True, kw_only=True)
class ChildStopped(Record):
    """A signal has stopped a standby or a rank; it may go on by now."""

    pid: Count


@dataclass(frozen=True, kw_only=True)
class SpawnStandbys(Record):
    """Fork a standby for each of these local ranks."""

    local_ranks: tuple[Count, ...]
    contexts: Annotated[bool, "each opens a CUDA context on its GPU"]


@dataclass(frozen=True, kw_only=True)
class NewStore(Record):
    """Serve a fresh rendezvous store, for the next attempt."""


FromForkServer: TypeAlias = ChildExited | ChildStopped | StoreAddress
ToForkServer: TypeAlias = SpawnStandbys | NewStore
FROM_FORK_SERVER: Channel[FromForkServer] = Channel(
    name="fork server to agent",
    sender="fork server",
    receiver="agent",
    over="Unix socket",
    messages=get_args(FromForkServer),
)
TO_FORK_SERVER: Channel[ToForkServer] = Channel(
    name="agent to fork server",
    sender="agent",
    receiver="fork server",
    over="Unix socket",
    messages=get_args(ToForkServer),
)
