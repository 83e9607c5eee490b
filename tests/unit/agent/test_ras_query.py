"""NCCL's RAS, asked without ever waiting. Played by a socket that is silent, slow, cut, huge, or another's.

The protocol as NCCL's ``src/ras/client.cc`` speaks it: a real one answers only after the client has named its own.
"""

import socket
import threading

import pytest
from fakes.hang_captures import RAS_TEXT

from muster.agent.evidence import ras_query
from muster.agent.evidence.ras_query import ask
from muster.health.hang import ras


@pytest.fixture
def played():
    """A function that serves one client with ``script(lines in, socket)``; the address for NCCL_RAS_ADDR."""
    servers = []

    def serve(script):
        server = socket.create_server(("127.0.0.1", 0))
        servers.append(server)

        def run():
            client, _ = server.accept()
            with client, client.makefile("r") as lines:
                assert lines.readline() == "CLIENT PROTOCOL 2\n"
                script(lines, client)

        threading.Thread(target=run, daemon=True).start()
        return {"NCCL_RAS_ADDR": f"127.0.0.1:{server.getsockname()[1]}"}

    yield serve
    for server in servers:
        server.close()


def answering(text, *, protocol=2):
    def script(lines, client):
        client.sendall(f"SERVER PROTOCOL {protocol}\n".encode())
        assert lines.readline() == "VERBOSE STATUS\n"
        for start in range(0, len(text), 700):
            client.sendall(text[start : start + 700].encode())

    return script


@pytest.mark.parametrize("protocol", [2, 3])
def test_a_report_in_pieces(played, protocol):
    report, problem = ask(played(answering(RAS_TEXT, protocol=protocol)), limit_s=20.0)
    assert (report, problem) == (RAS_TEXT, "")


def test_one_that_is_cut_is_told_and_not_complete(played):
    report, _ = ask(played(answering(RAS_TEXT[: RAS_TEXT.index("Warnings")])), limit_s=20.0)
    assert not ras.parse(report).complete


def test_a_silent_one_costs_the_limit_and_no_more(played):
    held = threading.Event()
    report, problem = ask(played(lambda lines, client: held.wait(20)), limit_s=0.2)
    held.set()
    assert (report, problem) == ("", "NCCL's RAS: does not answer")


def test_what_a_slow_one_has_said_by_then_is_kept(played):
    held = threading.Event()

    def slow(lines, client):
        answering(RAS_TEXT[:200])(lines, client)
        held.wait(20)

    report, problem = ask(played(slow), limit_s=0.5)
    held.set()
    assert problem == "NCCL's RAS: did not end in time" and RAS_TEXT.startswith(report)


def test_a_huge_one_is_left(played, monkeypatch):
    monkeypatch.setattr(ras_query, "MOST_BYTES", 10_000)

    def endless(lines, client):
        answering("")(lines, client)
        try:
            while True:
                client.sendall(b"x" * 5000)
        except OSError:
            pass

    report, problem = ask(played(endless), limit_s=20.0)
    assert len(report) == 10_000 and problem == "NCCL's RAS: is larger than 10000 bytes"


@pytest.mark.parametrize(
    ("said", "expected"),
    [(b"HTTP/1.1 400 Bad Request\n", "speaks another protocol"), (b"SERVER PRO", "closed the connection")],
)
def test_something_else_that_listens_there(played, said, expected):
    report, problem = ask(played(lambda lines, client: client.sendall(said)), limit_s=20.0)
    assert report == "" and expected in problem


@pytest.mark.parametrize(
    "environ",
    [{"NCCL_RAS_ENABLE": "0"}, {"NCCL_RAS_ADDR": "nonsense"}, {"NCCL_RAS_ADDR": "127.0.0.1:99999"},
     {"NCCL_RAS_ADDR": "127.0.0.1:1"}],
)  # fmt: skip
def test_without_one_nothing_is_missing(environ):
    assert ask(environ, 20.0) == ("", "")
