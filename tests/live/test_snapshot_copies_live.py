"""Copies in another host's memory: over a slow link, without room, and from a host that resumes too late."""

import os
import subprocess
import tempfile
import threading
from pathlib import Path

import pytest
from cluster import LiveRun, namespaces_work, spec_of
from waiting import eventually

pytest.importorskip("torch")

from muster.agent.replicator.main import Replicator
from muster.agent.replicator.replication import connect
from muster.checkpoint_format.snapshot_ring import Ring, file_name
from muster.config.spec import RunSpec
from muster.core.snapshots import PEER_SLOTS, SnapshotCopy
from muster.protocol.codec import reader_of
from muster.protocol.replicator_orders import FROM_REPLICATOR, CopyNext, CopyTo, FetchVersion
from muster.protocol.replicator_peers import Go, Held, PushRefused, PushVersion, Whole

pytestmark = [pytest.mark.live, pytest.mark.timeout(240)]

TOKEN = b"t" * 64
KEY = "r1s2t1p1c1e1"
SIZE = 3_000_000

#: A loop whose state is far larger than what its steps send: copies lag behind them. Rank 1 dies once, at rest.
LOOP = """
import os, signal, sys, time
from pathlib import Path
import torch
import torch.distributed as dist
import muster.run

once = Path(sys.argv[1])
dist.init_process_group("gloo")
state = {"weights": torch.zeros(8, dtype=torch.float64), "ballast": torch.ones(1_000_000)}
step = muster.run.restore(state)
while step < 40 and not muster.run.should_stop():
    step += 1
    if step == 30 and dist.get_rank() == 1 and not once.exists():
        once.touch()
        time.sleep(0.5)
        os.kill(os.getpid(), signal.SIGKILL)
    gradient = torch.full((8,), float(step), dtype=torch.float64)
    dist.all_reduce(gradient)
    state["weights"] += gradient * 0.01
    time.sleep(0.02)
    muster.run.save(step, state)
    muster.run.heartbeat(step, loss=float(state["weights"].sum()), tokens=16)
muster.run.finish(step, state)
"""


@pytest.mark.skipif(not namespaces_work(), reason="needs root and network namespaces")
def test_a_lost_rank_costs_no_step_however_far_copies_lag(tmp_path):
    (tmp_path / "loop.py").write_text(LOOP)
    spec = RunSpec.model_validate(
        {
            "name": "lags",
            "command": [str(tmp_path / "loop.py"), str(tmp_path / "once")],
            "resources": {"hosts": 2, "ranks_per_host": 1, "device": "cpu", "threads_per_rank": 1},
            "recovery": {"heartbeat_timeout_s": 5.0, "grace_s": 20.0},
            "checkpoint": {"every_steps": 0},
        }
    )
    with LiveRun(tmp_path, spec, netns=True) as run:
        if not all(slow(run.network, name) for name in run.names):
            pytest.skip("this kernel has no token bucket (tc tbf)")
        run.start()
        assert run.wait() == 0, run.story()
        first, second = run.events("attempt.started")
        assert second.detail["resume_step"] == 29, run.story()
        copied = [event.detail.get("peer_step", 0) for event in run.events("step") if event.attempt == first.attempt]
        assert max(copied) < 20, "a copy takes many steps, and holds none up"
        steps = [event.step for event in run.events("step")]
        assert sorted(steps) == list(range(1, 41)), "each was applied once"


def slow(network, name):
    """8 Mbit/s outbound: a copy takes 4 s, a step's few bytes wait 30 ms behind it."""
    bucket = ["tbf", "rate", "8mbit", "burst", "16kb", "limit", "32kb"]
    command = ["tc", "-n", network.namespace(name), "qdisc", "add", "dev", "eth0", "root", *bucket]
    return subprocess.run(command, capture_output=True, check=False).returncode == 0


# ---------------------------------------------------------------- replicators over real sockets


def replicator(folder):
    folder.mkdir(exist_ok=True)
    made = Replicator(memory=folder, token=TOKEN, bind="127.0.0.1")
    threading.Thread(target=made.serve, daemon=True).start()
    return made


def take(folder, rank, step, byte):
    """A rank's snapshot that it orders to be copied."""
    ring = Ring.create(folder / file_name("own", KEY, rank), header=b'{"tensors":[]}', slot_bytes=SIZE)
    slot = ring.begin()
    ring.slot(slot)[:] = bytes([byte]) * SIZE
    ring.request_copy(ring.commit(slot, step=step, attempt=1, rank=rank))
    return ring


def peers(address, ranks, attempt):
    return CopyTo(attempt=attempt, peer=address, layout=KEY, ranks=tuple(ranks))


def copy_of(rank, step, attempt=1):
    return SnapshotCopy(step=step, attempt=attempt, rank=rank, layout=KEY, host="", tier="memory")


def versions(path):
    return {version.step: bytes(Ring.open(path).slot(version.slot)[:1]) for version in Ring.open(path).versions()}


def push(to, step, world):
    """A sender's first message; the answer."""
    stream = connect(to.address, TOKEN)
    stream.send(
        PushVersion(
            file=file_name("peer", KEY, 0), header='{"tensors":[]}', slot_bytes=SIZE, attempt=world,
            copy=copy_of(0, step),
        )
    )  # fmt: skip
    return stream, stream.receive()


def finish(stream, step, byte, folder):
    """Send the bytes and their checksum; the answer."""
    other = Ring.create(folder / "other", header=b'{"tensors":[]}', slot_bytes=SIZE)
    slot = other.begin()
    other.slot(slot)[:] = bytes([byte]) * SIZE
    checksum = other.checksum(other.commit(slot, step=step, attempt=1, rank=0))
    stream.send_bytes(other.slot(slot))
    stream.receive()
    stream.send(Whole(checksum=checksum))
    return stream.receive()


