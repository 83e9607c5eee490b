"""What a terminal asks of the ranks of a run that trains: traces of steps, stacks. Recovery does not depend on it.

The hosts of the attempt are asked over the links that they have; whoever asked for stacks waits until all have
answered, or their time is over.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

from muster.core.protocols import Clock
from muster.core.typed_json import Record, encode
from muster.health.hang.stack_groups import MOST_GROUPS, grouped, ranges
from muster.protocol.client import AskStacks, FromClient, SupervisorStatus, TraceRun
from muster.protocol.to_agent import GatherEvidence, TraceRanks
from muster.protocol.to_supervisor import EvidenceReady
from muster.protocol.values import TraceSteps
from muster.supervise.hangs.gathering import read_answers
from muster.supervise.recovery.phases import Running
from muster.supervise.recovery.state import State
from muster.transport.connections import Connection

#: What a host may take beyond the time that it was given, to answer.
ANSWER_S = 1.0
#: Longest time that a terminal may give the hosts.
MOST_LIMIT_S = 30.0
#: Sentences about what is missing that are told.
MOST_MISSING = 16


@dataclass
class _Look:
    """A question for stacks that is not answered yet."""

    client: Connection
    attempt: int
    until_ns: int
    waiting: set[str]
    answers: dict[str, EvidenceReady] = field(default_factory=dict)


@dataclass
class LiveRequests:
    """Of one supervisor."""

    _send: Callable[[Connection, Record], None]
    _agents: Mapping[str, Connection]
    """Host -> its connection, where there is one."""
    _state: Callable[[], State]
    _status: Callable[[], SupervisorStatus]
    _clock: Clock
    _looks: list[_Look] = field(default_factory=list)

    def ask(self, client: Connection, message: FromClient) -> bool:
        """Carry out what ``client`` asks for, and answer it: at once, or when the hosts have. False: it is not ours."""
        if isinstance(message, TraceRun):
            self._trace(client, message)
        elif isinstance(message, AskStacks):
            self._stacks(client, message)
        else:
            return False
        return True

    def _trace(self, client: Connection, message: TraceRun) -> None:
        state = self._state()
        wanted = message.ranks or tuple(sorted(state.ranks))
        reason = self._refusal(wanted)
        if reason is None and not state.progress.stepped:  # a process that becomes a rank takes no message meanwhile
            reason = f"attempt {state.attempt} has taken no step yet"
        if reason is None:
            trace = TraceSteps(request=message.request, steps=message.steps)
            for host in sorted({state.ranks[rank] for rank in wanted}):
                ranks = tuple(rank for rank in wanted if state.ranks[rank] == host)
                self._send(self._agents[host], TraceRanks(attempt=state.attempt, ranks=ranks, trace=trace))
        self._send(client, replace(self._status(), refused=reason))

    def _stacks(self, client: Connection, message: AskStacks) -> None:
        state = self._state()
        if (reason := self._refusal(())) is not None:
            self._send(client, replace(self._status(), refused=reason))
            return
        limit_s = min(message.limit_s, MOST_LIMIT_S)
        until_ns = self._clock.monotonic_ns() + int((limit_s + ANSWER_S) * 1e9)
        hosts = {host for host in state.active if host in self._agents}
        look = _Look(client=client, attempt=state.attempt, until_ns=until_ns, waiting=hosts)
        self._looks.append(look)
        for host in sorted(hosts):
            self._send(self._agents[host], GatherEvidence(attempt=state.attempt, limit_s=limit_s))
        self.tend()

    def _refusal(self, ranks: tuple[int, ...]) -> str | None:
        """Why the ranks cannot be asked now; None: they can."""
        state, status = self._state(), self._status()
        if not isinstance(state.phase, Running):
            return f"no rank trains at this moment: {status.reason}"
        if absent := [rank for rank in ranks if rank not in state.ranks]:
            return f"there is no rank {ranges(absent)}: the run's ranks are {ranges(state.ranks)}"
        if away := sorted({state.ranks[rank] for rank in ranks} - self._agents.keys()):
            return f"{', '.join(away)} is not connected at this moment"
        return None

    def on_evidence(self, host: str, answer: object) -> None:
        """A host has said something: if it has looked, for us or for the recovery of a hang, we take it."""
        if not isinstance(answer, EvidenceReady):
            return
        for look in self._looks:
            if look.attempt == answer.attempt and host in look.waiting:
                look.waiting.discard(host)
                look.answers[host] = answer
        self.tend()

    def deadline_ns(self) -> int | None:
        """When ``tend`` has something to do, whatever comes until then."""
        return min((look.until_ns for look in self._looks), default=None)

    def tend(self) -> None:
        """Answer whoever has waited long enough. Call it in every turn of the loop."""
        now = self._clock.monotonic_ns()
        for look in [look for look in self._looks if now >= look.until_ns or not look.waiting]:
            self._looks.remove(look)
            self._send(look.client, self._told(look))

    def _told(self, look: _Look) -> SupervisorStatus:
        ranks, missing = read_answers(look.answers, look.waiting)
        missing += [
            f"rank {one.rank} on {one.host}: {sentence}" for one in ranks if not one.threads for sentence in one.missing
        ]
        groups = grouped(ranks)
        if len(groups) > MOST_GROUPS:
            missing.append(f"{len(groups) - MOST_GROUPS} more groups of ranks")
        stacks = tuple(encode(group).decode() for group in groups[:MOST_GROUPS])
        return replace(self._status(), stacks=stacks, missing=tuple(missing[:MOST_MISSING]))
