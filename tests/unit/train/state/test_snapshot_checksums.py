"""Snapshots that changed in memory after they were taken are not restored."""

import socket
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from muster.agent.replicator.replication import decode_peer
from muster.agent.replicator.transfer import answer_read, receive_version
from muster.checkpoint_format.shards import ShardHeader, encode_header
from muster.checkpoint_format.snapshot_ring import Ring, Version, file_name
from muster.core.errors import CheckpointError
from muster.core.snapshots import SnapshotCopy, SnapshotNotIntact
from muster.core.types import Layout
from muster.protocol.ranks import RankContext, Restore, ShardSource
from muster.protocol.replicator_peers import ReadVersion, VersionFollows
from muster.train.state import snapshot
from muster.train.state.snapshot import Snapshots
from muster.train.state.snapshot_restore import restored
from muster.transport.stream import Stream

STATE = {"model.w": torch.arange(12, dtype=torch.float32).view(3, 4), "optimizer.m.w": torch.ones(3, 4)}


def context(folder: Path, **changes: Any) -> RankContext:
    here = {"rank": 0, "local_rank": 0, "world_size": 1, "local_world_size": 1, "layout": Layout(), **changes}
    return RankContext(
        run_id="r", run_dir=str(folder), attempt=3, host="h", master_addr="", master_port=1,
        snapshot_dir=str(folder), **here,
    )  # fmt: skip


def taken(folder: Path, step: int = 7) -> tuple[Path, Ring]:
    """A snapshot of ``STATE``."""
    Snapshots(context(folder), STATE).save(step, STATE)
    path = folder / file_name("own", "r1s1t1p1c1e1", 0)
    return path, Ring.open(path, writable=True)


def source(path: Path, *, rank: int = 0, layout: Layout | None = None) -> ShardSource:
    copy = SnapshotCopy(step=7, attempt=3, rank=rank, layout=(layout or Layout()).key, host="host-4", tier="memory")
    return ShardSource(path=str(path), copy=copy)


def restore(path: Path, **changes: Any) -> Restore:
    return Restore(step=7, attempt=3, sources={0: source(path)}, layout=Layout(), **changes)


def flip(ring: Ring) -> None:
    version = ring.find(7, 3)
    assert version is not None
    ring.slot(version.slot)[5] ^= 4


def test_what_was_taken_comes_back(tmp_path: Path) -> None:
    path, _ = taken(tmp_path)
    found, _ = restored(context(tmp_path), restore(path), lambda: STATE)
    assert all(torch.equal(found[name], tensor) for name, tensor in STATE.items())


