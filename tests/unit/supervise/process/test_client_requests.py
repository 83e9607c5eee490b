"""A terminal's requests about hosts and ranks: carried to the right hosts, answered in time, never guessed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, cast

from muster.core.layout import Layout
from muster.core.typed_json import Record, decode, encode
from muster.health.hang.evidence import RankEvidence
from muster.health.hang.stack_groups import StackGroup
from muster.health.hang.stacks import Frame, Thread
from muster.health.machine.report import read_probe
from muster.protocol.client import AskStacks, CheckHosts, SupervisorStatus, TraceRun
from muster.protocol.codec import MAX_BYTES
from muster.protocol.codec import encode as encode_frame
from muster.protocol.to_agent import GatherEvidence, LookAtHost, TraceRanks
from muster.protocol.to_supervisor import EvidenceReady, HostLooked
from muster.protocol.values import HostLook, TraceSteps
from muster.supervise.process.client_requests import ANSWER_S, MOST_LIMIT_S, ClientRequests, Reply, RunView, ToHost
from muster.supervise.recovery.phases import Running, Starting
from muster.supervise.recovery.state import Attempt, State

CLIENT = "the terminal"
STATUS = SupervisorStatus(phase="run", reason="as it is", attempt=3, step=7)
LOOK = HostLook(part="passive", output="seen")


@dataclass
class Desk:
    """Two hosts with two ranks each, and a terminal."""

    sent: list[tuple[str, Record]] = field(default_factory=list)
    now_ns: int = 0
    connected: set[str] = field(default_factory=lambda: {"host-0", "host-1"})
    state: State = field(default_factory=State)
    requests: ClientRequests = field(default_factory=ClientRequests)

    def __post_init__(self) -> None:
        self.state.attempt = 3
        self.state.current = Attempt(
            hosts=("host-0", "host-1"), ranks={0: "host-0", 1: "host-0", 2: "host-1", 3: "host-1"}, layout=Layout()
        )
        self.state.phase = Running()
        self.state.progress.stepped = True

    def ask(self, message: TraceRun | AskStacks | CheckHosts) -> None:
        run = RunView(self.state, STATUS, self.connected)
        self._send(self.requests.on_client(cast(Any, CLIENT), message, run, self.now_ns))

    def hear(self, host: str, message: EvidenceReady | HostLooked) -> bool:
        """True: it answers a client alone. Replies are sent as in a turn of the loop."""
        result = self.requests.on_host(host, message)
        self.tend()
        return result

    def tend(self) -> None:
        due_ns = self.requests.deadline_ns()
        if due_ns is not None and self.now_ns >= due_ns:
            self._send(self.requests.due(STATUS, self.now_ns))

    def _send(self, results: Sequence[Reply | ToHost]) -> None:
        for result in results:
            if isinstance(result, Reply):
                self.sent.append((cast(str, result.client), result.status))
            else:
                self.sent.append((result.host, result.message))

    def answers(self) -> list[SupervisorStatus]:
        return [cast(SupervisorStatus, message) for to, message in self.sent if to == CLIENT]

    def orders(self) -> list[tuple[str, Record]]:
        return [(to, message) for to, message in self.sent if to != CLIENT]


def evidence(*ranks: int, line: int = 7) -> tuple[str, ...]:
    thread = Thread(main=True, frames=(Frame(function="step", file="train.py", line=line),))
    return tuple(encode(RankEvidence(rank=rank, host="host-0", threads=(thread,))).decode() for rank in ranks)


def test_each_host_is_told_of_its_own_ranks_alone() -> None:
    desk = Desk()
    desk.ask(TraceRun(request="a", steps=5, ranks=(0, 2, 3)))
    trace = TraceSteps(request="a", steps=5)
    assert desk.orders() == [
        ("host-0", TraceRanks(attempt=3, ranks=(0,), trace=trace)),
        ("host-1", TraceRanks(attempt=3, ranks=(2, 3), trace=trace)),
    ]
    assert [answer.refused for answer in desk.answers()] == [None]


def test_without_ranks_all_of_them_trace() -> None:
    desk = Desk()
    desk.ask(TraceRun(request="a"))
    assert [cast(TraceRanks, order).ranks for _, order in desk.orders()] == [(0, 1), (2, 3)]


def refused(desk: Desk, message: TraceRun | AskStacks) -> str:
    desk.ask(message)
    assert desk.orders() == [], "where one part is refused nothing is begun"
    (answer,) = desk.answers()
    assert answer.refused is not None and "\n" not in answer.refused
    return answer.refused


def test_a_rank_that_is_not_there_a_host_that_is_away_and_a_run_that_does_not_train() -> None:
    assert "there is no rank 4, 9: the run's ranks are 0-3" in refused(Desk(), TraceRun(request="a", ranks=(0, 4, 9)))
    away = Desk()
    away.connected.discard("host-1")
    assert "host-1 is not connected" in refused(away, TraceRun(request="a"))
    fresh = Desk()
    fresh.state.progress.stepped = False
    assert "attempt 3 has taken no step yet" in refused(fresh, TraceRun(request="a"))
    for message in (TraceRun(request="a"), AskStacks()):
        early = Desk()
        early.state.phase = Starting()
        assert "no rank trains at this moment: as it is" in refused(early, message)


def test_stacks_wait_for_every_host_and_are_merged() -> None:
    desk = Desk()
    desk.ask(AskStacks(limit_s=1.5))
    order = GatherEvidence(attempt=3, limit_s=1.5)
    assert desk.orders() == [("host-0", order), ("host-1", order)]
    desk.hear("host-0", EvidenceReady(attempt=3, ranks=evidence(0, 1)))
    desk.hear("host-9", EvidenceReady(attempt=3, ranks=evidence(9)))
    desk.hear("host-1", EvidenceReady(attempt=2, ranks=evidence(8)))
    assert desk.answers() == []
    desk.hear("host-1", EvidenceReady(attempt=3, ranks=(*evidence(2), *evidence(3, line=9), "cut {")))
    (answer,) = desk.answers()
    groups = [decode(StackGroup, text) for text in answer.stacks]
    assert [(group.ranks, group.frames[0].line) for group in groups] == [((0, 1, 2), 7), ((3,), 9)]
    (missing,) = answer.missing
    assert missing.startswith("host-1: ")
    assert desk.requests.deadline_ns() is None


def test_a_host_that_does_not_answer_is_named_when_the_time_is_over() -> None:
    desk = Desk()
    desk.ask(AskStacks(limit_s=1.0))
    desk.hear("host-0", EvidenceReady(attempt=3, ranks=evidence(0, 1)))
    assert desk.requests.deadline_ns() == int((1.0 + ANSWER_S) * 1e9)
    desk.now_ns = int((1.0 + ANSWER_S) * 1e9)
    desk.tend()
    (answer,) = desk.answers()
    assert answer.missing == ("host-1 has not answered",) and len(answer.stacks) == 1


def test_nobody_waits_for_longer_than_a_terminal_may_ask_for() -> None:
    desk = Desk()
    desk.ask(AskStacks(limit_s=1e6))
    assert desk.requests.deadline_ns() == int((MOST_LIMIT_S + ANSWER_S) * 1e9)
    assert {cast(GatherEvidence, order).limit_s for _, order in desk.orders()} == {MOST_LIMIT_S}


def test_two_terminals_each_get_their_answer() -> None:
    desk = Desk()
    desk.ask(AskStacks())
    desk.ask(AskStacks())
    for host in ("host-0", "host-1"):
        desk.hear(host, EvidenceReady(attempt=3, ranks=evidence(int(host[-1]))))
    assert [len(answer.stacks) for answer in desk.answers()] == [1, 1]


# ---------------------------------------------------------------- looks at hardware


def looks(desk: Desk, number: int) -> dict[str, HostLook]:
    """What a client that polls is answered now."""
    desk.ask(CheckHosts(number=number))
    return dict(desk.answers()[-1].looks)


def test_hosts_are_asked_once_for_each_request_and_each_gets_its_answers() -> None:
    desk = Desk()
    for number in (11, 12, 11):
        assert looks(desk, number) == {}
    asked = sorted((host, cast(LookAtHost, order).number) for host, order in desk.orders())
    assert asked == [("host-0", 11), ("host-0", 12), ("host-1", 11), ("host-1", 12)]
    assert desk.hear("host-1", HostLooked(number=11, look=LOOK))
    assert looks(desk, 11) == {"host-1": LOOK} and looks(desk, 12) == {}


def test_more_than_an_answer_can_hold_is_left_out_and_counts_as_missing() -> None:
    desk = Desk(connected=set())
    looks(desk, 5)
    for number in range(9):
        desk.hear(f"host-{number}", HostLooked(number=5, look=HostLook(part="passive", output="x" * (1 << 20))))
    found = looks(desk, 5)
    assert [len(one.output) > 0 for one in found.values()] == [True] * 6 + [False] * 3
    assert len(encode_frame(desk.answers()[-1])) <= MAX_BYTES
    assert read_probe(found["host-8"].output.encode(), host="host-8").missing


def test_what_a_host_saw_by_itself_is_the_state_machines() -> None:
    assert not Desk().hear("host-0", HostLooked(look=LOOK))


def test_old_requests_are_forgotten_and_late_answers_to_them_reach_no_client() -> None:
    desk = Desk(connected=set())
    for number in range(1, 7):
        looks(desk, number)
    assert desk.hear("host-0", HostLooked(number=1, look=LOOK))
    assert looks(desk, 6) == {} and looks(desk, 1) == {}
