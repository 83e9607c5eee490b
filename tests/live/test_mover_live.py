"""Movers over real sockets: copies arrive whole or not at all, and only from those who know the token."""

import socket
import threading
import time

import pytest

from muster.agent.mover import Mover, Stream
from muster.core.errors import AccessError, CheckpointError
from muster.core.ring import Ring, file_name

pytestmark = [pytest.mark.live, pytest.mark.timeout(60)]

TOKEN = b"t" * 64
KEY = "r1s2t1"


@pytest.fixture
def movers(tmp_path):
    found = []
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        mover = Mover(memory=tmp_path / name, token=TOKEN, bind="127.0.0.1")
        for target in (mover.serve, mover.push_loop):
            threading.Thread(target=target, daemon=True).start()
        found.append(mover)
    return found


def write(mover, rank, step, byte, size=3_000_000):
    ring = Ring.create(mover.memory / file_name("own", KEY, rank), header=b'{"tensors":[]}', slot_bytes=size)
    slot = ring.begin()
    ring.slot(slot)[:] = bytes([byte]) * size
    ring.commit(slot, step=step, attempt=1)
    return ring


def eventually(condition):
    until = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < until, "not within 10 s"
        time.sleep(0.01)


def versions(path):
    try:
        return [(version.step, version.attempt) for version in Ring.open(path).versions()]
    except CheckpointError:
        return []


def test_each_step_is_copied_to_the_peer_and_acknowledged(movers):
    a, b = movers
    ring = write(a, 0, 5, 7)
    a.obey({"do": "peers", "peer": b.address, "layout": KEY, "ranks": [0]})
    a.obey({"do": "copy", "step": 5})
    copy = b.memory / file_name("peer", KEY, 0)
    eventually(lambda: versions(copy) == [(5, 1)])
    eventually(lambda: ring.copied() == (5, 1))
    held = Ring.open(copy)
    assert bytes(held.slot(held.versions()[0].slot)[:3]) == b"\x07\x07\x07"
    write(a, 0, 6, 8)
    a.obey({"do": "copy", "step": 6})
    eventually(lambda: versions(copy) == [(6, 1), (5, 1)])


def test_a_fetched_version_appears_under_its_name_when_it_is_whole(movers):
    a, b = movers
    write(a, 1, 9, 3)
    order = {
        "do": "fetch",
        "address": a.address,
        "file": file_name("own", KEY, 1),
        "target": file_name("fetched", KEY, 1),
        "step": 9,
        "attempt": 1,
    }
    b.fetch(order)
    assert versions(b.memory / order["target"]) == [(9, 1)]
    with pytest.raises(CheckpointError, match="no longer there"):
        b.fetch({**order, "step": 10})


def test_a_version_overwritten_while_it_is_sent_is_not_committed(movers):
    a, b = movers
    ring = write(a, 0, 5, 7)
    sock = socket.create_connection(tuple(b.address))
    stream = Stream(sock, TOKEN, server=False)
    stream.send({"t": "push", "file": file_name("peer", KEY, 0), "header": "{}", "slot_bytes": ring.slot_bytes,
                 "step": 5, "attempt": 1})  # fmt: skip
    assert stream.receive()["t"] == "go"
    crc = stream.send_bytes(ring.slot(ring.versions()[0].slot))
    stream.receive()
    stream.send({"t": "torn", "crc": crc})
    time.sleep(0.2)
    assert versions(b.memory / file_name("peer", KEY, 0)) == []


def test_a_damaged_copy_is_not_committed(movers):
    a, b = movers
    ring = write(a, 0, 5, 7)
    sock = socket.create_connection(tuple(b.address))
    stream = Stream(sock, TOKEN, server=False)
    stream.send({"t": "push", "file": file_name("peer", KEY, 0), "header": "{}", "slot_bytes": ring.slot_bytes,
                 "step": 5, "attempt": 1})  # fmt: skip
    assert stream.receive()["t"] == "go"
    crc = stream.send_bytes(ring.slot(ring.versions()[0].slot))
    stream.receive()
    stream.send({"t": "whole", "crc": crc ^ 1})
    time.sleep(0.2)
    assert versions(b.memory / file_name("peer", KEY, 0)) == []


def test_strangers_and_paths_are_refused(movers, tmp_path):
    a, _ = movers
    with pytest.raises((AccessError, ConnectionError)):
        Stream(socket.create_connection(tuple(a.address)), b"x" * 64, server=False)
    (tmp_path / "secret").write_text("not yours")
    stream = Stream(socket.create_connection(tuple(a.address)), TOKEN, server=False)
    stream.send({"t": "read", "file": "../secret", "step": 0, "attempt": 0})
    with pytest.raises(ConnectionError):
        stream.receive()
