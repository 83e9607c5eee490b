"""A rank's connection to its agent: what it says with a step comes as one, and in silence nothing is said."""

import collections
import os
import subprocess
import threading
import time
from types import SimpleNamespace

import pytest
from fakes.peers import turn
from waiting import eventually

from muster.protocol.codec import reader_of
from muster.protocol.rank_agent import FROM_RANK, HOST_GREETING, TO_RANK, RankBeat, RankHello, RankProgress
from muster.protocol.values import RankEvent
from muster.rank import agent_connection
from muster.rank.agent_connection import AgentAddress, SocketAgentClient
from muster.transport.connections import ConnectionPool

TOKEN = b"k" * 32


class Agent:
    """Its end."""

    def __init__(self, path):
        self.heard, self.hellos, self.wakes, self.lives = [], [], 0, True
        self.pool = ConnectionPool(
            token=TOKEN, greeting=reader_of(HOST_GREETING), channels={RankHello: reader_of(FROM_RANK)}
        )
        self.pool.listen(f"unix:{path}")

    def shutdown(self):
        self.lives = False
        self.pool.shutdown()

    def turn(self, timeout_s):
        heard = []
        turn(self.pool, timeout_s, heard)
        self.hellos += [message for message in heard if isinstance(message, RankHello)]
        self.heard += [message for message in heard if not isinstance(message, RankHello)]

    def serve(self, for_s):
        until = time.monotonic() + for_s
        while (left := until - time.monotonic()) > 0:
            before = len(self.heard)
            self.turn(left)
            self.wakes += len(self.heard) > before

    def hear(self, count):
        eventually(lambda: (self.serve(0.02), len(self.heard) >= count)[1])


@pytest.fixture
def link(tmp_path):
    """An agent, and a rank that is connected to it."""
    agent = Agent(tmp_path / "agent.sock")
    address = AgentAddress(str(tmp_path / "agent.sock"), TOKEN, orphan_s=60.0, beat_every_s=0.2)
    hello = RankHello(pid=os.getpid(), attempt=1, rank=0, step=0)
    made = []

    def connect():
        made.append(address.connection(hello, reader_of(TO_RANK)))

    thread = threading.Thread(target=connect)
    thread.start()
    eventually(lambda: (agent.turn(0.01), agent.hellos)[1])
    thread.join()
    client = SocketAgentClient(made[0], address, attempt=1, rank=0)
    yield agent, client
    client.close()
    if agent.lives:
        agent.shutdown()


def test_in_silence_nothing_is_said_and_nobody_wakes(link):
    agent, client = link
    client.beat(1)
    agent.hear(1)
    waits, events = [], client._events
    client._events = SimpleNamespace(poll=lambda wait_s: (waits.append(wait_s), events.poll(wait_s))[1])
    client.beat(2)
    agent.hear(2)
    agent.serve(1.5)  # of seven intervals
    assert agent.heard == [RankBeat(step=1, micro=1), RankBeat(step=2, micro=2)]
    assert waits == [None]


def test_a_steps_event_and_the_beat_of_the_next_come_as_one(link):
    agent, client = link
    client.beat(1)
    agent.hear(1)
    real = client._wake
    client._wake = lambda: None
    client.emit("step", step=1, loss=1.0)
    client._wake = real
    client.beat(2)
    agent.wakes = 0
    agent.hear(3)
    event, beat = agent.heard[1:]
    assert isinstance(event, RankEvent) and beat == RankBeat(step=2, micro=2) and agent.wakes == 1


def test_micro_batches_of_a_long_step_are_told_now_and_then(link):
    agent, client = link
    for _ in range(50):
        client.beat(1)
        agent.serve(0.02)
    agent.serve(0.1)
    assert 3 <= len(agent.heard) <= 8 and [beat.step for beat in agent.heard] == [1] * len(agent.heard)
    assert agent.heard[-1].micro > 35


