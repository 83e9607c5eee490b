"""Whoever reaches a port may connect to it, and say nothing: what has to be done goes on meanwhile.

Real sockets: what is tested is how descriptors run out, and what the kernel does then.
"""

import contextlib
import os
import resource
import socket
import subprocess
import sys
import threading
import time

import pytest
from fakes.peers import turn
from waiting import eventually

from muster.core.errors import AccessError
from muster.protocol.client import FROM_CLIENT, AskStatus
from muster.protocol.codec import encode, reader_of
from muster.protocol.hello import ClientHello
from muster.protocol.to_supervisor import GREETING
from muster.protocol.version import MINE
from muster.transport import connections, listening, stream_server
from muster.transport.connections import ConnectionPool
from muster.transport.secure_session import Session
from muster.transport.stream import Stream
from muster.transport.stream_server import serve_streams, stop_serving

TOKEN = b"k" * 32
HELLO = ClientHello(version=MINE)


@pytest.fixture
def few_descriptors():
    """This process may open 80 more."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    highest = max(int(name) for name in os.listdir("/proc/self/fd"))
    gaps = [os.open("/dev/null", os.O_RDONLY)]
    while gaps[-1] < highest:
        gaps.append(os.open("/dev/null", os.O_RDONLY))
    resource.setrlimit(resource.RLIMIT_NOFILE, (gaps[-1] + 81, hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    for fd in gaps:
        os.close(fd)


@pytest.fixture
def sockets():
    """Makes sockets in a process of its own, which has descriptors of its own."""
    made = []

    def connect(address, count, word=b""):
        code = (
            "import resource as r, socket, sys, time\n"
            "r.setrlimit(r.RLIMIT_NOFILE, (r.getrlimit(r.RLIMIT_NOFILE)[1],) * 2)\n"
            "kept = []\n"
            "for _ in range(int(sys.argv[3])):\n"
            "    sock = socket.socket(); sock.settimeout(0.2); kept.append(sock)\n"
            "    try: sock.connect((sys.argv[1], int(sys.argv[2]))); sock.sendall(sys.argv[4].encode())\n"
            "    except OSError: pass\n"
            "print('there', flush=True); time.sleep(600)\n"
        )
        child = subprocess.Popen(
            [sys.executable, "-c", code, address[0], str(address[1]), str(count), word.decode()], stdout=subprocess.PIPE
        )
        made.append(child)
        assert child.stdout.readline() == b"there\n"
        return child

    yield connect
    for child in made:
        child.kill()
        child.wait()
        child.stdout.close()


class Serving:
    """A pool that hears clients, run by a thread of its own."""

    def __init__(self, hello_s=5.0):
        self.heard, self.gone, self.rounds, self._over = [], [], 0, False
        self.pool = ConnectionPool(
            token=TOKEN,
            greeting=reader_of(GREETING),
            channels={ClientHello: reader_of(FROM_CLIENT)},
            hello_s=hello_s,
        )
        self.address = self.pool.listen("127.0.0.1")
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self):
        while not self._over:
            self.rounds += 1
            heard = []
            turn(self.pool, 0.05, heard, self.gone)
            self.heard += [message for message in heard if not isinstance(message, ClientHello)]

    def end(self):
        self._over = True
        self._thread.join()
        self.pool.shutdown()


@pytest.fixture
def serving():
    made = []

    def make(**changes):
        made.append(Serving(**changes))
        return made[-1]

    yield make
    for each in made:
        each.end()


@contextlib.contextmanager
def no_descriptor_left():
    """This process cannot open anything more (with ``few_descriptors``)."""
    own = []
    try:
        with pytest.raises(OSError, match="Too many open files"):
            while True:
                own.append(os.open("/dev/null", os.O_RDONLY))
        yield
    finally:
        for fd in own:
            os.close(fd)


def say(address, *messages, timeout_s=10.0):
    """As a client that knows the token; the open stream."""
    stream = Stream(
        socket.create_connection(address, timeout=timeout_s), TOKEN, server=False, decode=bytes, timeout_s=timeout_s
    )
    for message in messages:
        stream.send(message)
    return stream


def test_silent_connections_take_no_descriptor_that_the_process_needs(serving, sockets, few_descriptors):
    there = serving()
    sockets(there.address, 300)
    eventually(lambda: len(there.gone) > 150)
    own = [os.open("/dev/null", os.O_RDONLY) for _ in range(listening.RESERVE // 2)]  # a lease, a log, a run file
    for fd in own:
        os.close(fd)
    stream = say(there.address, HELLO, AskStatus())
    eventually(lambda: there.heard == [AskStatus()])
    stream.close()


def test_without_any_descriptor_it_neither_spins_nor_stops_listening(serving, few_descriptors):
    there = serving()
    client = socket.socket()
    client.settimeout(10.0)
    with no_descriptor_left():
        client.connect(there.address)
        time.sleep(0.2)
        before = there.rounds
        time.sleep(0.5)
        spun = there.rounds - before
    assert spun < 60, "the listener is left alone for a moment each time"
    stream = Stream(client, TOKEN, server=False, decode=bytes)
    stream.send(HELLO)
    stream.send(AskStatus())
    eventually(lambda: there.heard == [AskStatus()])
    stream.close()


def test_who_does_not_prove_the_token_in_time_is_dropped_however_slowly_it_drips(serving):
    there = serving(hello_s=0.4)
    with socket.create_connection(there.address) as silent, socket.create_connection(there.address) as drip:
        until = time.monotonic() + 20
        while len(there.gone) < 2 and time.monotonic() < until:
            try:
                drip.sendall(b"x")
            except OSError:
                pass
            time.sleep(0.05)
        silent.settimeout(5.0)
        assert silent.recv(100) and silent.recv(1) == b""
    assert there.gone == ["did not prove that it knows the run's token within 0.4 s"] * 2


def test_who_knows_the_token_and_says_nothing_is_dropped_and_who_has_spoken_stays(serving):
    there = serving(hello_s=0.4)
    quiet, spoken = say(there.address), say(there.address, HELLO)
    eventually(lambda: there.gone == ["did not speak within 0.4 s"])
    time.sleep(0.8)
    spoken.send(AskStatus())
    eventually(lambda: there.heard == [AskStatus()])
    assert len(there.gone) == 1
    quiet.close()
    spoken.close()


def test_a_server_that_does_not_prove_the_token_is_no_server():
    """Another program has the port of one that died."""
    gone = []
    with socket.create_server(("127.0.0.1", 0)) as silent:
        pool = ConnectionPool(token=TOKEN, hello_s=0.2)
        pool.connect(*silent.getsockname())
        until = time.monotonic() + 20
        while not gone and time.monotonic() < until:
            turn(pool, None, [], gone)
        pool.shutdown()
    assert gone == ["did not prove that it knows the run's token within 0.2 s"]


def test_a_true_peer_comes_through_a_flood(serving, monkeypatch):
    """1,000 connections a second and more, none of which says anything."""
    monkeypatch.setattr(connections, "MOST_STRANGERS", 64)
    there, over = serving(), threading.Event()
    opened = []

    def flood():
        kept = []
        while not over.is_set():
            sock = socket.socket()
            sock.setblocking(False)
            sock.connect_ex(there.address)
            kept.append(sock)
            opened.append(None)
            if len(kept) > 100:
                kept.pop(0).close()
            time.sleep(0.0005)
        for sock in kept:
            sock.close()

    thread = threading.Thread(target=flood)
    thread.start()
    try:
        eventually(lambda: len(opened) > 300)
        for count in range(1, 6):
            stream = say(there.address, HELLO, AskStatus(), timeout_s=20.0)
            eventually(lambda count=count: len(there.heard) == count)
            stream.close()
    finally:
        over.set()
        thread.join()
    assert len(there.pool._strangers) <= 64


def test_of_silent_connections_there_are_so_many_at_most_whatever_room_there_is(serving, monkeypatch):
    monkeypatch.setattr(connections, "STRANGERS", 4)
    monkeypatch.setattr(connections, "MOST_STRANGERS", 8)
    there, seen = serving(), []
    with contextlib.ExitStack() as kept:
        for _ in range(40):
            kept.enter_context(socket.create_connection(there.address))
        kept.enter_context(contextlib.closing(say(there.address, HELLO, AskStatus(), timeout_s=20.0)))
        eventually(lambda: seen.append(len(there.pool._strangers)) or there.heard)
    assert 1 < max(seen) <= 8, "the oldest goes for a new one"


def test_a_pause_of_the_process_itself_is_nobodys_silence():
    heard, gone = [], []
    pool = ConnectionPool(token=TOKEN, greeting=reader_of(GREETING), hello_s=0.2)
    with socket.create_connection(pool.listen("127.0.0.1")) as sock:
        session = Session(TOKEN, server=False)
        turn(pool, 1.0, heard, gone)  # accepted, and asked for the proof
        session.frames(sock.recv(100))
        sock.sendall(session.outgoing())
        time.sleep(0.5)  # stopped
        turn(pool, 1.0, heard, gone)
        session.frames(sock.recv(100))
        session.send(encode(HELLO))
        sock.sendall(session.outgoing())
        for _ in range(10):
            turn(pool, 0.01, heard, gone)
    pool.shutdown()
    assert heard == [HELLO] and not gone


# ------------------------------------------------------------ blocking streams


class Echo:
    """Answers each message with itself."""

    def __init__(self):
        self.log = []
        self.listener = listening.listen_on("127.0.0.1")
        self.address = self.listener.getsockname()[:2]
        self.thread = threading.Thread(target=self._serve, daemon=True)
        self.thread.start()

    def _serve(self):
        serve_streams(self.listener, TOKEN, self._talk, decode=bytes, peer="a peer", log=self.log.append)

    def _talk(self, stream):
        stream.receive()
        stream.send(AskStatus())

    def answers(self):
        stream = say(self.address, HELLO)
        answer = stream.receive()
        stream.close()
        return answer == encode(AskStatus())


@pytest.fixture
def echo():
    made = Echo()
    yield made
    stop_serving(made.listener)
    made.thread.join(10)
    assert not made.thread.is_alive(), "it ends with its listener"


def test_a_listener_that_served_leaves_its_port_and_answers_nobody():
    """Without its thread: closing alone leaves it, and the port, to the thread that waits in accept."""
    made = Echo()
    assert made.answers()
    stop_serving(made.listener)
    made.thread.join(10)
    assert not made.thread.is_alive()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(made.address)
    stop_serving(made.listener)  # twice is once


def test_streams_are_served_whoever_else_is_connected(echo, sockets, few_descriptors):
    child = sockets(echo.address, 300)
    assert echo.answers()
    names = [thread.name for thread in threading.enumerate() if "answer" in thread.name]
    eventually(lambda: sum("answer" in thread.name for thread in threading.enumerate()) <= stream_server.STRANGERS + 1)
    assert len(names) <= stream_server.STRANGERS + 8
    child.kill()
    child.wait()
    eventually(lambda: not any("answer" in thread.name for thread in threading.enumerate()))


def test_streams_are_served_again_once_there_are_descriptors(echo, few_descriptors):
    """The first of them is no proof: Linux gives a descriptor to an accept before it waits."""
    clients = [socket.socket() for _ in range(3)]
    with no_descriptor_left():
        for client in clients:
            client.settimeout(10.0)
            client.connect(echo.address)
        time.sleep(0.2)
    for client in clients:
        stream = Stream(client, TOKEN, server=False, decode=bytes)
        stream.send(HELLO)
        assert stream.receive() == encode(AskStatus())
        stream.close()


def test_streams_are_served_again_once_there_are_threads(echo, monkeypatch):
    start = threading.Thread.start

    def refuse(thread):
        monkeypatch.setattr(threading.Thread, "start", start)
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    with pytest.raises((AccessError, OSError)):
        echo.answers()
    assert echo.answers()


def test_a_handshake_has_one_deadline_however_slowly_it_drips():
    ours, theirs = socket.socketpair()
    over = threading.Event()

    def drip():
        while not over.wait(0.05):
            theirs.sendall(b"x")

    thread = threading.Thread(target=drip)
    thread.start()
    begun = time.monotonic()
    with pytest.raises(TimeoutError):
        Stream(ours, TOKEN, server=True, decode=bytes, handshake_s=0.3)
    took_s = time.monotonic() - begun
    over.set()
    thread.join()
    ours.close()
    theirs.close()
    assert took_s < 2.5, "64 bytes at this pace would take over three seconds"


def test_strangers_fill_no_log(echo, sockets):
    sockets(echo.address, 100, b"x" * 64)
    assert echo.answers()
    eventually(lambda: len(echo.log) == 1)
    assert "did not prove to be a peer: 1, the last: a connection did not prove" in echo.log[0]


# ------------------------------------------------------------ the limit


def test_a_program_raises_its_soft_limit_as_far_as_it_may():
    code = (
        "import resource as r, sys\n"
        "from muster.transport.listening import raise_soft_limit\n"
        "r.setrlimit(r.RLIMIT_NOFILE, (256, int(sys.argv[1])))\n"
        "raise_soft_limit(); raise_soft_limit()\n"
        "print(*r.getrlimit(r.RLIMIT_NOFILE))\n"
    )
    hard = min(resource.getrlimit(resource.RLIMIT_NOFILE)[1], 4096)
    done = subprocess.run([sys.executable, "-c", code, str(hard)], capture_output=True, text=True, check=True)
    assert done.stdout.split() == [str(hard), str(hard)]
