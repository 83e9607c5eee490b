"""Replicators over real sockets: copies arrive whole or not at all, and only from those who know the token."""

import math
import os
import signal
import socket
import threading
import time
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
from cluster import LiveRun, spec_of
from waiting import eventually

torch = pytest.importorskip("torch")

from muster.agent.host_agent import HostAgent  # noqa: E402
from muster.agent.programs import replicator_child  # noqa: E402
from muster.agent.replicator import checkpoint_writer  # noqa: E402
from muster.agent.replicator.main import Replicator  # noqa: E402
from muster.agent.replicator.replication import connect  # noqa: E402
from muster.agent.values.actions import StopProgram  # noqa: E402
from muster.agent.values.events import StatePrepared  # noqa: E402
from muster.agent.values.host_identity import HostIdentity  # noqa: E402
from muster.agent.values.state import HostContext  # noqa: E402
from muster.agent.values.state import Replicator as Replicated  # noqa: E402
from muster.checkpoint.handover import Handover  # noqa: E402
from muster.checkpoint.load import load_into, newest_valid  # noqa: E402
from muster.checkpoint.saver import Saver  # noqa: E402
from muster.checkpoint_format.shards import ShardHeader, encode_header, pack  # noqa: E402
from muster.checkpoint_format.snapshot_ring import Ring, file_name, refusal  # noqa: E402
from muster.config.spec import RunSpec  # noqa: E402
from muster.core import resolved_file  # noqa: E402
from muster.core.errors import AccessError, CheckpointError  # noqa: E402
from muster.core.snapshots import SnapshotCopy  # noqa: E402
from muster.core.types import Checksum, Layout  # noqa: E402
from muster.protocol.codec import reader_of  # noqa: E402
from muster.protocol.handover import FROM_WRITER, Busy, WriteShard  # noqa: E402
from muster.protocol.replicator_orders import CopyNext, CopyTo, FetchVersion  # noqa: E402
from muster.protocol.replicator_peers import (  # noqa: E402
    Go,
    NotIntact,
    PushVersion,
    ReadVersion,
    Torn,
    Whole,
)
from muster.protocol.to_agent import CommitFlushed, FlushShard, FlushSnapshots  # noqa: E402
from muster.protocol.to_supervisor import FlushCommitted, ReplicatorAddress, SnapshotsFlushed  # noqa: E402
from muster.storage.memory_dir import MemoryDir  # noqa: E402
from muster.storage.store import open_store  # noqa: E402
from muster.transport.stream import REPLICATOR_SOCKET, Stream  # noqa: E402
from muster.transport.stream_server import serve_streams  # noqa: E402

pytestmark = [pytest.mark.live, pytest.mark.timeout(240)]

TOKEN = b"t" * 64
KEY = "r1s2t1p1c1e1"


@pytest.fixture
def replicators(tmp_path):
    found = []
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        replicator = Replicator(memory=tmp_path / name, token=TOKEN, bind="127.0.0.1")
        threading.Thread(target=replicator.serve, daemon=True).start()
        found.append(replicator)
    return found


def write(replicator, rank, step, byte, size=3_000_000):
    ring = Ring.create(replicator.memory / file_name("own", KEY, rank), header=b'{"tensors":[]}', slot_bytes=size)
    slot = ring.begin()
    ring.slot(slot)[:] = bytes([byte]) * size
    ring.request_copy(ring.commit(slot, step=step, attempt=1, rank=rank))
    return ring


def peers(address, ranks, attempt):
    return CopyTo(attempt=attempt, peer=address, layout=KEY, ranks=tuple(ranks))


def copy_of(rank, step, attempt=1):
    return SnapshotCopy(step=step, attempt=attempt, rank=rank, layout=KEY, host="", tier="memory")


def fetched(address, step=9):
    return FetchVersion(
        address=address, file=file_name("own", KEY, 1), target=file_name("fetched", KEY, 1), copy=copy_of(1, step)
    )


def versions(path):
    try:
        return [(version.step, version.attempt) for version in Ring.open(path).versions()]
    except CheckpointError:
        return []


