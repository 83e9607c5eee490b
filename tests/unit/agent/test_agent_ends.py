"""The agent's own ends of its channels: what cannot be read, and a supervisor of another version."""

import json
import socket
import subprocess
import sys
import time

import pytest

from muster.agent import host_agent
from muster.agent.host_agent import HostAgent
from muster.agent.values.events import SupervisorMessage
from muster.agent.values.host_identity import SOCKET, HostIdentity
from muster.checkpoint_format.snapshot_ring import Ring, file_name
from muster.config.spec import RunSpec
from muster.core import resolved_file
from muster.core.errors import UsageError
from muster.protocol.codec import encode
from muster.protocol.fork_server import ForkServerHello, SpawnStandbys
from muster.protocol.rank_agent import RankBeat, RankHello, StandbyHello
from muster.protocol.to_supervisor import StoreLost
from muster.protocol.values import CommandRanks, LastWords, RankEvent
from muster.protocol.version import MINE
from muster.storage.memory_dir import MemoryDir
from muster.transport.secure_session import Session

TOKEN = b"t" * 64


@pytest.fixture
def agent(tmp_path):
    """One that has started nothing."""
    spec = RunSpec.model_validate({"name": "case", "command": ["train.py"], "resources": {"device": "cpu"}})
    (tmp_path / "resolved.json").write_text(spec.model_dump_json())
    (tmp_path / "token").write_bytes(TOKEN)
    (tmp_path / "token").chmod(0o600)
    memory = MemoryDir.of_host(tmp_path, run_id="run", host="host-0")
    identity = HostIdentity(run_dir=tmp_path, run_id="run", host="host-0", bind="127.0.0.1", memory=memory)
    made = HostAgent(identity)
    yield made
    made.edge.pool.shutdown()
    memory.remove()


