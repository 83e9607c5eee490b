"""A rank that waits for a fetched snapshot hears at once that none will come."""

import time

import pytest
from waiting import eventually

pytest.importorskip("torch")

import torch
from fakes.replicators import serving

from muster.agent.replicator import main as replicator_main
from muster.agent.replicator.main import Replicator
from muster.checkpoint_format.shards import ShardHeader, encode_header, pack
from muster.checkpoint_format.snapshot_ring import (
    NoRoom,
    Ring,
    file_name,
    forget_refusal,
    list_snapshots,
    refusal,
    refuse,
)
from muster.core.errors import BackendError
from muster.core.snapshots import SnapshotCopy, SnapshotNotIntact
from muster.core.types import Layout
from muster.protocol.ranks import RankContext, Restore, ShardSource
from muster.protocol.replicator_orders import FetchVersion
from muster.train.state import snapshot_restore
from muster.train.state.snapshot import Snapshots
from muster.train.state.snapshot_restore import open_shard, restored

LAYOUT = Layout(dp_shard=2)
WANTED = Restore(step=9, attempt=1, layout=LAYOUT)


def source(path, rank=1, layout=LAYOUT):
    copy = SnapshotCopy(step=9, attempt=1, rank=rank, layout=layout.key, host="host-2", tier="memory")
    return ShardSource(path=str(path), copy=copy)


def test_a_refusal_ends_the_wait(tmp_path):
    path = tmp_path / "fetched.r1s2t1p1c1e1.1.ring"
    refuse(path, "it is no longer there", of_copy=True)
    began = time.monotonic()
    with pytest.raises(SnapshotNotIntact, match="step 9 could not be fetched: it is no longer there") as caught:
        open_shard(source(path), WANTED, run_id="r")
    assert caught.value.copies == (source(path).copy,)
    assert time.monotonic() - began < 30  # it would wait for a minute
    forget_refusal(path)
    assert refusal(path) is None


def test_trouble_on_the_way_says_nothing_about_the_copy(tmp_path):
    """Rejected, an intact copy would be given up for an older step."""
    path = tmp_path / "fetched.r1s2t1p1c1e1.1.ring"
    refuse(path, "Connection refused", of_copy=False)
    with pytest.raises(BackendError, match="step 9 could not be fetched: Connection refused"):
        open_shard(source(path), WANTED, run_id="r")


def test_nor_does_a_fetch_that_never_ends(tmp_path, monkeypatch):
    monkeypatch.setattr(snapshot_restore, "_FETCH_TIMEOUT_S", 0.05)
    with pytest.raises(BackendError, match=r"step 9 was not fetched within 0\.05 s"):
        open_shard(source(tmp_path / "fetched.r1s2t1p1c1e1.1.ring"), WANTED, run_id="r")


@pytest.mark.parametrize("fault", ["nobody listens", "gone", "no room"])
def test_the_replicator_says_whether_the_copy_is_at_fault(tmp_path, monkeypatch, fault):
    ours = Replicator(memory=made(tmp_path / "ours"), token=b"t" * 64, bind="127.0.0.1")
    with serving(made(tmp_path / "theirs"), b"t" * 64) as theirs:
        fail_to_fetch(ours, theirs, monkeypatch, fault)
    ours.close()


def fail_to_fetch(ours, theirs, monkeypatch, fault):
    header = encode_header(
        ShardHeader(run_id="r", rank=-1, layout=LAYOUT, tensors=pack([("w", "int8", (2,), (0,), (2,))]))
    )
    ring = Ring.create(theirs.memory / "own.r1s2t1p1c1e1.1.ring", header=header, slot_bytes=64)
    ring.commit(ring.begin(), step=8 if fault == "gone" else 9, attempt=1, rank=1)
    if fault == "nobody listens":
        monkeypatch.setattr(replicator_main, "RESTART_S", 0.0)
    if fault == "no room":
        monkeypatch.setattr(replicator_main, "receive_version", raises(NoRoom(1 << 40, 0, ours.memory)))
    path = ours.memory / "fetched.r1s2t1p1c1e1.1.ring"
    address = ("127.0.0.1", 1) if fault == "nobody listens" else theirs.address
    order = FetchVersion(address=address, file="own.r1s2t1p1c1e1.1.ring", copy=source(path).copy, target=path.name)
    ours.handle(order)
    eventually(lambda: refusal(path) is not None)
    assert refusal(path)[1] == (fault == "gone")


def made(folder):
    folder.mkdir()
    return folder


def raises(error):
    def receive(*args, **kwargs):
        raise error

    return receive


def test_a_version_that_came_counts_for_more_than_a_refusal(tmp_path):
    path = tmp_path / "fetched.r1s2t1p1c1e1.1.ring"
    header = ShardHeader(run_id="r", rank=-1, layout=LAYOUT, tensors=pack([("w", "int8", (2,), (0,), (2,))]))
    ring = Ring.create(path, header=encode_header(header), slot_bytes=64)
    slot = ring.begin()
    ring.commit(slot, step=9, attempt=1, rank=1)
    refuse(path, "an earlier one failed", of_copy=True)
    _, chunks, found = open_shard(source(path), WANTED, run_id="r")
    assert (chunks, found) == (header.tensors, slot)


def test_what_should_lie_here_and_does_not_is_an_error_at_once(tmp_path):
    with pytest.raises(SnapshotNotIntact, match="no snapshot ring"):
        open_shard(source(tmp_path / "own.r1s2t1p1c1e1.1.ring"), WANTED, run_id="r")


def test_what_was_fetched_for_the_same_place_is_the_ranks_own_from_then_on(tmp_path):
    """Even a twin's: a swapped-in host counts as holding the state before it has taken a step."""
    (tmp_path / "twin").mkdir()
    state = {"w": torch.arange(4.0)}
    layout = Layout(dp_replicate=2)
    twin = Snapshots(context(tmp_path / "twin", layout=layout, rank=1), state)
    twin.save(9, state)
    fetched = tmp_path / file_name("fetched", layout.key, 0)
    (tmp_path / "twin" / file_name("own", layout.key, 1)).rename(fetched)
    restore = Restore(step=9, attempt=1, layout=layout, sources={0: source(fetched, 1, layout)})
    here = context(tmp_path, layout=layout, rank=0, attempt=2, restore=restore)
    assert restored(here, restore, lambda: state)[0]["w"].tolist() == [0, 1, 2, 3]
    assert [(held.tier, held.rank, held.step) for held in list_snapshots(tmp_path)] == [("memory", 0, 9)]
    Snapshots(here, state).save(10, state)
    assert [held.step for held in list_snapshots(tmp_path)] == [10, 9]


def context(folder, **changes):
    given = {"attempt": 1, "restore": None, **changes}
    return RankContext(
        run_id="r", run_dir=".", host="h", local_rank=0, world_size=2, local_world_size=1, master_addr="",
        master_port=1, snapshot_dir=str(folder), **given,
    )  # fmt: skip