def test_a_host_that_wakes_up_too_late_cannot_write_where_its_successor_did(tmp_path):
    here = replicator(tmp_path / "c")
    path = here.memory / file_name("peer", KEY, 0)
    late, answer = push(here, 5, world=1)
    assert isinstance(answer, Go)
    late.sock.sendall(b"\x01" * (SIZE // 2))  # and here its host stood still
    new, answer = push(here, 6, world=2)
    assert isinstance(answer, Go)
    assert isinstance(finish(new, 6, 2, tmp_path), Held)
    with pytest.raises(OSError):  # it wakes up: its connection is gone
        for _ in range(100):
            late.sock.sendall(b"\x01" * SIZE)
    _, answer = push(here, 7, world=1)
    assert isinstance(answer, PushRefused) and "attempt 2" in answer.reason
    assert versions(path) == {6: b"\x02"}
    ring = Ring.open(path)
    assert bytes(ring.slot(ring.find(6, 1).slot)) == b"\x02" * SIZE


def test_what_this_hosts_own_attempt_left_behind_is_refused(tmp_path):
    here = replicator(tmp_path / "c")
    here.handle(peers(None, [0], 3))
    assert isinstance(push(here, 5, world=2)[1], PushRefused) and isinstance(push(here, 5, world=4)[1], Go)


def test_one_slow_rank_does_not_hold_up_the_others_copies(tmp_path):
    a, b = replicator(tmp_path / "a"), replicator(tmp_path / "b")
    for rank in range(4):
        take(a.memory, rank, 5, rank + 1)
    stuck, answer = push(b, 5, world=9)  # somebody newer writes to rank 0's ring, and stands still
    assert isinstance(answer, Go)
    a.handle(peers(b.address, [0, 1, 2, 3], 1))
    a.handle(CopyNext())
    for rank in (1, 2, 3):
        eventually(lambda rank=rank: Ring.open(a.memory / file_name("own", KEY, rank)).copied(world=1) == (5, 1))
    assert Ring.open(a.memory / file_name("own", KEY, 0)).copied() == (-1, -1)
    stuck.close()


def test_the_copied_version_is_the_ordered_one_not_the_newest(tmp_path):
    a, b = replicator(tmp_path / "a"), replicator(tmp_path / "b")
    ring = take(a.memory, 0, 5, 1)
    slot = ring.begin(spare=(5,))
    ring.commit(slot, step=6, attempt=1, rank=0)
    a.handle(peers(b.address, [0], 1))
    a.handle(CopyNext())
    eventually(lambda: ring.copied(world=1) == (5, 1))
    held = Ring.open(b.memory / file_name("peer", KEY, 0))
    assert versions(held.path) == {5: b"\x01"} and held.slots == PEER_SLOTS


@pytest.fixture
def small():
    """A tmpfs of 4 MB, at a short path because of the sockets in it."""
    folder = Path(tempfile.mkdtemp(prefix="small-"))
    if (
        os.geteuid()
        or subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4m", "none", folder], check=False).returncode
    ):
        pytest.skip("needs root to mount a small tmpfs")
    yield folder
    subprocess.run(["umount", "-l", folder], check=False)
    folder.rmdir()


def test_a_peer_without_room_is_named_with_numbers_and_nothing_else_happens(tmp_path, small, capfd):
    a, b = replicator(tmp_path / "a"), replicator(small)
    ring = take(a.memory, 0, 5, 1)
    a.handle(peers(b.address, [0], 1))
    for _ in range(3):
        a.handle(CopyNext())
    said, read = [], reader_of(FROM_REPLICATOR)
    eventually(lambda: said.extend(capfd.readouterr().out.splitlines()) or said)
    (note,) = [read(line.encode()).text for line in said]
    assert "6.00 MB wanted" in note and "free in" in note and "checkpoint.replicate_snapshots: false" in note
    assert ring.copied() == (-1, -1) and list(small.iterdir()) == []


def test_a_fetch_without_room_is_refused_at_once_and_leaves_nothing(tmp_path, small):
    a, b = replicator(tmp_path / "a"), replicator(small)
    take(a.memory, 1, 9, 3)
    ring = Ring.create(small / file_name("peer", KEY, 0), header=b"{}", slot_bytes=1_500_000, slots=1)
    target = file_name("fetched", KEY, 1)
    b.handle(FetchVersion(address=a.address, file=file_name("own", KEY, 1), target=target, copy=copy_of(1, 9)))
    eventually(lambda: (small / f"{target}.failed").exists())
    assert "no room" in (small / f"{target}.failed").read_text()
    assert sorted(path.name for path in small.iterdir()) == [f"{target}.failed", ring.path.name]


def test_a_run_whose_host_has_no_room_goes_on_without_snapshots_and_says_so_once(tmp_path, small, monkeypatch):
    monkeypatch.setenv("MUSTER_MEMORY_DIR", str(small))
    subprocess.run(["mount", "-o", "remount,size=1m", small], check=True)
    with LiveRun(tmp_path, spec_of(**{"training.steps": 8})) as run:
        run.start()
        assert run.wait() == 0, run.story()
        assert len(run.events("attempt.started")) == 1 and run.troubles() == [], run.story()
        notes = [event.detail["text"] for event in run.events("run.message") if "no room" in event.detail["text"]]
        assert len(notes) == 1 and "wanted" in notes[0] and "checkpoint.snapshot_every_steps: 0" in notes[0], notes
        assert not any("snapshot_step" in event.detail for event in run.events("step"))
