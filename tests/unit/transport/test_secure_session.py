"""Sessions: a token proves itself, and nothing forged, replayed or reordered is taken."""

import os
import socket
import threading

import pytest

from muster.core.errors import AccessError
from muster.transport.secure_session import Session, read_token
from muster.transport.stream import Stream

TOKEN = b"k" * 32


def joined(server_token=TOKEN, client_token=TOKEN):
    server, client = Session(server_token, server=True), Session(client_token, server=False)
    for _ in range(4):
        client.frames(server.outgoing())
        server.frames(client.outgoing())
    return server, client


def test_messages_pass_both_ways_in_order():
    server, client = joined()
    client.send(b"a")
    client.send("ü".encode())
    assert server.frames(client.outgoing()) == [b"a", "ü".encode()]
    server.send(b"c")
    assert client.frames(server.outgoing()) == [b"c"]


def test_messages_sent_before_the_handshake_wait_for_it():
    server, client = Session(TOKEN, server=True), Session(TOKEN, server=False)
    client.send(b"early")
    found = []
    for _ in range(4):
        client.frames(server.outgoing())
        found += server.frames(client.outgoing())
    assert found == [b"early"]


def test_bytes_may_arrive_one_by_one():
    server, client = joined()
    client.send(b"a")
    found = []
    for byte in client.outgoing():
        found += server.frames(bytes([byte]))
    assert found == [b"a"]


def test_the_token_never_travels():
    server, client = Session(TOKEN, server=True), Session(TOKEN, server=False)
    seen = b""
    for _ in range(3):
        out = server.outgoing()
        seen += out
        client.frames(out)
        out = client.outgoing()
        seen += out
        server.frames(out)
    assert TOKEN not in seen


@pytest.mark.parametrize("wrong", ["server", "client"])
def test_a_wrong_token_is_refused_by_either_end(wrong):
    with pytest.raises(AccessError):
        joined(**{f"{wrong}_token": b"x" * 32})


def test_an_altered_a_replayed_and_a_reordered_frame_are_refused():
    server, client = joined()
    client.send(b"pay 1")
    frame = bytearray(client.outgoing())
    frame[-3] ^= 1
    with pytest.raises(AccessError):
        server.frames(bytes(frame))

    server, client = joined()
    client.send(b"stop")
    frame = client.outgoing()
    assert server.frames(frame)
    with pytest.raises(AccessError):
        server.frames(frame)

    server, client = joined()
    client.send(b"first")
    first = client.outgoing()
    client.send(b"second")
    with pytest.raises(AccessError):
        server.frames(client.outgoing() + first)


def test_a_frame_of_an_absurd_length_is_refused_before_it_is_read():
    server, _ = joined()
    with pytest.raises(AccessError, match="over the limit"):
        server.frames(b"\xff\xff\xff\xff")


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
    (tmp_path / "link").symlink_to(path)
    with pytest.raises(AccessError, match="cannot read"):
        read_token(str(tmp_path / "link"))


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file away")
def test_another_users_token_is_refused(tmp_path):
    path = tmp_path / "token"
    path.write_text("a" * 64)
    path.chmod(0o600)
    os.chown(path, 12345, 12345)
    with pytest.raises(AccessError, match="belongs to another user"):
        read_token(str(path))
    os.chown(tmp_path, 12345, 12345)  # as on a share where every file is one user's
    assert read_token(str(path)) == b"a" * 64


def test_frames_are_authenticated_and_can_be_read_on_the_wire():
    """What SECURITY.md says; once they are encrypted, it says so."""
    server, client = joined()
    client.send(b"a message")
    wire = client.outgoing()
    assert b"a message" in wire
    with pytest.raises(AccessError, match="MAC"):
        server.frames(wire.replace(b"a message", b"A message"))


def test_raw_bytes_travel_as_they_are():
    """Snapshots between replicators: SECURITY.md says who can change them."""
    ours, theirs = socket.socketpair()
    made = []
    thread = threading.Thread(target=lambda: made.append(Stream(theirs, TOKEN, server=True, decode=bytes)))
    thread.start()
    stream = Stream(ours, TOKEN, server=False, decode=bytes)
    thread.join()
    stream.send_bytes(memoryview(b"weights"))
    assert theirs.recv(100) == b"weights"
    ours.close()
    theirs.close()
