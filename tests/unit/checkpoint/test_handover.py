"""A rank waits for a replicator that answers, and for no other."""

import os
import socket
import threading
import time

import pytest

from muster.checkpoint import handover
from muster.checkpoint.handover import Handover, ReplicatorLost
from muster.core.types import Checksum
from muster.protocol.codec import reader_of
from muster.protocol.handover import TO_WRITER, Written
from muster.protocol.replicator_peers import Go
from muster.transport.stream import Stream

TOKEN = b"t" * 32


@pytest.fixture
def listener(tmp_path, monkeypatch):
    monkeypatch.setattr(handover, "TAKEN_S", 0.3)
    with socket.socket(socket.AF_UNIX) as sock:
        sock.bind(str(tmp_path / "sock"))
        sock.listen(1)
        yield sock


@pytest.fixture
def share():
    fd = os.memfd_create("share")
    os.pwrite(fd, b"x" * 64, 0)
    yield fd
    os.close(fd)


def hand_over(listener, fd):
    return Handover(address=listener.getsockname(), token=TOKEN).write("file:///there/shard", b"ab", fd, 64)


def test_a_replicator_that_accepts_and_says_nothing_is_lost_in_time(listener, share):
    begun = time.monotonic()
    with pytest.raises(ReplicatorLost):
        hand_over(listener, share)
    assert time.monotonic() - begun < 10


@pytest.mark.parametrize("takes", [False, True], ids=["takes nothing", "writes long"])
def test_the_time_to_take_a_share_is_limited_and_the_time_to_write_it_is_not(listener, share, takes):
    over = threading.Event()

    def serve():
        sock, _ = listener.accept()
        with sock:
            stream = Stream(sock, TOKEN, server=True, decode=reader_of(TO_WRITER))
            request = stream.receive()
            if not takes:
                over.wait(30)
                return
            stream.send(Go())
            os.close(stream.receive_file())
            stream.receive_bytes(memoryview(bytearray(request.preamble_bytes)))
            time.sleep(0.6)
            stream.send(Written(bytes=66, checksum=Checksum(value="0" * 16)))

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        if takes:
            assert hand_over(listener, share).bytes == 66
        else:
            with pytest.raises(ReplicatorLost):
                hand_over(listener, share)
    finally:
        over.set()
        thread.join()