def test_each_step_is_copied_to_the_peer_and_acknowledged(replicators):
    a, b = replicators
    ring = write(a, 0, 5, 7)
    a.handle(peers(b.address, [0], 1))
    a.handle(CopyNext())
    copy = b.memory / file_name("peer", KEY, 0)
    eventually(lambda: versions(copy) == [(5, 1)])
    eventually(lambda: ring.copied() == (5, 1))
    held = Ring.open(copy)
    assert bytes(held.slot(held.versions()[0].slot)[:3]) == b"\x07\x07\x07"
    write(a, 0, 6, 8)
    a.handle(CopyNext())
    eventually(lambda: versions(copy) == [(6, 1), (5, 1)])


def test_a_fetched_version_appears_under_its_name_when_it_is_whole(replicators):
    a, b = replicators
    write(a, 1, 9, 3)
    order = fetched(a.address)
    b.fetch(order)
    assert versions(b.memory / order.target) == [(9, 1)]
    with pytest.raises(CheckpointError, match="no longer there"):
        b.fetch(fetched(a.address, step=10))


@pytest.mark.parametrize("end", [Torn(), Whole(checksum=Checksum(value="0" * 16))], ids=["overwritten", "damaged"])
def test_a_copy_that_is_not_whole_is_not_committed(replicators, end):
    a, b = replicators
    ring = write(a, 0, 5, 7)
    stream = connect(b.address, TOKEN)
    stream.send(
        PushVersion(
            file=file_name("peer", KEY, 0), header="{}", slot_bytes=ring.slot_bytes, attempt=1, copy=copy_of(0, 5)
        )
    )
    assert isinstance(stream.receive(), Go)
    stream.send_bytes(ring.slot(ring.versions()[0].slot))
    stream.receive()
    stream.send(end)
    if isinstance(end, Whole):
        assert isinstance(stream.receive(), NotIntact)
    time.sleep(0.2)
    assert versions(b.memory / file_name("peer", KEY, 0)) == []


def test_what_rotted_before_it_is_copied_is_dropped_and_said(replicators, capfd):
    a, b = replicators
    ring = write(a, 0, 5, 7)
    ring.slot(ring.find(5, 1).slot)[1000] ^= 8
    a.handle(peers(b.address, [0], 1))
    a.handle(CopyNext())
    eventually(lambda: versions(ring.path) == [])
    eventually(lambda: "step 5 of attempt 1 of rank 0 does not match its checksum" in capfd.readouterr().out)
    assert versions(b.memory / file_name("peer", KEY, 0)) == [] and ring.copied() == (-1, -1)


def test_strangers_and_paths_are_refused(replicators, tmp_path):
    a, _ = replicators
    with pytest.raises((AccessError, ConnectionError)):
        Stream(socket.create_connection(tuple(a.address)), b"x" * 64, server=False, decode=bytes)
    (tmp_path / "secret").write_text("not yours")
    stream = connect(a.address, TOKEN)
    stream.send(ReadVersion(file="../secret", copy=copy_of(0, 0)))
    with pytest.raises(ConnectionError):
        stream.receive()


def test_what_cannot_be_fetched_is_said_at_once(replicators):
    a, b = replicators
    order = fetched(a.address)
    b.handle(order)
    eventually(lambda: refusal(b.memory / order.target) is not None)
    assert not (b.memory / order.target).exists()


def test_a_fetch_outlives_the_others_replicator(replicators):
    """It died and is there again a moment later, on the same port."""
    a, b = replicators
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    order = fetched(("127.0.0.1", port))
    write(a, 1, 9, 3)
    b.handle(order)
    time.sleep(0.2)  # it is refused a few times
    again = Replicator(memory=a.memory, token=TOKEN, bind="127.0.0.1", port=port)
    threading.Thread(target=again.serve, daemon=True).start()
    eventually(lambda: versions(b.memory / order.target) == [(9, 1)])
    assert refusal(b.memory / order.target) is None


# ---------------------------------------------------------------- shares: what ranks hand over


