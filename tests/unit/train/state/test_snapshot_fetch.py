"""A rank that waits for a fetched snapshot hears at once that none will come."""

import time

import pytest

pytest.importorskip("torch")

import torch

from muster.checkpoint_format.shards import ShardHeader, encode_header, pack
from muster.checkpoint_format.snapshot_ring import Ring, file_name, forget_refusal, list_snapshots, refusal, refuse
from muster.core.snapshots import SnapshotCopy, SnapshotNotIntact
from muster.core.types import Layout
from muster.protocol.ranks import RankContext, Restore, ShardSource
from muster.train.state.snapshot import Snapshots
from muster.train.state.snapshot_restore import open_shard, restored

LAYOUT = Layout(dp_shard=2)
WANTED = Restore(step=9, attempt=1, layout=LAYOUT)


def source(path, rank=1, layout=LAYOUT):
    copy = SnapshotCopy(step=9, attempt=1, rank=rank, layout=layout.key, host="host-2", tier="memory")
    return ShardSource(path=str(path), copy=copy)


def test_a_refusal_ends_the_wait(tmp_path):
    path = tmp_path / "fetched.r1s2t1p1c1e1.1.ring"
    refuse(path, "host-2 closed the connection")
    began = time.monotonic()
    with pytest.raises(SnapshotNotIntact, match="step 9 could not be fetched: host-2 closed the connection") as caught:
        open_shard(source(path), WANTED, run_id="r")
    assert caught.value.copies == (source(path).copy,)
    assert time.monotonic() - began < 30  # it would wait for a minute
    forget_refusal(path)
    assert refusal(path) is None


def test_a_version_that_came_counts_for_more_than_a_refusal(tmp_path):
    path = tmp_path / "fetched.r1s2t1p1c1e1.1.ring"
    header = ShardHeader(run_id="r", rank=-1, layout=LAYOUT, tensors=pack([("w", "int8", (2,), (0,), (2,))]))
    ring = Ring.create(path, header=encode_header(header), slot_bytes=64)
    slot = ring.begin()
    ring.commit(slot, step=9, attempt=1, rank=1)
    refuse(path, "an earlier one failed")
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
    assert restored(here, restore, state)[0]["w"].tolist() == [0, 1, 2, 3]
    assert [(held.tier, held.rank, held.step) for held in list_snapshots(tmp_path)] == [("memory", 0, 9)]
    Snapshots(here, state).save(10, state)
    assert [held.step for held in list_snapshots(tmp_path)] == [10, 9]


def context(folder, **changes):
    given = {"attempt": 1, "restore": None, **changes}
    return RankContext(
        run_id="r", run_dir=".", host="h", local_rank=0, world_size=2, local_world_size=1, master_addr="",
        master_port=1, snapshot_dir=str(folder), **given,
    )  # fmt: skip
