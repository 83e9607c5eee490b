"""A run of 1,000 hosts starts: all connect to the supervisor at once, twice each, while it is busy."""

import resource
import subprocess
import sys
import time

import pytest
from fakes.peers import turn

from muster.protocol.codec import reader_of
from muster.protocol.to_supervisor import GREETING
from muster.transport import connections
from muster.transport.connections import ConnectionPool

TOKEN = b"k" * 32

COME_AT_ONCE = """
import heapq, resource, selectors, socket, sys, time
from muster.protocol.codec import encode
from muster.protocol.hello import ClientHello
from muster.protocol.version import MINE
from muster.transport.secure_session import Session
resource.setrlimit(resource.RLIMIT_NOFILE, (resource.getrlimit(resource.RLIMIT_NOFILE)[1],) * 2)
selector, later = selectors.DefaultSelector(), []
for number in range(int(sys.argv[3])):
    sock = socket.socket()
    sock.setblocking(False)
    sock.connect_ex((sys.argv[1], int(sys.argv[2])))
    session = Session(bytes.fromhex(sys.argv[4]), server=False)
    session.send(encode(ClientHello(version=MINE)))
    selector.register(sock, selectors.EVENT_READ, session)
print("there", flush=True)
while True:
    for key, _ in selector.select(0.01):
        try:
            data = key.fileobj.recv(1000)
        except OSError:
            data = b""
        if not data:
            selector.unregister(key.fileobj)
            continue
        key.data.frames(data)
        heapq.heappush(later, (time.monotonic() + 0.05, id(key), key))
    while later and later[0][0] < time.monotonic():
        key = heapq.heappop(later)[2]
        key.fileobj.send(key.data.outgoing())
"""


@pytest.mark.parametrize("most", [64, 4096])
def test_two_thousand_true_peers_come_at_once_while_the_process_is_busy(most, monkeypatch):
    """None is sent away, though each takes a moment to answer."""
    monkeypatch.setattr(connections, "STRANGERS", 64)
    monkeypatch.setattr(connections, "MOST_STRANGERS", most)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    count = min(2000, hard - 200)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    gone = []

    class Heard(list):
        def append(self, hello):
            super().append(hello)
            if len(self) % 400 == 0:
                time.sleep(0.3)  # busy in between as well: what has come meanwhile is not silence

    heard = Heard()
    pool = ConnectionPool(token=TOKEN, greeting=reader_of(GREETING), hello_s=60.0)
    argv = [sys.executable, "-c", COME_AT_ONCE, *map(str, pool.listen("127.0.0.1")), str(count), TOKEN.hex()]
    child = subprocess.Popen(argv, stdout=subprocess.PIPE)
    try:
        assert child.stdout.readline() == b"there\n"
        time.sleep(1.0)
        until = time.monotonic() + 50
        while len(heard) < count and not gone and time.monotonic() < until:
            turn(pool, 0.1, heard, gone)
            assert len(pool._strangers) <= most
    finally:
        child.kill()
        child.wait()
        child.stdout.close()
        pool.shutdown(flush_s=0.01)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert gone == [] and len(heard) == count