class Host:
    """An agent that has started its replicator and nothing else."""

    def __init__(self, tmp_path):
        (tmp_path / "token").write_bytes(TOKEN)
        (tmp_path / "token").chmod(0o600)
        given = {"name": "case", "command": ["train.py"], "recovery": {"heartbeat_timeout_s": 0.5}}
        resolved_file.write(tmp_path, RunSpec.model_validate(given).model_dump_json())
        found = MemoryDir.of_host(tmp_path, run_id="run", host="host-0")
        self.agent = HostAgent(
            HostIdentity(run_dir=tmp_path, run_id="run", host="host-0", bind="127.0.0.1", memory=found)
        )
        self.memory, self.state, self.sent, self.notes = found.folder, self.agent.state, [], []
        self.state.link.peer = -1
        self.state.link.lease_check_s = self.state.memory.next_s = math.inf
        edge, supervisor = self.agent.edge, SimpleNamespace(number=-1, identity=0)
        edge._peers[-1] = edge._supervisor = supervisor
        send = edge.pool.send
        edge.pool.send = lambda to, message: self.sent.append(message) if to is supervisor else send(to, message)
        self.agent.edge.log.write = lambda kind, detail, **more: self.notes.append(detail.get("text", kind))

    def do(self, decision, *given):
        ctx = HostContext(self.state, time.monotonic(), time.time_ns())
        decision(ctx, *given)
        self.agent.act(ctx.actions)

    def until(self, condition):
        until = time.monotonic() + 30
        while not condition():
            assert time.monotonic() < until, "not within 30 s"
            for event in self.agent.edge.poll(0.02):
                self.agent.give(event)
            self.do(replicator_child.tick)

    def answers(self):
        return [message for message in self.sent if isinstance(message, SnapshotsFlushed | FlushCommitted)]

    @property
    def pid(self):
        return self.state.replicator.pid


@pytest.fixture
def agent(tmp_path):
    made = Host(tmp_path)
    made.do(replicator_child.begin)
    made.until(lambda: made.state.replicator.address)
    yield made
    made.agent.act([StopProgram(replicator_child.NAME, leave=True)])
    made.agent.edge.close()


def saver(agent, tmp_path, seen):
    handover = Handover(address=str(agent.memory / REPLICATOR_SOCKET), token=TOKEN)
    return Saver(
        str(tmp_path / "checkpoints"), run_id="run", attempt=1, layout=Layout(), keep_last=9, asynchronous=True,
        group=None, store=open_store(), on_event=lambda kind, **detail: seen.append((kind, detail)), handover=handover,
    )  # fmt: skip


def kinds(seen):
    return [(kind.removeprefix("checkpoint."), detail["step"]) for kind, detail in seen if kind != "checkpoint.begun"]


def state_of(step, count=400_000):
    return {"w": torch.full((count,), float(step))}


def test_the_replicator_writes_what_a_rank_hands_over(agent, tmp_path):
    seen = []
    saves = saver(agent, tmp_path, seen)
    saves.save(1, state_of(1), {"data": "x"})
    saves.finish()
    assert kinds(seen) == [("committed", 1)], seen
    found = newest_valid(open_store(), str(tmp_path / "checkpoints"))
    assert [item.name for item in found.files] == ["rank-00000.shard"]  # not written by the rank itself
    restored = state_of(0)
    load_into(found, restored)
    assert bool((restored["w"] == 1).all())
    assert "torch" not in Path(f"/proc/{agent.pid}/maps").read_text()


def test_what_the_replicator_cannot_write_fails_the_save_and_a_later_one_succeeds(agent, tmp_path):
    seen = []
    saves = saver(agent, tmp_path, seen)
    (tmp_path / "checkpoints" / "step-00000001.a1" / "rank-00000.shard").mkdir(parents=True)
    for step in (1, 2):
        saves.save(step, state_of(step), {})
        saves.finish()
    assert kinds(seen) == [("failed", 1), ("committed", 2)]
    assert "rank-00000.shard" in next(detail["reason"] for kind, detail in seen if kind == "checkpoint.failed")


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
def test_a_save_outlives_its_replicator_and_a_new_replicator_takes_the_next(agent, tmp_path, number):
    seen = []
    saves = saver(agent, tmp_path, seen)
    address, before = agent.state.replicator.address, agent.pid
    saves.save(1, state_of(1), {})
    saves.finish()
    os.kill(before, number)
    saves.save(2, state_of(2), {})
    # A stopped one is killed first.
    agent.until(lambda: agent.pid not in (None, before))
    agent.until(lambda: ReplicatorAddress(memory=agent.state.replicator.address) in agent.sent)
    saves.finish()
    saves.save(3, state_of(3), {})
    saves.finish()
    outcomes = [kind for kind in kinds(seen) if kind[0] != "run.message"]
    assert outcomes == [("committed", step) for step in (1, 2, 3)], seen
    assert agent.state.replicator.address == address, "the others need no new address"
    assert "was restarted" in agent.notes[0]
    newest = newest_valid(open_store(), str(tmp_path / "checkpoints"))
    assert newest.files[0].name == "rank-00000.shard", "the new replicator wrote it"