def test_a_keeper_that_reads_a_damaged_run_file_ends_with_one_line(tmp_path):
    resolved_file.write(tmp_path, RunSpec.model_validate({"name": "case", "command": ["train.py"]}).model_dump_json())
    path = tmp_path / "resolved.json"
    path.write_text(path.read_text().replace("train.py", "trail.py"))
    code = "from muster.core import resolved_file as f; f.PATIENCE_S = 0; from muster.agent.watchdog import main; "
    argv = ["--run-dir", str(tmp_path), "--run-id", "run", "--host", "host-0"]
    done = subprocess.run([sys.executable, "-c", code + "main()", *argv], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (1, f"error: {path} is damaged: it does not fit its checksum\n")


@pytest.fixture
def sleeper():
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    yield child
    child.kill()
    child.wait()
    child.stdin.close()


class Process:
    """A process of the host, connected to the agent."""

    def __init__(self, agent):
        self.agent, self.session, self.heard = agent, Session(TOKEN, server=False), []
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.connect(str(agent.state.identity.memory.path(SOCKET)))
        self.sock.setblocking(False)
        while not self.session.ready:
            self.turn()

    def turn(self):
        """Both ends read and write once; False: the agent has closed the connection."""
        for event in self.agent.edge.poll(0.05):
            self.agent.give(event)
        try:
            data = self.sock.recv(1 << 16)
        except BlockingIOError:
            data = None
        if data == b"":
            return False
        if data:
            self.heard += self.session.frames(data)
        out = self.session.outgoing()
        if out:
            self.sock.sendall(out)
        return True

    def lives_after(self, *frames):
        for frame in frames:
            self.session.send(frame)
        return all([self.turn() for _ in range(3)])


STANDBY = encode(StandbyHello(pid=1, local_rank=0, bound=False))
UNREADABLE = {
    "no JSON": [b"\xff\xfe"],
    "another channel's": [encode(StoreLost())],
    "of the right channel, before the hello": [encode(RankBeat(step=1, micro=1))],
    "a second hello": [STANDBY, STANDBY],
    "what the agent itself sends": [STANDBY, encode(SpawnStandbys(local_ranks=(0,), contexts=False))],
    "a field that is missing": [STANDBY, b'["rank_beat",{"step":1}]'],
    "an event that is none": [b'["rank_hello",{"pid":PID,"attempt":1,"rank":0,"step":1}]',
        b'["rank_event",{"kind":"no.such","attempt":1,"mono_ns":1,"wall_ns":1,"detail":{}}]'],
}  # fmt: skip


@pytest.mark.parametrize("frames", UNREADABLE.values(), ids=list(UNREADABLE))
def test_what_cannot_be_read_ends_its_connection_and_no_more(agent, frames, sleeper):
    assert not Process(agent).lives_after(*(frame.replace(b"PID", b"%d" % sleeper.pid) for frame in frames))
    server = Process(agent)
    assert server.lives_after(encode(ForkServerHello(pid=1, store=("127.0.0.1", 1))))
    assert agent.state.fork_server.peer is not None and agent.state.leaving.reason is None


def test_a_rank_that_connects_again_is_reached_there(agent, sleeper):
    """The agent may see the end of the old connection after the new one's hello."""
    hello = encode(RankHello(pid=sleeper.pid, attempt=1, rank=0, step=1))
    old, new = Process(agent), Process(agent)
    assert old.lives_after(hello) and new.lives_after(hello)
    old.sock.close()
    assert new.lives_after()
    agent.give(SupervisorMessage(CommandRanks(kind="save")))
    assert new.lives_after() and len(new.heard) == 1


def tree(folder):
    return {path: path.lstat().st_ino for path in folder.rglob("*")}


def hold_snapshot(agent):
    ring = Ring.create(
        agent.state.identity.memory.path(file_name("own", "r1s2t1p1c1e1", 0)), header=b"{}", slot_bytes=64
    )
    ring.commit(ring.begin(), step=8, attempt=2, rank=0)
    return ring


def hand_lease_to_another_version(agent):
    other = {"protocol": MINE.protocol + 1, "muster": "9.9.9"}
    (agent.state.identity.run_dir / "lease.json").write_text(json.dumps({"version": other}))


def test_a_supervisor_of_another_version_is_refused_before_anything_is_touched(agent, monkeypatch, capsys):
    """``agent`` is the predecessor, whose snapshots and ranks are none of the refused one's."""
    hold_snapshot(agent).close()
    hand_lease_to_another_version(agent)
    run_dir, memory = agent.state.identity.run_dir, agent.state.identity.memory.folder
    before = tree(run_dir) | tree(memory)
    monkeypatch.setattr(sys, "argv", ["agent", "--run-dir", str(run_dir), "--run-id", "run", "--host", "host-0"])
    with pytest.raises(SystemExit) as ended:
        host_agent.main()
    assert ended.value.code == UsageError.exit_code
    assert tree(run_dir) | tree(memory) == before
    (line,) = capsys.readouterr().err.splitlines()
    assert f"host-0 speaks {MINE}" in line and "(muster 9.9.9)" in line


def test_a_rank_lives_on_in_an_agent_until_its_process_is_gone(agent, sleeper):
    """Its pidfd, its last words in the socket, its report: through the agent's own loop."""
    rank = Process(agent)
    assert rank.lives_after(encode(RankHello(pid=sleeper.pid, attempt=1, rank=0, step=1)))
    assert [each.pid for each in agent.state.ranks.living()] == [sleeper.pid]
    rank.session.send(encode(LastWords(exception="ValueError", message="bad row")))
    rank.sock.sendall(rank.session.outgoing())
    sleeper.kill()
    until = time.monotonic() + 20
    while agent.state.ranks.table:
        assert time.monotonic() < until
        agent.turn()
    assert [(report.code, report.last.message) for report in agent.state.ranks.exits.values()] == [(1, "bad row")]


def test_an_event_of_a_rank_is_logged_once_whatever_agent_it_reaches(agent, sleeper):
    rank = Process(agent)
    message = RankEvent(kind="run.message", attempt=1, rank=0, mono_ns=5, wall_ns=5, detail={"text": "seen"})
    rank.lives_after(encode(RankHello(pid=sleeper.pid, attempt=1, rank=0, step=1)), encode(message))
    agent.edge.log.close()
    agent.edge.memory._pool.leave_socket_files()
    again = HostAgent(agent.state.identity)
    successor = Process(again)
    successor.lives_after(encode(RankHello(pid=sleeper.pid, attempt=1, rank=0, step=1)), encode(message))
    lines = [path.read_text() for path in (agent.state.identity.run_dir / "events").rglob("*.jsonl")]
    assert "".join(lines).count('"seen"') == 1
    again.edge.pool.shutdown()
