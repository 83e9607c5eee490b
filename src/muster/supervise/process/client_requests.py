"""What terminals request of a run: stops, looks at hardware, traces, stacks. Pure: answers and orders are values.

Requests that hosts answer: a look at hardware is polled for by its number; a client that asked for stacks waits until
all hosts of the attempt have answered, or its time is over. Recovery depends on none of it.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field, replace

from muster.core.incidents import KINDS
from muster.core.typed_json import Unreadable, encode
from muster.health.hang.stack_groups import MOST_GROUPS, grouped, ranges
from muster.protocol.client import AskStacks, CheckHosts, HealthReport, StopRun, SupervisorStatus, TraceRun
from muster.protocol.to_agent import GatherEvidence, LookAtHost, ToAgent, TraceRanks
from muster.protocol.to_supervisor import EvidenceReady, HostLooked
from muster.protocol.values import HostLook, TraceSteps
from muster.supervise.recovery.hangs import read_answers
from muster.supervise.recovery.inputs import SECOND_NS, FromHost, StopRequest
from muster.supervise.recovery.phases import Running
from muster.supervise.recovery.state import State
from muster.transport.connections import Connection

#: What a host may take beyond the time that it was given, to answer.
ANSWER_S = 1.0
#: Longest time that a terminal may give the hosts.
MOST_LIMIT_S = 30.0
#: Sentences about what is missing, in one answer.
MOST_MISSING = 16
#: Looks whose answers are kept: a client polls until it has them.
LOOKS_KEPT = 4
#: Of all outputs in one answer, of whose frame quotes take twice as much: a host beyond it counts as not looked at.
MOST_BYTES = 6 << 20


@dataclass(frozen=True)
class Reply:
    """Send a client its answer."""

    client: Connection
    status: SupervisorStatus


@dataclass(frozen=True)
class ToHost:
    """Send a connected host's agent a message."""

    host: str
    message: ToAgent


@dataclass(frozen=True)
class RunView:
    """What an answer depends on."""

    state: State
    status: SupervisorStatus
    connected: Collection[str]
    """Hosts with a connected agent."""


@dataclass
class _StacksRequest:
    """A request for stacks that is not answered yet."""

    client: Connection
    attempt: int
    until_ns: int
    waiting: set[str]
    answers: dict[str, EvidenceReady] = field(default_factory=dict)