def test_a_new_replicator_knows_where_copies_go(agent, replicators):
    a, _ = replicators
    agent.do(replicator_child.begin_attempt, StatePrepared(1, (), peers(a.address, [0], 1)))
    before = agent.pid
    os.kill(before, signal.SIGKILL)
    agent.until(lambda: bool(agent.sent))
    write(SimpleNamespace(memory=agent.memory), 0, 5, 7)
    agent.do(replicator_child.copy_next)
    copy = a.memory / file_name("peer", KEY, 0)
    eventually(lambda: versions(copy) == [(5, 1)])


def test_a_stopped_replicator_does_not_block_the_agent(agent, replicators):
    a, b = replicators
    os.kill(agent.pid, signal.SIGSTOP)
    for number in range(3000):  # more than a pipe holds
        agent.do(replicator_child.begin_attempt, StatePrepared(1, (), peers(b.address, [0, number], 1)))
        agent.do(replicator_child.copy_next)
    agent.do(replicator_child.begin_attempt, StatePrepared(1, (), peers(a.address, [0], 1)))
    os.kill(agent.pid, signal.SIGCONT)
    agent.until(lambda: not agent.agent.edge.children.has_pending)
    write(SimpleNamespace(memory=agent.memory), 0, 5, 7)
    agent.do(replicator_child.copy_next)
    eventually(lambda: versions(a.memory / file_name("peer", KEY, 0)) == [(5, 1)])


def test_a_new_agent_knows_where_copies_go_and_keeps_the_port(agent, replicators):
    """The agent died, its ranks train on: the supervisor does not tell its successor's replicator."""
    a, _ = replicators
    agent.do(replicator_child.begin_attempt, StatePrepared(1, (), peers(a.address, [0], 1)))
    address = agent.state.replicator.address
    agent.state.leaving.reason = "it died"
    agent.agent.act([StopProgram(replicator_child.NAME, leave=True)])  # as its stdin's end would
    agent.state.leaving.reason = None
    agent.agent.edge.children.wait()
    record = agent.agent.edge.replicator_record()
    agent.state.replicator = Replicated(port=record.port, copies=record.peers)
    agent.do(replicator_child.begin)
    agent.until(lambda: agent.state.replicator.address)
    assert agent.state.replicator.address == address
    write(SimpleNamespace(memory=agent.memory), 0, 5, 7)
    agent.do(replicator_child.copy_next)
    eventually(lambda: versions(a.memory / file_name("peer", KEY, 0)) == [(5, 1)])


def test_a_replicator_that_dies_over_a_shard_leaves_it_to_the_rank(tmp_path):
    """It took the share and died: the rank writes a file of another name, which the dead one cannot spoil."""
    (tmp_path / "memory").mkdir()
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(tmp_path / "memory" / REPLICATOR_SOCKET))
    listener.listen()

    def die_over_it():
        sock, _ = listener.accept()
        stream = Stream(sock, TOKEN, server=True, decode=checkpoint_writer.decode_request)
        stream.receive()
        stream.send(Go())
        os.close(stream.receive_file())
        sock.close()

    threading.Thread(target=die_over_it, daemon=True).start()
    seen = []
    saves = saver(SimpleNamespace(memory=tmp_path / "memory"), tmp_path, seen)
    saves.save(1, state_of(1), {})
    saves.finish()
    assert [kind for kind, _ in seen] == ["checkpoint.begun", "checkpoint.committed", "run.message"], seen
    found = newest_valid(open_store(), str(tmp_path / "checkpoints"))
    assert found.files[0].name == "own-rank-00000.shard"
    restored = state_of(0)
    load_into(found, restored)
    assert bool((restored["w"] == 1).all())