def test_a_long_save_goes_on_to_count_as_progress(link, monkeypatch):
    monkeypatch.setattr(agent_connection, "PROGRESS_EVERY_S", 0.05)
    agent, client = link
    client.progress(for_s=0.6)
    agent.hear(5)
    assert set(agent.heard) == {RankProgress(attempt=1, rank=0)}
    agent.serve(0.8)
    count = len(agent.heard)
    agent.serve(0.3)
    assert len(agent.heard) == count, "it has had its time"


def test_a_long_save_right_after_other_progress_counts_too(link, monkeypatch):
    monkeypatch.setattr(agent_connection, "PROGRESS_EVERY_S", 0.5)
    agent, client = link
    client.progress()
    agent.hear(1)
    agent.serve(0.1)  # its thread sleeps
    client.progress(for_s=60.0)
    agent.hear(3)


def queued(client, count):
    """Events, with nobody woken yet."""
    real = client._wake
    client._wake = lambda: None
    for number in range(count):
        client.emit("run.message", step=number, text="x" * 400)
    client._wake = real


def test_an_agent_that_takes_no_more_in_time_is_sent_little_a_second_time(link):
    agent, client = link
    queued(client, 4000)
    first = client._connection
    first.sock.settimeout(0.2)
    client._wake()
    eventually(lambda: client._connection is not first)
    eventually(lambda: (agent.serve(0.05), {event.step for event in events(agent)} == set(range(4000)))[1])
    assert len(events(agent)) - 4000 < 250, "two batches at most"


def events(agent):
    return [message for message in agent.heard if isinstance(message, RankEvent)]


def test_a_full_queue_drops_nothing_of_what_comes_while_it_is_sent(link):
    agent, client = link
    client._out = collections.deque(maxlen=10)
    queued(client, 10)
    real = client._connection.send_frames

    def slow(frames):
        client._connection.send_frames = real
        for number in (10, 11, 12):
            client.emit("run.message", step=number, text="")
        real(frames)

    client._connection.send_frames = slow
    client._wake()
    agent.hear(13)
    assert [event.step for event in agent.heard] == list(range(13))


def test_a_lost_connection_that_a_child_holds_open_wakes_nobody(link, tmp_path):
    """A script's own processes (a data loader's) inherit what is open."""
    agent, client = link
    client.beat(1)
    agent.hear(1)
    child = subprocess.Popen(["sleep", "60"], pass_fds=[client._connection.sock.fileno()])
    agent.shutdown()
    os.unlink(tmp_path / "agent.sock")
    successor = Agent(tmp_path / "agent.sock")
    eventually(lambda: (successor.serve(0.02), successor.heard)[1])
    waits, events = [], client._events
    client._events = SimpleNamespace(poll=lambda wait_s: (waits.append(wait_s), events.poll(wait_s))[1])
    client.beat(2)
    successor.hear(2)
    successor.serve(0.5)
    client._events = events
    child.kill()
    child.wait()
    client.close()
    successor.shutdown()
    assert len(waits) < 5


def test_a_new_agent_is_told_where_the_rank_is(link, tmp_path):
    agent, client = link
    client.beat(7)
    agent.hear(1)
    agent.shutdown()
    os.unlink(tmp_path / "agent.sock")
    successor = Agent(tmp_path / "agent.sock")
    eventually(lambda: (successor.serve(0.02), successor.heard)[1])
    assert successor.hellos[0].step == 7 and successor.heard == [RankBeat(step=7, micro=1)]
    client.close()
    successor.shutdown()


def test_a_rank_that_ends_while_its_agent_is_away_tells_the_successor(link, tmp_path):
    agent, client = link
    client.beat(1)
    agent.hear(1)
    agent.shutdown()
    os.unlink(tmp_path / "agent.sock")
    client.emit("step", step=2, loss=1.0)
    closing = threading.Thread(target=lambda: client.close(timeout_s=0.1))
    closing.start()
    closing.join(0.5)
    assert closing.is_alive(), "nobody else knows of its last step"
    successor = Agent(tmp_path / "agent.sock")
    eventually(lambda: (successor.serve(0.02), any(isinstance(each, RankEvent) for each in successor.heard))[1])
    closing.join(10)
    assert not closing.is_alive()
    successor.shutdown()
