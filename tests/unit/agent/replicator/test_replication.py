"""What a replicator does with a version that did not arrive: overwritten on the way, or found damaged."""

import os
import socket
import subprocess
import sys
import threading

import pytest
from fakes.replicators import serving

from muster.agent.replicator import main, replication
from muster.agent.replicator.main import Replicator
from muster.agent.replicator.replication import SnapshotSender, decode_peer
from muster.checkpoint_format import snapshot_ring
from muster.checkpoint_format.snapshot_ring import Ring, file_name
from muster.protocol.replicator_orders import CopyTo
from muster.protocol.replicator_peers import Go, Got, Held, PushVersion, Torn, Whole
from muster.transport.stream import Stream

KEY = "r1s2t1p1c1e1"


#: stdout is replaced while a message is written to it, by what would be another thread, and nobody else holds it.
REPLACED = """
import pathlib, sys
from muster.agent.replicator.main import Replicator
from muster.protocol.replicator_orders import LogNote

class Out:
    def write(self, text):
        sys.stdout = sys.__stdout__
        sys.stderr.write(text)
    def flush(self):
        sys.stderr.write("flushed")

replicator = Replicator(memory=pathlib.Path(), token=b"token", bind="127.0.0.1")
sys.stdout = Out()
replicator.send(LogNote(text="words"))
"""


def test_a_stdout_that_is_replaced_meanwhile_gets_the_whole_message():
    """Python's debug allocator fills freed memory: print() with a ``sys.stdout`` that nobody holds is a SIGSEGV."""
    env = {**os.environ, "PYTHONMALLOC": "debug"}
    ran = subprocess.run([sys.executable, "-c", REPLACED], env=env, capture_output=True, text=True, timeout=120)
    assert (ran.returncode, ran.stderr) == (0, '["log_note",{"text":"words"}]\nflushed')


@pytest.fixture
def ring(tmp_path):
    made = Ring.create(tmp_path / file_name("own", KEY, 0), header=b"{}", slot_bytes=64)
    made.commit(made.begin(), step=7, attempt=1, rank=0)
    yield made
    made.close()


def test_after_a_torn_copy_the_next_one_goes_over_a_connection_of_its_own(ring, monkeypatch):
    """The receiver has closed the first one."""
    connections = []

    def serve(sock, torn):
        with sock:
            stream = Stream(sock, b"token", server=True, decode=decode_peer)
            assert isinstance(stream.receive(), PushVersion)
            stream.send(Go())
            stream.receive_bytes(memoryview(bytearray(64)))
            if torn:
                ring.drop(ring.find(7, 1))
            stream.send(Got())
            assert isinstance(stream.receive(), Torn if torn else Whole)
            if not torn:
                stream.send(Held())

    def connect(address, token):
        ours, theirs = socket.socketpair()
        thread = threading.Thread(target=serve, args=(theirs, not connections))
        connections.append(thread)
        thread.start()
        return Stream(ours, token, server=False, decode=decode_peer)

    monkeypatch.setattr(replication, "connect", connect)
    sender = SnapshotSender(ring.path, "copy", peer=("", 1), attempt=1, token=b"token")
    ring.request_copy(ring.find(7, 1))
    sender._send()
    next_one = ring.commit(ring.begin(), step=8, attempt=1, rank=0)
    ring.request_copy(next_one)
    sender._send()
    sender._disconnect()
    for thread in connections:
        thread.join(10)
    assert len(connections) == 2 and ring.copied() == (8, 1)


@pytest.mark.parametrize("damaged", [True, False])
def test_a_version_that_was_overwritten_meanwhile_is_not_called_damaged(ring, tmp_path, monkeypatch, damaged):
    monkeypatch.setattr(main.Replicator, "send", lambda replicator, message: said.append(message))
    said = []
    version = ring.find(7, 1)
    if damaged:
        ring.slot(version.slot)[5] ^= 4
    else:
        ring.drop(version)
    replicator = Replicator(memory=tmp_path, token=b"token", bind="127.0.0.1")
    replicator._reject(ring, version, "on arrival")
    replicator.close()
    assert [copy.step for message in said for copy in message.copies] == ([7] if damaged else [])
    assert ring.versions() == []


@pytest.mark.parametrize("copies_of", [(0,), (0, 5)])
def test_copies_of_former_partners_make_room_for_those_of_the_attempt(ring, tmp_path, monkeypatch, copies_of):
    memory = tmp_path / "peer"
    memory.mkdir()
    former = memory / file_name("peer", KEY, 5)
    Ring.create(former, header=b"{}", slot_bytes=64).close()
    monkeypatch.setattr(snapshot_ring, "_free", lambda folder: 0 if former.exists() else 1 << 20)
    with serving(memory, b"token") as replicator:
        replicator.handle(CopyTo(attempt=2, peer=None, layout=KEY, ranks=(3,), copies_of=copies_of))
        copy = file_name("peer", KEY, 0)
        sender = SnapshotSender(ring.path, copy, peer=replicator.address, attempt=2, token=b"token")
        ring.request_copy(ring.find(7, 1))
        sender._send()
        sender._disconnect()
    assert former.exists() == (5 in copies_of)
    assert (ring.copied() == (7, 1)) == (5 not in copies_of)
