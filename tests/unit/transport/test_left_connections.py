"""Connections that are read when it matters: what they say wakes nobody, their end does, and when it came is known."""

import socket
import time

import pytest
from waiting import eventually

from muster.core.clock import SystemClock
from muster.core.heartbeat_timing import HeartbeatTiming
from muster.protocol.codec import encode, reader_of
from muster.protocol.hello import BeatHello
from muster.protocol.to_supervisor import BEAT_FRAME, GREETING
from muster.protocol.version import MINE
from muster.supervise.process.heartbeats import Heartbeats, read_heartbeat
from muster.supervise.process.liveness import SECOND_NS, HostLiveness
from muster.transport.connections import ConnectionPool, Lost, Received
from muster.transport.secure_session import Session

TOKEN = b"k" * 32


class Watched:
    """A supervisor's end, and one watchdog's."""

    def __init__(self, timeout_s=1.0):
        self.gone, self.liveness = [], HostLiveness(timing=HeartbeatTiming(timeout_s))
        self.pool = ConnectionPool(token=TOKEN, greeting=reader_of(GREETING), channels={BeatHello: read_heartbeat})
        self.heartbeats = Heartbeats(pool=self.pool, liveness=self.liveness, clock=SystemClock())
        self.sock = socket.create_connection(self.pool.listen("127.0.0.1"))
        self.session = Session(TOKEN, server=False)
        self.sock.settimeout(0.01)
        while not self.session.ready:
            self.serve(0.01)
            try:
                self.session.frames(self.sock.recv(1 << 16))
            except TimeoutError:
                pass
            self.sock.sendall(self.session.outgoing())
        self.say(encode(BeatHello(version=MINE, host="a", pid=1, every_s=0.25)))
        self.liveness.agent_connected("a", time.monotonic_ns())
        eventually(lambda: (self.serve(0.01), self.heartbeats.peers)[1])

    def serve(self, timeout_s):
        for event in self.pool.poll(timeout_s):
            match event:
                case Received(peer=peer, message=BeatHello() as hello):
                    self.heartbeats.add(hello.host, peer, every_s=hello.every_s)
                case Lost(peer=peer, reason=reason):
                    self.gone.append(reason)
                    self.heartbeats.remove("a", peer)

    def say(self, frame):
        self.session.send(frame)
        self.sock.sendall(self.session.outgoing())

    def silent_s(self):
        return self.liveness.silent_s("a", time.monotonic_ns())


@pytest.fixture
def watched():
    found = Watched()
    yield found
    found.sock.close()
    found.pool.shutdown()


def asleep_s(watched, for_s):
    began = time.monotonic()
    watched.serve(for_s)
    return time.monotonic() - began


def test_a_beat_wakes_nobody_and_counts_from_when_it_came(watched):
    watched.say(BEAT_FRAME)
    assert asleep_s(watched, 0.3) >= 0.29
    watched.heartbeats.listen()
    assert 0.25 < watched.silent_s() < 0.45, "when it came, not when it was read"
    watched.heartbeats.listen()
    assert watched.silent_s() < 5, "nothing new says nothing new"


def test_a_host_that_beats_is_listened_to_before_it_is_judged_and_a_silent_one_is_lost_at_its_limit(watched):
    until = time.monotonic() + 2.5
    while time.monotonic() < until:
        watched.say(BEAT_FRAME)
        time.sleep(0.1)
        if time.monotonic_ns() >= watched.liveness.deadline_ns():
            watched.heartbeats.listen_to_silent(time.monotonic_ns())
            assert watched.liveness.down(time.monotonic_ns()) == []
    last_ns = time.monotonic_ns()
    while not (lost := watched.liveness.down(time.monotonic_ns())):
        time.sleep(max(0.0, (watched.liveness.deadline_ns() - time.monotonic_ns()) / SECOND_NS))
        watched.heartbeats.listen_to_silent(time.monotonic_ns())
    assert lost[0][0] == "a" and "silent for 1." in lost[0][1]
    assert 0.8 * SECOND_NS < time.monotonic_ns() - last_ns < 1.5 * SECOND_NS


@pytest.mark.parametrize("how", ["closed", "reset"])
def test_its_end_is_seen_at_once(watched, how):
    watched.say(BEAT_FRAME)
    if how == "reset":
        watched.sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
    watched.sock.close()
    assert asleep_s(watched, 5.0) < 2.0
    assert len(watched.gone) == 1 and watched.heartbeats.peers == {} and not watched.pool.peers
    assert asleep_s(watched, 0.2) >= 0.19, "and only once"


def test_what_is_no_beat_ends_it(watched):
    watched.say(b'["pong",{"number":1,"mono_ns":1}]')
    eventually(lambda: (watched.heartbeats.listen(), watched.serve(0.0), watched.gone)[2])
    assert watched.heartbeats.peers == {}
    watched.heartbeats.listen()


def test_a_forged_frame_is_no_sign_of_life(watched):
    before = watched.liveness.hosts["a"].heartbeat_ns
    watched.sock.sendall(b"\0\0\0\x0b" + b"x" * 16 + BEAT_FRAME)
    eventually(lambda: (watched.heartbeats.listen(), watched.serve(0.0), watched.gone)[2])
    assert watched.heartbeats.peers == {}
    assert watched.liveness.hosts["a"].heartbeat_ns == before
