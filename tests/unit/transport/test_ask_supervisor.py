"""A client's question, and the answers that it can get."""

import socket
import threading
from contextlib import contextmanager

import pytest
from fakes import supervisor_words

from muster.core.errors import AccessError
from muster.core.typed_json import Unreadable
from muster.protocol.client import FROM_CLIENT, StopRun
from muster.protocol.codec import encode, reader_of
from muster.protocol.hello import ClientHello, Refused
from muster.protocol.to_supervisor import GREETING
from muster.protocol.version import MINE, OtherVersion, Version
from muster.transport.client import ask_supervisor
from muster.transport.stream import Stream

TOKEN = b"k" * 32


@contextmanager
def answering(answer, token=TOKEN):
    """A supervisor that says ``answer`` (bytes) to a hello and a message; gives its address and what it was told."""
    told = []

    def serve():
        sock, _ = server.accept()
        with sock:
            try:
                stream = Stream(sock, token, server=True, decode=bytes, timeout_s=10.0)
                told.append(reader_of(GREETING)(stream.receive()))
                told.append(reader_of(FROM_CLIENT)(stream.receive()))
                if answer is not None:
                    stream.session.send(answer)
                    sock.sendall(stream.session.outgoing())
                    sock.recv(1)
            except (AccessError, OSError):
                pass

    with socket.create_server(("127.0.0.1", 0)) as server:
        thread = threading.Thread(target=serve)
        thread.start()
        yield server.getsockname()[:2], told
        thread.join()


def test_the_answer():
    status = supervisor_words.status("run", step=7, hosts=[("host-0", True)])
    with answering(encode(status)) as (address, told):
        assert ask_supervisor(address, TOKEN, StopRun(force=True)) == status
    assert told == [ClientHello(version=MINE), StopRun(force=True)]


def test_a_supervisor_of_another_version_is_named():
    other = Version(protocol=MINE.protocol + 1, muster="9.9.9")
    with answering(encode(Refused(version=other, reason="the supervisor speaks x, a client speaks y"))) as (address, _):
        with pytest.raises(OtherVersion, match="the supervisor speaks x, a client speaks y") as refusal:
            ask_supervisor(address, TOKEN, StopRun())
    assert refusal.value.exit_code == 2


@pytest.mark.parametrize("answer", [b"", b"{}", b'["refused",{}]', encode(StopRun())])
def test_an_answer_that_is_none(answer):
    with answering(answer) as (address, _), pytest.raises(Unreadable):
        ask_supervisor(address, TOKEN, StopRun())


def test_no_answer():
    with answering(None) as (address, _), pytest.raises(ConnectionError):
        ask_supervisor(address, TOKEN, StopRun())
    with socket.create_server(("127.0.0.1", 0)) as silent, pytest.raises(TimeoutError):
        ask_supervisor(silent.getsockname()[:2], TOKEN, StopRun(), timeout_s=0.1)


def test_a_supervisor_of_another_run():
    with answering(None, token=b"x" * 32) as (address, _), pytest.raises((AccessError, ConnectionError)):
        ask_supervisor(address, TOKEN, StopRun())
