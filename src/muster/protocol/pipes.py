"""What programs print for the process that started them, one message on one line; and what is said over ssh."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Literal, TypeAlias, get_args

from muster.core.event_details.run import Outcome
from muster.core.typed_json import Count, Int64, JsonObject, Name, Port, Record, Seconds
from muster.protocol.channel import Channel
from muster.protocol.client import SupervisorStatus

StoreVerb: TypeAlias = Literal["get", "put", "list", "delete", "size", "folders", "remove_tree", "read", "write"]
STORE_BYTES = 4 * 1024 * 1024
"""Of a file's bytes in one message: in base64 they are well below a frame's limit."""


@dataclass(frozen=True, kw_only=True)
class PreemptionNotice(Record):
    """The cloud takes the host away, or maintains it."""

    notice: Annotated[str, "the metadata server's key"]
    value: str


@dataclass(frozen=True, kw_only=True)
class NodeCondition(Record):
    """What a node's condition for Xids says: when it is read first, and whenever it has changed."""

    status: Annotated[str, "empty: the node has no such condition"] = ""
    reason: Annotated[str, "holds the numbers"] = ""
    since: str = ""
    problem: Annotated[str, "why it could not be read; it is tried again"] = ""


@dataclass(frozen=True, kw_only=True)
class TrackerNote(Record):
    """A tracker does not accept a run's figures, or does again."""

    text: Annotated[str, "for the run's log"]


@dataclass(frozen=True, kw_only=True)
class RunOver(Record):
    """The run has ended: deliver the rest."""

    outcome: Outcome


@dataclass(frozen=True, kw_only=True)
class Preparing(Record):
    """What data preparation does: it moves. One of an activity each ten seconds at most."""

    activity: str
    done: Count = 0
    total: Annotated[Count, "0: unknown"] = 0


@dataclass(frozen=True, kw_only=True)
class DataPrepared(Record):
    """A host's data is ready."""

    fingerprint: str
    tokens: Count
    sequences: Count
    cached: bool
    more: Annotated[JsonObject, "counts of the preparation"] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class DataFailed(Record):
    """The data cannot be prepared."""

    error: str
    hint: str | None = None
    exit_code: Int64 = 1


@dataclass(frozen=True, kw_only=True)
class AskInPod(Record):
    """Ask the supervisor in this pod."""

    message: Annotated[str, "a client's message, as a frame"]
    timeout_s: Seconds = 5.0
    resolved: Annotated[str | None, "replaces the run file before it is asked"] = None
    code: Annotated[str | None, "the user's code, packed, in base64"] = None


Folder: TypeAlias = Literal["logs", "events"]


@dataclass(frozen=True, kw_only=True)
class ReadFolder(Record):
    """What a folder's files hold beyond these offsets."""

    folder: Folder
    after: Annotated[Mapping[str, Count], "file name -> bytes"] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class FilePart(Record):
    """A part of a file."""

    name: str
    offset: Count
    data: Annotated[str, "in base64"]


@dataclass(frozen=True, kw_only=True)
class FileParts(Record):
    """The answer to ``ReadFolder``; it may be cut: ask again."""

    files: tuple[FilePart, ...]


@dataclass(frozen=True, kw_only=True)
class PodError(Record):
    """What was asked cannot be done."""

    error: str
    hint: str | None = None


ToPod: TypeAlias = AskInPod | ReadFolder
FromPod: TypeAlias = SupervisorStatus | FileParts | PodError
FromPreparation: TypeAlias = Preparing | DataPrepared | DataFailed
TO_POD: Channel[ToPod] = Channel(
    name="launcher to pod", sender="launcher", receiver="program in a pod", over="pipe", messages=get_args(ToPod)
)
FROM_POD: Channel[FromPod] = Channel(
    name="pod to launcher", sender="program in a pod", receiver="launcher", over="pipe", messages=get_args(FromPod)
)
PREEMPTION_NOTICES: Channel[PreemptionNotice] = Channel(
    name="preemption watcher to agent",
    sender="preemption watcher",
    receiver="agent",
    over="pipe",
    messages=(PreemptionNotice,),
)
TRACKER_NOTES: Channel[TrackerNote] = Channel(
    name="trackers to agent", sender="trackers", receiver="agent", over="pipe", messages=(TrackerNote,)
)
RUN_OVER: Channel[RunOver] = Channel(
    name="agent to trackers", sender="agent", receiver="trackers", over="pipe", messages=(RunOver,)
)
NODE_CONDITIONS: Channel[NodeCondition] = Channel(
    name="node watcher to agent", sender="node watcher", receiver="agent", over="pipe", messages=(NodeCondition,)
)
PREPARATION: Channel[FromPreparation] = Channel(
    name="data preparation to agent",
    sender="data preparation",
    receiver="agent",
    over="pipe",
    messages=get_args(FromPreparation),
)