@dataclass
class ClientRequests:
    """Requests in flight, of one supervisor."""

    _looks: dict[int, dict[str, HostLook]] = field(default_factory=dict)
    """By the number of the request."""
    _stacks: list[_StacksRequest] = field(default_factory=list)

    def on_client(
        self, client: Connection, message: TraceRun | AskStacks | CheckHosts, run: RunView, now_ns: int
    ) -> list[Reply | ToHost]:
        """Begin a request; the answer is among the results, or is returned by ``due`` later."""
        match message:
            case TraceRun():
                return self._trace(client, message, run)
            case AskStacks():
                return self._begin_stacks(client, message, run, now_ns)
            case CheckHosts():
                return self._look(client, message, run)

    def on_host(self, host: str, message: HostLooked | EvidenceReady) -> bool:
        """Take a host's answer. True: it was to a client alone."""
        if isinstance(message, HostLooked):
            if message.number in self._looks:
                self._looks[message.number][host] = message.look
            return message.number != 0
        for request in self._stacks:
            if request.attempt == message.attempt and host in request.waiting:
                request.waiting.discard(host)
                request.answers[host] = message
        return False

    def deadline_ns(self) -> int | None:
        """When ``due`` returns something, if nothing is received until then; 0: at once."""
        return min((request.until_ns if request.waiting else 0 for request in self._stacks), default=None)

    def due(self, status: SupervisorStatus, now_ns: int) -> list[Reply]:
        """Answers to clients that wait no longer. Call it at ``deadline_ns``."""
        over = [request for request in self._stacks if now_ns >= request.until_ns or not request.waiting]
        self._stacks = [request for request in self._stacks if request not in over]
        return [Reply(request.client, _with_stacks(status, request)) for request in over]

    def _look(self, client: Connection, message: CheckHosts, run: RunView) -> list[Reply | ToHost]:
        """The hosts are asked the first time; what they have answered so far is returned each time."""
        orders: list[Reply | ToHost] = []
        if message.number not in self._looks:
            while len(self._looks) >= LOOKS_KEPT:
                del self._looks[next(iter(self._looks))]
            self._looks[message.number] = {}
            orders = [ToHost(host, LookAtHost(number=message.number)) for host in run.connected]
        room, looks = MOST_BYTES, dict[str, HostLook]()
        for host, look in sorted(self._looks[message.number].items()):
            room -= len(look.output)
            looks[host] = look if room >= 0 else replace(look, output="")
        return [*orders, Reply(client, replace(run.status, looks=looks))]

    def _trace(self, client: Connection, message: TraceRun, run: RunView) -> list[Reply | ToHost]:
        state, orders = run.state, list[Reply | ToHost]()
        wanted = message.ranks or tuple(sorted(state.ranks))
        reason = _refusal(run, wanted)
        if reason is None and not state.progress.stepped:  # a process that becomes a rank takes no message meanwhile
            reason = f"attempt {state.attempt} has taken no step yet"
        if reason is None:
            trace = TraceSteps(request=message.request, steps=message.steps)
            for host in sorted({state.ranks[rank] for rank in wanted}):
                ranks = tuple(rank for rank in wanted if state.ranks[rank] == host)
                orders.append(ToHost(host, TraceRanks(attempt=state.attempt, ranks=ranks, trace=trace)))
        return [*orders, Reply(client, replace(run.status, refused=reason))]

    def _begin_stacks(self, client: Connection, message: AskStacks, run: RunView, now_ns: int) -> list[Reply | ToHost]:
        if (reason := _refusal(run, ())) is not None:
            return [Reply(client, replace(run.status, refused=reason))]
        attempt, limit_s = run.state.attempt, min(message.limit_s, MOST_LIMIT_S)
        hosts = {host for host in run.state.active if host in run.connected}
        until_ns = now_ns + int((limit_s + ANSWER_S) * SECOND_NS)
        self._stacks.append(_StacksRequest(client, attempt, until_ns, hosts))
        return [ToHost(host, GatherEvidence(attempt=attempt, limit_s=limit_s)) for host in sorted(hosts)]


def _refusal(run: RunView, ranks: tuple[int, ...]) -> str | None:
    """Why the ranks cannot be asked now; None: they can."""
    state = run.state
    if not isinstance(state.phase, Running):
        return f"no rank trains at this moment: {run.status.reason}"
    if absent := [rank for rank in ranks if rank not in state.ranks]:
        return f"there is no rank {ranges(absent)}: the run's ranks are {ranges(state.ranks)}"
    if away := sorted({state.ranks[rank] for rank in ranks}.difference(run.connected)):
        return f"{', '.join(away)} is not connected at this moment"
    return None


def _with_stacks(status: SupervisorStatus, request: _StacksRequest) -> SupervisorStatus:
    ranks, missing = read_answers(request.answers, request.waiting)
    missing += [
        f"rank {one.rank} on {one.host}: {sentence}" for one in ranks if not one.threads for sentence in one.missing
    ]
    groups = grouped(ranks)
    if len(groups) > MOST_GROUPS:
        missing.append(f"{len(groups) - MOST_GROUPS} more groups of ranks")
    stacks = tuple(encode(group).decode() for group in groups[:MOST_GROUPS])
    return replace(status, stacks=stacks, missing=tuple(missing[:MOST_MISSING]))


def stop_of(message: StopRun) -> StopRequest:
    """``muster stop``; ``again``: of a scheduler that will start the run again."""
    code = 75 if message.again else 130
    return StopRequest(source=message.source, save=message.save, exit_code=code, force=message.force)


def health_of(message: HealthReport) -> FromHost:
    """What a health check or another detector reports for a host. Raises Unreadable for an unknown kind."""
    if message.kind not in KINDS.names():
        raise Unreadable(f"no incident kind {message.kind[:40]!r}")
    return FromHost(host=message.host, message=message)
