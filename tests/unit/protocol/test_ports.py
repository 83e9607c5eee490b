"""Whatever arrives at a real port, the process goes on: the connection ends, and the next client is served."""

import json
import random
import socket
import subprocess
import sys
import threading
import time
from contextlib import contextmanager
from dataclasses import replace

from fakes.any_message import example
from fakes.replicators import serving
from fakes.virtual_run import spec

from muster.agent.host_agent import HostAgent
from muster.agent.values.host_identity import SOCKET, HostIdentity
from muster.checkpoint_format.snapshot_ring import Ring
from muster.core.snapshots import SnapshotCopy
from muster.protocol import tables
from muster.protocol.client import FROM_CLIENT, AskStatus, HealthReport, StopRun
from muster.protocol.codec import encode, reader_of
from muster.protocol.hello import ClientHello
from muster.protocol.lease import read_lease
from muster.protocol.rank_agent import FROM_RANK, HOST_GREETING, StandbyHello
from muster.protocol.replicator_peers import REPLICATOR_PEERS, Absent, PeerHello, ReadVersion
from muster.protocol.to_supervisor import GREETING
from muster.protocol.version import MINE
from muster.storage.memory_dir import MemoryDir
from muster.transport.client import ask_supervisor
from muster.transport.stream import Stream

TOKEN = b"k" * 32
CASES = 500
SENT = sorted({cls for channel in tables.CHANNELS for cls in channel.messages}, key=lambda cls: cls.__name__)


def bad_frames(own, seed):
    """Random bytes, random JSON, messages of other channels, and messages of ``own`` with one field spoilt."""
    rng = random.Random(seed)
    foreign = [encode(example(cls)) for cls in SENT if cls not in own.messages]
    mine = [json.loads(encode(example(cls))) for cls in own.messages]
    words = [None, True, -1, 2**70, 1e308, "", "ä" * 50, [], [[[]]], {}, {"version": {"protocol": 1, "muster": "x"}}]
    while True:
        yield rng.randbytes(rng.randrange(200))
        yield json.dumps(rng.choice(words)).encode()
        yield json.dumps([rng.choice(words), rng.choice(words)]).encode()
        yield rng.choice(foreign)
        kind, fields = rng.choice(mine)
        field = rng.choice([name for name in (*fields, "surplus") if name != "detail"])  # which takes any object
        yield json.dumps([kind, {**fields, field: {"spoilt": [rng.choice(words)]}}]).encode()
        yield json.dumps([kind, fields]).encode()[: -rng.randrange(1, 9)]
        yield json.dumps([kind, {**fields, "version": {"protocol": 0, "muster": "\ud800"}}]).encode()


def throw(address, hello, frame):
    """A connection that sends ``frame``, perhaps after a good hello; returns once it has ended."""
    family = socket.AF_UNIX if isinstance(address, str) else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as sock:
        sock.connect(address)
        stream = Stream(sock, TOKEN, server=False, decode=bytes, timeout_s=10.0)
        try:
            if hello is not None:
                stream.send(hello)
            stream.session.send(frame)
            sock.sendall(stream.session.outgoing())
            while True:
                stream.receive()
        except ConnectionError:
            pass