# ---------------------------------------------------------------- hosts that are reached by SSH


@dataclass(frozen=True, kw_only=True)
class FarStart(Record):
    """Begin to work for a run; kept in a file that its owner alone reads."""

    run_id: Name
    index: Annotated[Count, "its place in ssh.hosts"]
    rank: Annotated[Count, "its place among those that were started"]
    submission: Name
    home: Name
    files_sha256: Name
    address: Annotated[Name, "by which the other hosts reach it"]
    server: Annotated[str, "address of the host with the run's home; its own: a shared folder; empty: a bucket"]
    port: Annotated[Port, "of that server"]
    copies: Annotated[bool, "it keeps a copy of the home on its disk"] = False
    token: Name
    secrets: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class FarLook(Record):
    """How is the host?"""

    run_id: Annotated[str, "the run whose traces are asked for; empty: none"] = ""


@dataclass(frozen=True, kw_only=True)
class FarEnd(Record):
    """End what works for the run."""

    run_id: Name
    grace_s: Seconds = 10.0
    forget: Annotated[bool, "remove its home too"] = False


@dataclass(frozen=True, kw_only=True)
class FarAsk(Record):
    """A question to the run's supervisor, which is on this host, or a command on it (``backends.letters``)."""

    run_id: Name
    kind: Name
    text: str


@dataclass(frozen=True, kw_only=True)
class FarFacts(Record):
    """One host as it is now."""

    hostname: str
    boot: Annotated[str, "the same under each of a machine's names"]
    home: Annotated[str, "the user's home directory"]
    address: Annotated[str, "by which ssh reached it"]
    gpus: Annotated[tuple[str, ...], "their names; of a question about no run"] = ()
    gpu_memory_bytes: Count = 0
    disk_bytes: Count = 0
    wall_ns: Annotated[Int64, "its clock"] = 0
    doubts: Annotated[tuple[str, ...], "what may go wrong there, in words"] = ()
    held_by: Annotated[str, "the run that it works for"] = ""
    processes: Annotated[Count, "of the run"] = 0
    keeps_home: Annotated[bool, "the run's home is on its disk"] = False
    copied_wall_ns: Annotated[Int64, "when its copy of the run's home was last brought up to date; 0: it has none"] = 0
    supervises: Annotated[bool, "the run's supervisor is one of them"] = False
    reply: Annotated[str, "to FarAsk"] = ""
    left: Annotated[tuple[str, ...], "what exists of the run: processes, memory, secrets, in words"] = ()


@dataclass(frozen=True, kw_only=True)
class StoreCall(Record):
    """One call to a run's home on the first host's disk: over TCP from other hosts, over ssh from a terminal."""

    verb: StoreVerb
    key: Annotated[str, "below the folder of homes: RUN/checkpoints/..."]
    data: Annotated[str, "base64"] = ""
    generation: Annotated[str | None, "of put: what it replaces; empty: nothing; None: anything"] = None
    staged: Annotated[str, "of put: a file next to it with the data, which is then removed"] = ""
    start: Annotated[Count, "first byte of get, read and write; a write of nothing at 0 makes the file"] = 0
    stop: Annotated[Count, "of read: the first byte that is not wanted"] = 0


@dataclass(frozen=True, kw_only=True)
class StoreAnswer(Record):
    """What came of it."""

    data: Annotated[str, "base64"] = ""
    generation: str = ""
    size: Annotated[Count, "of get too, whose answer may have a part"] = 0
    sizes: Annotated[Mapping[str, int], "key -> bytes, of list; folder -> 0, of folders"] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class FarRefused(Record):
    """An order or a call was not carried out."""

    kind: Annotated[Literal["absent", "conflict", "access", "failed"], "conflict: the host works for another run, too"]
    text: str
    hint: str = ""


ToFar: TypeAlias = FarStart | FarLook | FarEnd | FarAsk
FromFar: TypeAlias = FarFacts | FarRefused
FromStore: TypeAlias = StoreAnswer | FarRefused
TO_FAR: Channel[ToFar] = Channel(
    name="terminal to host", sender="terminal", receiver="far program", over="ssh", messages=get_args(ToFar)
)
FROM_FAR: Channel[FromFar] = Channel(
    name="host to terminal", sender="far program", receiver="terminal", over="ssh", messages=get_args(FromFar)
)
TO_STORE: Channel[StoreCall] = Channel(
    name="host to home", sender="host, terminal", receiver="first host", over="TCP, ssh", messages=(StoreCall,)
)
FROM_STORE: Channel[FromStore] = Channel(
    name="home to host", sender="first host", receiver="host, terminal", over="TCP, ssh", messages=get_args(FromStore)
)