def test_a_shard_whose_rank_has_died_is_dropped(tmp_path, monkeypatch):
    """The writing is as slow as the test wants it, and ends when the connection does."""
    begun, dropped, go_on = threading.Event(), threading.Event(), threading.Event()

    def slow(uri, parts, *, still_needed):
        begun.set()
        go_on.wait(20)
        while still_needed():
            time.sleep(0.01)
        dropped.set()
        raise CheckpointError("nobody waits for it any more")

    monkeypatch.setattr(checkpoint_writer, "write_shard", slow)
    monkeypatch.setattr(checkpoint_writer, "BUSY_S", 0.05)
    words = (checkpoint_writer.listen_for_ranks(MemoryDir.open(tmp_path)), TOKEN, checkpoint_writer.write_shard_for)
    threading.Thread(
        target=serve_streams,
        args=words,
        kwargs={"decode": checkpoint_writer.decode_request, "peer": "a rank", "log": print},
        daemon=True,
    ).start()
    fd = os.memfd_create("share")
    os.pwrite(fd, b"x" * 4096, 0)
    with socket.socket(socket.AF_UNIX) as sock:
        sock.connect(str(tmp_path / REPLICATOR_SOCKET))
        stream = Stream(sock, TOKEN, server=False, decode=reader_of(FROM_WRITER))
        stream.send(WriteShard(uri=str(tmp_path / "out"), bytes=4096, preamble_bytes=2))
        assert isinstance(stream.receive(), Go)
        stream.send_file(fd)
        stream.send_bytes(memoryview(b"ab"))
        assert begun.wait(20)
        assert isinstance(stream.receive(), Busy)  # it is told that somebody is at it
        go_on.set()
    assert dropped.wait(20)
    os.close(fd)


def test_a_flush_needs_no_rank_and_is_answered_even_by_a_replicator_that_died(agent, tmp_path):
    tensors = pack([("w", "uint8", (4096,), (0,), (4096,))])
    header = encode_header(ShardHeader(run_id="run", rank=-1, layout=Layout(), tensors=tensors))
    ring = Ring.create(agent.memory / file_name("own", Layout().key, 0), header=header, slot_bytes=4096)
    ring.slot(ring.begin())[:] = b"y" * 4096
    ring.commit(0, step=7, attempt=2, rank=0)
    held = SnapshotCopy(step=7, attempt=2, rank=0, layout="r1s1t1p1c1e1", host="host-0", tier="memory")
    version = {"step": 7, "attempt": 2, "layout": held.layout, "uri": str(tmp_path / "checkpoints")}
    order = FlushSnapshots(**version, ranks=(FlushShard(rank=0, copy=held),))
    agent.do(partial(replicator_child.flush, fence=3), order)
    agent.do(partial(replicator_child.flush, fence=3), order)  # asked again, as when another host was lost meanwhile
    agent.until(lambda: len(agent.answers()) == 2)
    assert agent.answers()[0].failure is None and len(set(map(str, agent.answers()))) == 1, agent.answers()
    commit = CommitFlushed(**version, files=agent.answers()[0].files)
    agent.do(partial(replicator_child.flush, fence=3), commit)
    os.kill(agent.pid, signal.SIGKILL)  # whether it had committed or not: the order is given to its successor
    agent.until(lambda: len(agent.answers()) == 3)
    assert agent.answers()[2].failure is None and agent.answers()[2].bytes > 4096, agent.answers()
    assert newest_valid(open_store(), str(tmp_path / "checkpoints")).step == 7


# ---------------------------------------------------------------- in a run


def test_a_run_loses_its_replicators_and_trains_on_and_copying_continues(tmp_path):
    changes = {"resources.hosts": 2, "resources.ranks_per_host": 1, "checkpoint.every_steps": 5, "training.steps": 40}
    with LiveRun(tmp_path, spec_of(**changes)) as run:
        run.start()
        run.wait_for_step(8)
        for process in psutil.process_iter(["cmdline"]):
            command = " ".join(process.info["cmdline"] or [])
            if "muster.agent.replicator.main" in command and str(tmp_path) in command:
                process.kill()
        at = run.step()
        assert run.wait() == 0, run.story()
        assert run.troubles() == [] and run.events("checkpoint.failed") == [], run.story()
        notes = [event.detail["text"] for event in run.events("run.message")]
        assert sum("was restarted" in text for text in notes) == 2, notes
        copied = max(event.detail.get("peer_step", 0) for event in run.events("step"))
        assert copied > at, "copying continued, from the new replicators to the new replicators"
        newest = newest_valid(open_store(), str(tmp_path / "checkpoints"))
        assert newest.step == 40
        assert [item.name for item in newest.files if item.name.startswith("own-")] == [], "the replicators wrote it"
