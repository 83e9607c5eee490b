"""A watchdog's heartbeat goes to the run's supervisor, and to no other program that has its port."""

import os
import socket
import threading

from fakes.peers import turn
from waiting import eventually

from muster.agent import heartbeat
from muster.agent.heartbeat import HeartbeatSender
from muster.core.heartbeat_timing import HeartbeatTiming
from muster.core.typed_json import encode
from muster.protocol.codec import reader_of
from muster.protocol.hello import BeatHello
from muster.protocol.lease import LeaseRecord
from muster.protocol.to_supervisor import FROM_WATCHDOG, GREETING
from muster.protocol.version import MINE
from muster.transport.connections import ConnectionPool

TOKEN = b"k" * 32


def write_lease(folder, address):
    record = LeaseRecord(
        version=MINE, term=1, address=address, pid=1, machine="there", boot_id="", expires_wall_ns=1, expires_mono_ns=1
    )
    (folder / "lease.json").write_bytes(encode(record))


def test_a_stranger_on_a_dead_supervisors_port_does_not_keep_the_heartbeat(tmp_path, monkeypatch):
    monkeypatch.setattr(heartbeat, "HELLO_S", 0.3)
    heard, read, write = [], *os.pipe()
    pool = ConnectionPool(token=TOKEN, greeting=reader_of(GREETING))
    sender = HeartbeatSender(run_dir=tmp_path, host="host-0", token=TOKEN, timing=HeartbeatTiming(0.2))
    with socket.create_server(("127.0.0.1", 0)) as stranger:
        write_lease(tmp_path, stranger.getsockname())
        thread = threading.Thread(target=sender.send_until, args=(read,), daemon=True)
        thread.start()
        kept, _ = stranger.accept()
        write_lease(tmp_path, pool.listen("127.0.0.1"))

        def says_hello():
            turn(pool, 0.05, heard)
            return heard

        eventually(says_hello)
        kept.close()
    os.close(write)
    thread.join()
    os.close(read)
    pool.shutdown()
    assert isinstance(heard[0], BeatHello) and heard[0].host == "host-0"


def test_beats_made_ahead_are_of_the_connection_that_they_are_sent_by(tmp_path, monkeypatch):
    """A supervisor's successor gets none that was authenticated for its predecessor."""
    monkeypatch.setattr(heartbeat, "AHEAD", 20)
    read, write = os.pipe()
    sender = HeartbeatSender(run_dir=tmp_path, host="host-0", token=TOKEN, timing=HeartbeatTiming(0.04))
    thread = threading.Thread(target=sender.send_until, args=(read,), daemon=True)
    for term in range(2):
        heard, refused = [], []
        channels = {BeatHello: reader_of(FROM_WATCHDOG)}
        pool = ConnectionPool(token=TOKEN, greeting=reader_of(GREETING), channels=channels)
        write_lease(tmp_path, pool.listen("127.0.0.1"))
        if not term:
            thread.start()

        def has_heard(pool=pool, heard=heard, refused=refused):
            turn(pool, 0.05, heard, refused)
            return len(heard) > 30

        eventually(has_heard)
        assert not refused
        pool.shutdown()
    os.close(write)
    thread.join()
    os.close(read)
