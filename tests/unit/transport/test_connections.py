"""One selector loop: each connection carries one channel's messages, and a frame that is none ends that connection."""

import os
import socket

import pytest

from muster.core.typed_json import Unreadable
from muster.protocol.client import FROM_CLIENT, TO_CLIENT, AskStatus, RestartRun, StopRun
from muster.protocol.codec import encode, reader_of
from muster.protocol.hello import ClientHello, Refused
from muster.protocol.to_supervisor import GREETING
from muster.protocol.version import MINE
from muster.transport import connections
from muster.transport.connections import ConnectionPool, Lost, Received

TOKEN = b"k" * 32
HELLO = ClientHello(version=MINE)


class Serving:
    """A pool that takes clients' messages after a hello, and a pool of clients."""

    def __init__(self):
        self.heard, self.gone, self.acts, self.answers = [], [], {}, []
        self.pool = ConnectionPool(
            token=TOKEN, greeting=reader_of(GREETING), channels={ClientHello: reader_of(FROM_CLIENT)}
        )
        self.clients = ConnectionPool(token=TOKEN)
        self.address = self.pool.listen("127.0.0.1")

    def turn(self, timeout_s=0.01):
        for event in self.pool.poll(timeout_s):
            if isinstance(event, Lost):
                self.gone.append(event.reason)
                continue
            self.heard.append(event.message)
            self.acts.get(type(event.message), lambda peer: None)(event.peer)

    def turn_of_clients(self):
        self.answers += [event.message for event in self.clients.poll(0.01) if isinstance(event, Received)]

    def client(self, *frames):
        peer = self.clients.connect(*self.address)
        peer.expect(reader_of(TO_CLIENT))
        for frame in frames:
            peer.session.send(frame if isinstance(frame, bytes) else encode(frame))
        for _ in range(20):
            self.turn_of_clients()
            self.turn()
        return peer


@pytest.fixture
def serving():
    found = Serving()
    yield found
    found.clients.shutdown()
    found.pool.shutdown()


def test_a_connection_is_narrowed_to_a_channel_even_for_what_has_come_with_the_hello(serving):
    serving.client(HELLO, StopRun(force=True), AskStatus())
    assert serving.heard == [HELLO, StopRun(force=True), AskStatus()] and not serving.gone


@pytest.mark.parametrize(
    ("frames", "reason"),
    [
        ([b"{}"], "not a message"),
        ([AskStatus()], "first message to the supervisor has no message ask_status"),
        ([HELLO, HELLO], "client to supervisor has no message client_hello"),
        ([HELLO, b'["stop_run",{"save":"no"}]', AskStatus()], "stop_run: save: Input should be a valid boolean"),
    ],
)
def test_a_frame_that_cannot_be_read_ends_its_connection_and_no_other(serving, frames, reason):
    serving.client(HELLO)
    serving.client(*frames)
    assert serving.gone == [reason]
    assert AskStatus() not in serving.heard, "nothing after it is read"
    serving.client(HELLO, RestartRun())
    assert serving.heard[-1] == RestartRun() and serving.gone == [reason]


def test_an_error_of_the_one_who_acts_is_his_own(serving):
    def fails(peer):
        raise Unreadable("a file of mine")

    serving.acts[StopRun] = fails
    with pytest.raises(Unreadable, match="a file of mine"):
        serving.client(HELLO, StopRun())


def test_who_is_dismissed_gets_the_last_word_whatever_he_still_says(serving):
    last = Refused(version=MINE, reason="no")
    serving.acts[ClientHello] = lambda peer: serving.pool.dismiss(peer, last)
    peer = serving.client(HELLO)
    for _ in range(50):
        serving.clients.send(peer, StopRun(source="x" * 100_000))
        serving.turn(0.0)
    for _ in range(20):
        serving.turn_of_clients()
        serving.turn()
    assert serving.answers == [last] and serving.heard == [HELLO]
    serving.clients.close(peer)
    for _ in range(20):
        serving.turn()
    assert serving.gone == ["connection closed"] and not serving.pool.peers


def test_a_frame_over_the_limit_is_not_waited_for(serving):
    peer = serving.clients.connect(*serving.address)
    for _ in range(10):
        serving.turn_of_clients()
        serving.turn()
    peer.sock.sendall(b"\xff\xff\xff\xff")
    for _ in range(5):
        serving.turn()
    assert len(serving.gone) == 1 and "over the limit" in serving.gone[0]


def test_who_does_not_know_the_token_says_nothing(serving):
    with socket.create_connection(serving.address) as sock:
        sock.sendall(b"x" * 200)
        for _ in range(5):
            serving.turn()
    assert not serving.heard and "token" in serving.gone[0]


def test_a_frame_behind_one_that_closed_its_connection_is_not_handled(serving):
    serving.acts[StopRun] = serving.pool.close
    serving.client(HELLO, StopRun(), AskStatus())
    assert serving.heard == [HELLO, StopRun()] and serving.gone == [], "who closed it knows"


def test_each_frame_is_handled_before_the_next_one_is_decoded(serving):
    """A message may change what its connection carries."""
    serving.acts[StopRun] = lambda peer: peer.expect(reader_of(GREETING))
    serving.client(HELLO, StopRun(), HELLO)
    assert serving.heard == [HELLO, StopRun(), HELLO] and not serving.gone


def test_what_an_event_closes_is_not_reported_ready_in_the_same_moment():
    """A program that prints and ends at once: its end closed the pipe, whose own event then ended the agent."""
    hub = ConnectionPool(token=b"k" * 32)
    pipes = {}
    for name in ("one", "other"):
        pipes[name] = os.pipe()
        os.write(pipes[name][1], b"x")
        hub.watch(pipes[name][0], name)
    ready = []
    for event in hub.poll(5.0):
        ready.append(event.token)
        for reader, writer in pipes.values():
            hub.unwatch(reader)
            os.close(reader)
            os.close(writer)
    assert len(ready) == 1
    hub.shutdown()


def test_a_peer_that_is_given_up_between_polls_is_lost_at_the_next_one(serving, monkeypatch):
    monkeypatch.setattr(connections, "BUFFER_LIMIT_BYTES", 1 << 20)
    serving.client(HELLO)
    (peer,) = serving.pool.peers
    while not peer.closed:
        serving.pool.send(peer, Refused(version=MINE, reason="x" * 100_000))
    serving.turn(5.0)
    assert len(serving.gone) == 1 and "does not read" in serving.gone[0]
