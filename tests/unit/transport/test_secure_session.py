"""Sessions: a token proves itself, and nothing forged, replayed or reordered is taken."""

import pytest

from muster.core.errors import AccessError
from muster.transport.secure_session import Session, read_token

TOKEN = b"k" * 32


def joined(server_token=TOKEN, client_token=TOKEN):
    server, client = Session(server_token, server=True), Session(client_token, server=False)
    for _ in range(4):
        client.receive(server.outgoing())
        server.receive(client.outgoing())
    return server, client


def test_messages_pass_both_ways_in_order():
    server, client = joined()
    client.send({"t": "a", "n": 1})
    client.send({"t": "b", "text": "ü"})
    assert server.receive(client.outgoing()) == [{"t": "a", "n": 1}, {"t": "b", "text": "ü"}]
    server.send({"t": "c"})
    assert client.receive(server.outgoing()) == [{"t": "c"}]


def test_messages_sent_before_the_handshake_wait_for_it():
    server, client = Session(TOKEN, server=True), Session(TOKEN, server=False)
    client.send({"t": "early"})
    found = []
    for _ in range(4):
        client.receive(server.outgoing())
        found += server.receive(client.outgoing())
    assert found == [{"t": "early"}]


def test_bytes_may_arrive_one_by_one():
    server, client = joined()
    client.send({"t": "a"})
    found = []
    for byte in client.outgoing():
        found += server.receive(bytes([byte]))
    assert found == [{"t": "a"}]


def test_the_token_never_travels():
    server, client = Session(TOKEN, server=True), Session(TOKEN, server=False)
    seen = b""
    for _ in range(3):
        out = server.outgoing()
        seen += out
        client.receive(out)
        out = client.outgoing()
        seen += out
        server.receive(out)
    assert TOKEN not in seen


@pytest.mark.parametrize("wrong", ["server", "client"])
def test_a_wrong_token_is_refused_by_either_end(wrong):
    with pytest.raises(AccessError):
        joined(**{f"{wrong}_token": b"x" * 32})


def test_an_altered_a_replayed_and_a_reordered_frame_are_refused():
    server, client = joined()
    client.send({"t": "pay", "usd": 1})
    frame = bytearray(client.outgoing())
    frame[-3] ^= 1
    with pytest.raises(AccessError):
        server.receive(bytes(frame))

    server, client = joined()
    client.send({"t": "stop"})
    frame = client.outgoing()
    assert server.receive(frame)
    with pytest.raises(AccessError):
        server.receive(frame)

    server, client = joined()
    client.send({"t": "first"})
    first = client.outgoing()
    client.send({"t": "second"})
    with pytest.raises(AccessError):
        server.receive(client.outgoing() + first)


def test_a_frame_of_an_absurd_length_is_refused_before_it_is_read():
    server, _ = joined()
    with pytest.raises(AccessError, match="over the limit"):
        server.receive(b"\xff\xff\xff\xff")


def test_a_token_file_that_others_can_read_is_refused(tmp_path):
    path = tmp_path / "token"
    path.write_text("a" * 64)
    path.chmod(0o644)
    with pytest.raises(AccessError, match="can be read by others"):
        read_token(str(path))
    path.chmod(0o600)
    assert read_token(str(path)) == b"a" * 64
    with pytest.raises(AccessError, match="cannot read"):
        read_token(str(tmp_path / "absent"))
