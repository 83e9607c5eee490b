"""What comes from somebody who has the token, and cannot be used, ends that connection and nothing else."""

import json

import pytest
from fakes.idle_supervisor import idle_supervisor
from fakes.virtual_run import cluster, events_of, spec

from muster.core.event_log import read
from muster.core.heartbeat_timing import HeartbeatTiming
from muster.core.typed_json import Unreadable
from muster.protocol.client import HealthReport, StopRun, SupervisorStatus
from muster.protocol.codec import encode
from muster.protocol.hello import AgentHello, BeatHello, ClientHello, Refused, greeting_reader
from muster.protocol.to_supervisor import GREETING, Beat
from muster.protocol.version import MINE, PROTOCOL
from muster.supervise.process.term import CHANNELS
from muster.supervise.recovery.inputs import FromHost, StopRequest
from muster.supervise.recovery.phases import Running
from muster.supervise.replay.rebuild_state import rebuild_state
from muster.transport.connections import Lost, Received

HELLO = {"version": {"protocol": PROTOCOL, "muster": "0"}, "host": "host-0", "pid": 1}
COPY = {"step": 1, "attempt": 1, "rank": 0, "layout": "r1s2t1p1c1e1", "host": "host-0"}


@pytest.fixture
def supervisor(tmp_path):
    return idle_supervisor(tmp_path, spec(hosts=1))


class Peer:
    """A connection as the pool keeps it."""

    def __init__(self):
        self.identity, self.read = None, greeting_reader(GREETING, me="the supervisor")


def say(supervisor, *messages):
    """As ``ConnectionPool.poll`` yields what a peer sends."""
    peer = Peer()
    for message in messages:
        hear(supervisor, peer, message if isinstance(message, bytes) else encode(message))
    return peer


def hear(supervisor, peer, frame):
    try:
        message = peer.read(frame)
    except Unreadable as error:
        supervisor.term.world.pool.close(peer)
        supervisor.on_event(Lost(peer, str(error), unreadable=True))
        return
    peer.read = CHANNELS.get(type(message), peer.read)
    supervisor.on_event(Received(peer, message))


def frame(kind, /, **fields):
    return json.dumps([kind, fields]).encode()


def refusals(supervisor):
    found = [event for _, event in read(supervisor.term.world.run_dir / "events") if event.kind == "connection.refused"]
    return [(event.detail["who"], event.detail["reason"]) for event in found]


def notes(supervisor):
    return [
        event.detail["text"]
        for _, event in read(supervisor.term.world.run_dir / "events")
        if event.kind == "run.message"
    ]


BAD = [
    b"",
    b"[]",
    b"\xff\xfe",
    b'["agent_hello"]',
    frame("captain_hello", **HELLO),
    frame("beat", version=HELLO["version"]),
    frame("agent_hello", version=HELLO["version"]),
    frame("beat_hello", **HELLO, every_s="often"),
    frame("beat_hello", **HELLO, every_s=-1.0),
    frame("agent_hello", **HELLO, alive=[1, 2]),
    frame("agent_hello", **HELLO, alive={"first": 7}),
    frame("agent_hello", **HELLO, exited=["one"]),
    frame("agent_hello", **HELLO, step="x"),
    frame("agent_hello", **HELLO, attempt=None),
    frame("agent_hello", **HELLO, step=10**30),
    frame("agent_hello", **HELLO, snapshots=[{"step": 1}]),
    frame("agent_hello", **HELLO, snapshots=[{**COPY, "tier": "bucket"}]),
    frame("agent_hello", **HELLO, store=["only-a-host"]),
    frame("agent_hello", **HELLO, memory=5),
    frame("agent_hello", **HELLO, cargo=5),
    frame("agent_hello", **{**HELLO, "host": ""}),
    frame("agent_hello", **{**HELLO, "host": "\ud800"}),
    frame("beat_hello", **HELLO, every_s=3601.0),
]


@pytest.mark.parametrize("hello", BAD, ids=str)
def test_a_hello_that_cannot_be_used(supervisor, hello):
    peer = say(supervisor, hello)
    assert supervisor.term.world.pool.closed == [peer] and not supervisor.term.world.pool.sent
    assert [who for who, _ in refusals(supervisor)] == ["a new connection"]
    assert (
        supervisor.term.world.machine.state.hosts == {}
        and not supervisor.term.world.agents
        and not supervisor.term.heartbeats.peers
    )


def test_one_that_can(supervisor):
    say(supervisor, frame("agent_hello", **HELLO, snapshots=[{**COPY, "tier": "memory"}]))
    host = supervisor.term.world.machine.state.hosts["host-0"]
    assert host.connected and not supervisor.term.world.pool.closed and host.ranks.snapshots[0].tier == "memory"


