"""The first message of a connection, which says who it is and what it speaks."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Annotated, TypeAlias, TypeVar

from annotated_types import Interval

from muster.core.heartbeat_timing import MAX_INTERVAL_S
from muster.core.snapshots import SnapshotCopy
from muster.core.typed_json import Count, Name, Record, Step, Unreadable
from muster.core.types import Topology
from muster.protocol.channel import Channel
from muster.protocol.codec import reader_of
from muster.protocol.values import Address
from muster.protocol.version import MINE, Version, incompatible, stated

Message = TypeVar("Message")
BeatInterval: TypeAlias = Annotated[float, Interval(ge=0.0, le=MAX_INTERVAL_S)]


@dataclass(frozen=True, kw_only=True)
class AgentHello(Record):
    """A host's agent. The supervisor takes the host as it says it is."""

    version: Version
    host: Name
    pid: Count
    attempt: Annotated[Count, "the attempt whose ranks it has, or had last; 0: none"] = 0
    alive: Annotated[Mapping[Count, Count], "rank -> pid of those that live"] = field(default_factory=dict)
    exited: Annotated[tuple[Count, ...], "ranks of the attempt that have exited; their reports follow"] = ()
    ready: Annotated[bool, "it has what a start needs"] = False
    store: Annotated[Address | None, "the rendezvous store of the next attempt"] = None
    memory: Annotated[Address | None, "its replicator"] = None
    snapshots: Annotated[tuple[SnapshotCopy, ...], "what it holds"] = ()
    step: Annotated[Step, "the highest step that a rank of it began"] = 0
    place: Annotated[Topology, "its block and rack"] = field(default_factory=Topology)


@dataclass(frozen=True, kw_only=True)
class BeatHello(Record):
    """A host's watchdog: heartbeats follow."""

    version: Version
    host: Name
    pid: Count
    every_s: Annotated[BeatInterval, "between two heartbeats"]


@dataclass(frozen=True, kw_only=True)
class ClientHello(Record):
    """A verb of another terminal, or a detector: one message follows, and is answered."""

    version: Version


@dataclass(frozen=True, kw_only=True)
class MeetingHello(Record):
    """A host whose peers know it by a name that need not lead to it: to the job's first host, once at its start."""

    version: Version
    index: Annotated[Count, "among the job's hosts"]
    boot: Annotated[Name, "of this start of the machine: another one has nothing of the last one's memory and disk"]
    address: Annotated[Address, "of its own interface, where it answers now"]


@dataclass(frozen=True, kw_only=True)
class Met(Record):
    """The answer."""

    reached: Annotated[bool, "the host answered at the address that it gave"]
    reason: Annotated[str, "why not; empty where it did"] = ""
    returned: Annotated[bool, "it was here before, in an earlier start"] = False


@dataclass(frozen=True, kw_only=True)
class Refused(Record):
    """The answer to a hello of another version; the connection is then closed."""

    version: Version
    reason: Annotated[str, "one line that names both versions"]


def greeting_reader(channel: Channel[Message], *, me: str) -> Callable[[bytes], Message | Refused]:
    """Reads the first frame of a connection. A hello of another version gets a refusal; its other fields are not read.
    ``me``: who answers. Raises Unreadable where it is no hello at all."""
    read = reader_of(channel)

    def greet(frame: bytes) -> Message | Refused:
        try:
            _, fields = json.loads(frame)
        except (ValueError, TypeError, RecursionError):
            raise Unreadable("not a message") from None
        host = fields.get("host") if isinstance(fields, dict) else None
        reason = incompatible(MINE, stated(fields), me=me, them=host[:100] if isinstance(host, str) else "a client")
        if reason is None:
            return read(frame)
        # JSON may hold half a surrogate pair, which can be neither logged nor sent.
        return Refused(version=MINE, reason=reason.encode(errors="replace").decode())

    return greet


MEETING: Channel[MeetingHello] = Channel(
    name="host to the first host",
    sender="keeper",
    receiver="keeper of the first host",
    over="TCP",
    messages=(MeetingHello,),
)
MET: Channel[Met | Refused] = Channel(
    name="first host to host",
    sender="keeper of the first host",
    receiver="keeper",
    over="TCP",
    messages=(Met, Refused),
)