def test_a_large_version_counts_when_its_checksum_is_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Until then there is the version before; nothing is ever without a checksum."""
    monkeypatch.setattr(snapshot, "INLINE_BYTES", 0)
    computes = threading.Event()
    commit = Ring.commit

    def slow(ring: Ring, slot: int, **identity: Any) -> Version:
        computes.wait(10)
        return commit(ring, slot, **identity)

    monkeypatch.setattr(Ring, "commit", slow)
    taken = Snapshots(context(tmp_path), STATE)
    ring = Ring.open(snapshot.own_path(context(tmp_path)))
    computes.set()
    taken.save(6, STATE)
    taken.settle()
    computes.clear()
    taken.save(7, STATE)
    assert [version.step for version in ring.versions()] == [6] and taken.newest_steps() == {"snapshot_step": 6}
    computes.set()
    taken.save(8, STATE)  # waits for 7, which is protected
    taken.settle()
    assert [version.step for version in ring.versions()] == [8, 7] and taken.newest_steps() == {"snapshot_step": 8}


@pytest.mark.parametrize("layout", [Layout(), Layout(dp_shard=2)])
def test_one_flipped_bit_is_refused_by_name_in_any_layout(tmp_path: Path, layout: Layout) -> None:
    path, ring = taken(tmp_path)
    flip(ring)
    damaged = r"own\.r1s1t1p1c1e1\.0\.ring.* step 7 of attempt 3 of rank 0 does not match its checksum"
    with pytest.raises(SnapshotNotIntact, match=damaged) as caught:
        restored(context(tmp_path, layout=layout), restore(path), lambda: STATE)
    assert caught.value.copies == (source(path).copy,)


@pytest.mark.parametrize(
    "change", [{"run_id": "another"}, {"layout": Layout(dp_shard=2)}, {"rank": 1}], ids=["run", "layout", "rank"]
)
def test_a_whole_snapshot_of_another_run_layout_or_rank_is_refused(tmp_path: Path, change: dict[str, Any]) -> None:
    path, ring = taken(tmp_path)
    version = ring.find(7, 3)
    assert version is not None
    header = ring.shard_header()
    layout, run_id = change.get("layout", Layout()), change.get("run_id", "r")
    other = Ring.create(
        tmp_path / "other",
        header=encode_header(
            ShardHeader(run_id=run_id, rank=-1, layout=layout, tensors=header.tensors, extra=header.extra)
        ),
        slot_bytes=ring.slot_bytes,
    )
    slot = other.begin()
    other.slot(slot)[:] = ring.slot(version.slot)
    other.commit(slot, step=7, attempt=3, rank=change.get("rank", 0))
    (tmp_path / "other").rename(path)
    with pytest.raises(SnapshotNotIntact, match="is another snapshot"):
        restored(context(tmp_path), restore(path), lambda: STATE)


@pytest.mark.parametrize("share", [True, False])
def test_ranks_of_a_host_share_the_comparing_where_all_of_them_restore(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, share: bool
) -> None:
    """Another layout: every rank opens every file; each file is read whole by one of them, else by each."""
    checked: list[str] = []
    monkeypatch.setattr(Ring, "verify", lambda ring, version: checked.append(ring.path.name))
    paths = {}
    layout = Layout(dp_shard=4)
    header = encode_header(ShardHeader(run_id="r", rank=-1, layout=layout, tensors=()))
    for rank in range(4):
        path = tmp_path / file_name("own", "r1s4t1p1c1e1", rank)
        ring = Ring.create(path, header=header, slot_bytes=64)
        ring.commit(ring.begin(), step=7, attempt=3, rank=rank)
        paths[rank] = path
    sources = {rank: source(path, rank=rank, layout=layout) for rank, path in paths.items()}
    given = Restore(step=7, attempt=3, sources=sources, layout=layout, share_verification=share)
    for local_rank in range(3):
        here = context(tmp_path, layout=Layout(dp_shard=3), rank=local_rank, local_rank=local_rank, local_world_size=3)
        restored(here, given, dict)
    assert sorted(checked) == sorted(path.name for path in paths.values() for _ in range(1 if share else 3))


# ---------------------------------------------------------------- on its way to another host


def copied(ring: Ring, target: Path, *, between: bytes | None = None) -> list[str]:
    """What sender and receiver raise when ``ring``'s version is copied; ``between``: what arrives for its bytes."""
    ours, theirs = socket.socketpair()
    raised: list[str] = []

    def serve() -> None:
        with ours:
            stream = Stream(ours, b"token", server=True, decode=decode_peer)
            if between is not None:
                stream.send_bytes = lambda data: ours.sendall(between)  # type: ignore[method-assign,assignment,return-value]
            request = stream.receive()
            assert isinstance(request, ReadVersion)
            try:
                answer_read(ring, request, stream)
            except CheckpointError as error:
                raised.append(str(error))

    thread = threading.Thread(target=serve)
    thread.start()
    with theirs:
        stream = Stream(theirs, b"token", server=False, decode=decode_peer)
        stream.send(ReadVersion(file=ring.path.name, copy=source(ring.path).copy))
        offer = stream.receive()
        assert isinstance(offer, VersionFollows)
        try:
            receive_version(target, offer, stream)
        except CheckpointError as error:
            raised.append(str(error))
    thread.join()
    return raised


def test_a_twins_ring_arrives_as_what_the_twin_took(tmp_path: Path) -> None:
    """A rank that took over a twin's ring holds versions of two ranks; the supervisor knows them by the file's."""
    path = tmp_path / file_name("own", "r1s1t1p1c1e1", 0)
    header = encode_header(ShardHeader(run_id="r", rank=-1, layout=Layout(), tensors=()))
    ring = Ring.create(path, header=header, slot_bytes=64)
    ring.commit(ring.begin(), step=7, attempt=3, rank=1)
    target = tmp_path / file_name("fetched", "r1s1t1p1c1e1", 0)
    assert copied(ring, target) == []
    assert [(found.step, found.rank) for found in Ring.open(target).versions()] == [(7, 1)]


def test_a_copy_is_verified_by_the_checksum_of_what_the_rank_took(tmp_path: Path) -> None:
    _, ring = taken(tmp_path)
    target = tmp_path / file_name("peer", "r1s1t1p1c1e1", 0)
    version = ring.find(7, 3)
    assert version is not None
    whole = bytes(ring.slot(version.slot))
    assert copied(ring, target) == []
    assert bytes(Ring.open(target).slot(0)) == whole
    target.unlink()
    rotten = bytearray(whole)
    rotten[5] ^= 4
    raised = copied(ring, target, between=bytes(rotten))
    assert len(raised) == 2 and all("does not match its checksum on arrival" in words for words in raised)
    assert Ring.open(target).versions() == []
    flip(ring)  # it rots before it is sent
    assert len(copied(ring, target)) == 2 and Ring.open(target).versions() == []