def test_a_copy_on_another_host_is_not_for_this_one_to_report(supervisor):
    """Nothing is asked of a host that is not there."""
    copies = [{**COPY, "rank": rank, "host": "host-7", "tier": "memory"} for rank in (0, 1)]
    say(supervisor, frame("agent_hello", **HELLO, snapshots=copies))
    assert supervisor.term.world.machine._ctx.newest_held() is None
    say(supervisor, frame("agent_hello", **{**HELLO, "host": "host-7"}, snapshots=copies))
    assert supervisor.term.world.machine._ctx.newest_held().step == 1


def test_another_protocol_is_answered_with_both_versions_whatever_its_hello_holds(supervisor):
    theirs = {"protocol": PROTOCOL + 1, "muster": "9.9"}
    peer = say(supervisor, frame("agent_hello", version=theirs, host="host-7", what_we_do_not_know=1))
    (answer,) = supervisor.term.world.pool.sent
    assert isinstance(answer, Refused) and supervisor.term.world.pool.closed == [peer]
    for word in (f"protocol {PROTOCOL} ", f"protocol {PROTOCOL + 1} (muster 9.9)", "host-7"):
        assert word in answer.reason and word in refusals(supervisor)[0][1]
    assert supervisor.term.world.machine.state.hosts == {}


def test_hosts_of_other_versions_are_told_apart_and_each_is_said_once(supervisor):
    theirs = {"protocol": PROTOCOL + 1, "muster": "\ud800"}
    for host in ("host-7", "host-8\udfff", "host-7"):
        say(supervisor, frame("agent_hello", version=theirs, host=host))
    assert ["(muster ?)" in answer.reason and bool(encode(answer)) for answer in supervisor.term.world.pool.sent] == [
        True
    ] * 3
    assert [who for who, _ in refusals(supervisor)] == ["a new connection"] * 2
    assert "host-7" in refusals(supervisor)[0][1] and "host-8?" in refusals(supervisor)[1][1]


def test_a_rank_that_reconnects_late_counts_where_hosts_are_awaited_and_only_there(tmp_path):
    of = spec(hosts=2)
    found = cluster(of)
    found.run(until_s=20.0)
    supervisor = idle_supervisor(tmp_path, of, rebuild_state(events_of(found)))
    peers = [say(supervisor, AgentHello(version=MINE, host=name, pid=1, attempt=1)) for name in ("host-0", "host-1")]
    for rank, peer in enumerate(peers):
        hello = AgentHello(version=MINE, host=f"host-{rank}", pid=1, attempt=1, alive={rank: 7})
        hear(supervisor, peer, encode(hello))
    state = supervisor.term.world.machine.state
    assert isinstance(state.phase, Running) and state.attempt == 1
    hear(supervisor, peers[0], encode(AgentHello(version=MINE, host="host-0", pid=1, attempt=1)))
    assert isinstance(state.phase, Running) and not supervisor.term.world.pool.closed


def test_a_later_message_that_cannot_be_used_is_said_once_a_minute_and_the_host_stays(supervisor):
    for _ in range(3):
        peer = say(supervisor, AgentHello(version=MINE, host="host-0", pid=1), frame("rank_exit", attempt="one"))
        assert supervisor.term.world.pool.closed[-1] is peer
    ((who, reason),) = refusals(supervisor)
    assert who == "host-0" and "rank_exit" in reason and supervisor.term.world.machine.state.hosts["host-0"].connected
    supervisor.term.clock.monotonic_ns = lambda: 10**12 + 61 * 10**9
    say(supervisor, AgentHello(version=MINE, host="host-0", pid=1), b"{}")
    assert len(refusals(supervisor)) == 2


def test_a_message_of_another_channel_is_none_of_this_one(supervisor):
    hellos = (AgentHello(version=MINE, host="a", pid=1), ClientHello(version=MINE))
    assert supervisor.term.world.pool.closed == [say(supervisor, hello, Beat()) for hello in hellos]


@pytest.mark.parametrize("wrong", [{"resettable": ["first"]}, {"resettable": 3}, {"kind": "bad_mood"}])
def test_a_health_verdict_that_cannot_be_used(supervisor, wrong):
    peer = say(supervisor, ClientHello(version=MINE), frame("health_report", host="a", **wrong))
    assert supervisor.term.world.pool.closed == [peer] and refusals(supervisor)[0][0] == "a client"
    assert not supervisor.pending


def test_clients_are_understood(supervisor):
    health = HealthReport(host="a", evidence="Xid 79", resettable=(0, 1))
    say(supervisor, ClientHello(version=MINE), health, StopRun(again=True, save=False))
    verdict, stop = supervisor.pending
    assert verdict == FromHost(host="a", message=health)
    assert stop == StopRequest(source="muster stop", exit_code=75, save=False)
    assert [type(message) for message in supervisor.term.world.pool.sent] == [SupervisorStatus, SupervisorStatus]


def test_a_limit_of_silence_shorter_than_three_beats_is_said_not_kept(supervisor):
    supervisor.term.heartbeats.liveness.timing = HeartbeatTiming(0.3)
    for _ in range(2):
        say(supervisor, BeatHello(version=MINE, host="host-0", pid=1, every_s=0.5), Beat())
    assert ["using 1.5 s" in text for text in notes(supervisor)] == [True]
