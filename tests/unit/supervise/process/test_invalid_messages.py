"""What comes from somebody who has the token, and cannot be used, ends that connection and nothing else."""

from types import SimpleNamespace

import pytest
from fakes.virtual_run import machine, spec

from muster.core.event_log import EventLog, read
from muster.supervise.process.clock_offsets import ClockOffsets
from muster.supervise.process.limits import LimitsGuard
from muster.supervise.process.liveness import HostLiveness
from muster.supervise.process.server import Supervisor
from muster.supervise.recovery.state import FromHost, StopRequest

HELLO = {"t": "hello", "role": "agent", "host": "host-0", "attempt": 0, "alive": {}, "ready": True, "step": 0}


class ConnectionPool:
    def __init__(self):
        self.sent, self.closed = [], []

    def send(self, peer, message):
        self.sent.append(message)

    def close(self, peer):
        self.closed.append(peer)


@pytest.fixture
def supervisor(tmp_path):
    of = spec(hosts=1)
    found = Supervisor(run_dir=tmp_path)
    found.run_id, found.pool, found.agents, found.watchdogs, found.clocks = (
        "r",
        ConnectionPool(),
        {},
        {},
        ClockOffsets(),
    )
    found.machine = machine(of)
    found.limits_guard = LimitsGuard(limits=of.limits, grace_s=30.0)
    found.liveness = HostLiveness(timeout_s=3.0)
    found.clock = SimpleNamespace(monotonic_ns=lambda: 10**12, wall_ns=lambda: 10**18)
    found.lease = SimpleNamespace(hold=lambda: None)
    found.log = EventLog("r", tmp_path / "events", "supervisor", 1)
    return found


def say(supervisor, *messages):
    peer = SimpleNamespace(identity=None, closed=False)
    for message in messages:
        supervisor._message(peer, message)
    return peer


def notes(supervisor):
    return [event.detail["text"] for _, event in read(supervisor.run_dir / "events") if event.kind == "run.message"]


BAD = [
    {"t": "hello"},
    {"t": "hello", "role": "captain"},
    {"t": "hello", "role": "agent"},
    {"t": "hello", "role": "beat", "host": "host-0", "every_s": "often"},
    {"t": "hello", "role": "beat", "host": "host-0", "every_s": float("inf")},
    {**HELLO, "alive": [1, 2]},
    {**HELLO, "alive": {"first": 7}},
    {**HELLO, "exited": ["one"]},
    {**HELLO, "step": "x"},
    {**HELLO, "attempt": None},
    {**HELLO, "snapshots": [{"step": 1}]},
    {**HELLO, "store": ["only-a-host"]},
    {**HELLO, "memory": 5},
]


@pytest.mark.parametrize("hello", BAD, ids=str)
def test_a_hello_that_cannot_be_used(supervisor, hello):
    peer = say(supervisor, hello)
    assert supervisor.pool.closed == [peer] and "unusable message" in notes(supervisor)[0]
    assert supervisor.machine.state.hosts == {} and not supervisor.agents and not supervisor.watchdogs


def test_one_that_can(supervisor):
    say(
        supervisor,
        {**HELLO, "snapshots": [{"step": 1, "attempt": 1, "rank": 0, "layout": "r1s1t1p1c1e1", "tier": "memory"}]},
    )
    assert supervisor.machine.state.hosts["host-0"].connected and not supervisor.pool.closed


@pytest.mark.parametrize("resettable", [["first"], 3, [None]])
def test_a_health_verdict_that_cannot_be_used(supervisor, resettable):
    peer = say(supervisor, {"t": "hello", "role": "client"}, {"t": "health", "host": "a", "resettable": resettable})
    assert supervisor.pool.closed == [peer] and "unusable message" in notes(supervisor)[0]
    assert supervisor._pending == []


def test_clients_are_understood(supervisor):
    health = {"t": "health", "host": "a", "evidence": "Xid 79", "resettable": [0, "1"]}
    say(supervisor, {"t": "hello", "role": "client"}, health, {"t": "stop", "again": True, "save": False})
    verdict, stop = supervisor._pending
    assert isinstance(verdict, FromHost) and verdict.message["resettable"] == [0, 1]
    assert stop == StopRequest(source="muster stop", exit_code=75, save=False)
    assert [message["t"] for message in supervisor.pool.sent] == ["status", "status"]


def test_a_limit_of_silence_shorter_than_three_beats_is_said_not_kept(supervisor):
    supervisor.liveness.timeout_s = 0.3
    for _ in range(2):
        say(supervisor, {"t": "hello", "role": "beat", "host": "host-0", "every_s": 0.5})
    assert ["using 1.5 s" in text for text in notes(supervisor)] == [True]