def throw_all(address, hello, first, then):
    """Half of the frames come first on their connection, half after ``hello``."""
    for _, frame in zip(range(CASES // 2), bad_frames(first, 1), strict=False):
        throw(address, None, frame)
    for _, frame in zip(range(CASES // 2), bad_frames(then, 2), strict=False):
        throw(address, hello, frame)


def run_folder(folder):
    (folder / "token").write_bytes(TOKEN)
    (folder / "token").chmod(0o600)
    (folder / "job.json").write_text(
        json.dumps({"run_id": "r", "backend": "local", "job_id": "1", "run_dir": str(folder)})
    )
    (folder / "resolved.json").write_text(spec(hosts=1).model_dump_json())
    return folder


@contextmanager
def supervisor(folder):
    argv = [sys.executable, "-m", "muster.app.supervisor", "--run-dir", str(folder), "--run-id", "r"]
    child = subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        until = time.monotonic() + 60
        while not (folder / "lease.json").exists():
            assert child.poll() is None and time.monotonic() < until, child.communicate()[0]
            time.sleep(0.05)
        yield child, read_lease((folder / "lease.json").read_bytes(), me="the test").address
    finally:
        child.kill()
        child.communicate()


def test_the_supervisors_port(tmp_path):
    with supervisor(run_folder(tmp_path)) as (child, address):
        throw_all(address, ClientHello(version=MINE), GREETING, FROM_CLIENT)
        throw(address, ClientHello(version=MINE), encode(HealthReport(host="host-0", kind="no_such_kind")))
        status = ask_supervisor(address, TOKEN, AskStatus())
        assert status.phase == "starting" and not status.hosts and child.poll() is None
        ask_supervisor(address, TOKEN, StopRun(force=True))
        assert child.wait(timeout=30) == 130
    events = (tmp_path / "events" / "supervisor.1.jsonl").read_text()
    refusals = [json.loads(line)["detail"]["reason"] for line in events.splitlines() if "connection.refused" in line]
    versions = [reason for reason in refusals if "speaks protocol" in reason]
    assert 1 <= len(refusals) - len(versions) <= 4, "one a minute for each kind of peer"
    assert 1 <= len(versions) == len(set(versions)), "and for each version"


def test_the_agents_port(tmp_path):
    folder = run_folder(tmp_path)
    memory = MemoryDir.of_host(folder, run_id="r", host="host-0")
    agent = HostAgent(HostIdentity(run_dir=folder, run_id="r", host="host-0", bind="127.0.0.1", memory=memory))
    goes_on = threading.Event()
    goes_on.set()

    def serve():
        while goes_on.is_set():
            for event in agent.edge.poll(0.05):
                agent.give(event)

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    standby = StandbyHello(pid=2**22 + 7, local_rank=0, bound=False)  # no process has this number
    try:
        address = str(memory.path(SOCKET))
        throw_all(address, standby, HOST_GREETING, FROM_RANK)
        with socket.socket(socket.AF_UNIX) as sock:
            sock.connect(address)
            Stream(sock, TOKEN, server=False, decode=bytes).send(standby)
            until = time.monotonic() + 10
            while len(agent.state.ranks.standbys) == 0 and time.monotonic() < until:
                time.sleep(0.01)
            assert len(agent.state.ranks.standbys) == 1 and thread.is_alive()
    finally:
        goes_on.clear()
        thread.join()
        agent.edge.pool.shutdown()
        memory.remove()


def test_the_replicators_ports(tmp_path):
    with serving(tmp_path, TOKEN) as replicator:
        throw_at_replicator(replicator.address, tmp_path)


def throw_at_replicator(address, folder):
    hello = PeerHello(version=MINE)
    throw_all(address, hello, REPLICATOR_PEERS, REPLICATOR_PEERS)
    with socket.create_connection(address) as sock:
        stream = Stream(sock, TOKEN, server=False, decode=reader_of(REPLICATOR_PEERS), timeout_s=10.0)
        stream.send(PeerHello(version=replace(MINE, protocol=MINE.protocol + 1)))
        assert "speaks protocol" in stream.receive().reason
    copy = SnapshotCopy(step=1, attempt=1, rank=0, layout="r1s1t1p1c1e1", host="host-0", tier="memory")
    ring = Ring.create(folder / "own.r1s1t1p1c1e1.0.ring", header=b"{}", slot_bytes=64)
    with socket.create_connection(address) as sock:
        stream = Stream(sock, TOKEN, server=False, decode=reader_of(REPLICATOR_PEERS), timeout_s=10.0)
        stream.send(hello)
        stream.send(ReadVersion(file=ring.path.name, copy=copy))
        assert stream.receive() == Absent()
    ring.close()
