"""Snapshots that changed in memory after they were sealed are not restored."""

import json
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from muster.agent.replicator.main import read_version, write_version
from muster.checkpoint_format.snapshot_ring import Ring, file_name
from muster.core.errors import CheckpointError
from muster.core.types import Layout
from muster.protocol.ranks import RankContext, Restore
from muster.supervise.recovery.classify import classify_rank_exit
from muster.train.state import snapshot
from muster.train.state.snapshot import Snapshots, checksum_of, open_shard, restored

STATE = {"model.w": torch.arange(12, dtype=torch.float32).view(3, 4), "optimizer.m.w": torch.ones(3, 4)}


def context(folder: Path, **changes: Any) -> RankContext:
    here = {"rank": 0, "local_rank": 0, "world_size": 1, "local_world_size": 1, "layout": Layout(), **changes}
    return RankContext(
        run_id="r", run_dir=str(folder), attempt=3, host="h", master_addr="", master_port=1,
        snapshot_dir=str(folder), **here,
    )  # fmt: skip


def taken(folder: Path, step: int = 7) -> tuple[Path, Ring]:
    """A snapshot of ``STATE`` whose seal stands."""
    found = Snapshots(context(folder), STATE)
    found.save(step, STATE)
    sealer = found._checksum_writer
    sealer._queue.put(None)  # type: ignore[arg-type]  # the end of its thread
    assert sealer._thread is not None
    sealer._thread.join()
    path = folder / file_name("own", "r1s1t1p1c1e1", 0)
    return path, Ring.open(path, writable=True)


def restore(path: Path, **changes: Any) -> Restore:
    return Restore(step=7, attempt=3, shards={"0": str(path)}, layout=Layout(), **changes)


def flip(ring: Ring) -> None:
    version = ring.find(7, 3)
    assert version is not None
    ring.slot(version.slot)[5] ^= 4


def test_what_was_sealed_comes_back(tmp_path: Path) -> None:
    path, ring = taken(tmp_path)
    version = ring.find(7, 3)
    assert version is not None and ring.checksum(version) == checksum_of(ring.slot(version.slot)) != 0
    found = restored(context(tmp_path), restore(path), STATE)
    assert all(torch.equal(found[name], tensor) for name, tensor in STATE.items())


@pytest.mark.parametrize("layout", [Layout(), Layout(dp_shard=2)])
def test_one_flipped_bit_is_refused_by_name_in_any_layout(tmp_path: Path, layout: Layout) -> None:
    path, ring = taken(tmp_path)
    flip(ring)
    damaged = r"own\.r1s1t1p1c1e1\.0\.ring.* step 7 of attempt 3 does not match its checksum"
    with pytest.raises(CheckpointError, match=damaged):
        restored(context(tmp_path, layout=layout), restore(path), STATE)


def test_the_supervisor_takes_it_for_a_version_that_cannot_be_read(tmp_path: Path) -> None:
    path, ring = taken(tmp_path)
    flip(ring)
    with pytest.raises(CheckpointError) as caught:
        open_shard(path, restore(path))
    last = {"exception": "CheckpointError", "message": str(caught.value)}
    _, evidence, detail = classify_rank_exit("host-0", {"rank": 0, "code": 1, "last": last})
    assert detail["unreadable"] and "step 7 of attempt 3" in evidence


def test_a_version_that_nobody_sealed_is_taken_as_it_is(tmp_path: Path) -> None:
    path, ring = taken(tmp_path)
    version = ring.find(7, 3)
    assert version is not None
    ring.set_checksum(version, None)
    flip(ring)
    open_shard(path, restore(path))


def test_ranks_of_a_host_share_the_comparing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another layout: every rank opens every file; each file is read whole by one of them."""
    checked: list[str] = []
    monkeypatch.setattr(snapshot, "verify_checksum", lambda ring, version: checked.append(ring.path.name))
    paths = {}
    for rank in range(4):
        path = tmp_path / file_name("own", "r1s4t1p1c1e1", rank)
        ring = Ring.create(path, header=json.dumps({"tensors": []}).encode(), slot_bytes=64)
        ring.commit(ring.begin(), step=7, attempt=3)
        paths[str(rank)] = str(path)
    given = Restore(step=7, attempt=3, shards=paths, layout=Layout(dp_shard=4))
    for local_rank in range(3):
        here = context(tmp_path, layout=Layout(dp_shard=3), rank=local_rank, local_rank=local_rank, local_world_size=3)
        restored(here, given, {})
    assert sorted(checked) == sorted(Path(path).name for path in paths.values())


# ---------------------------------------------------------------- on its way to another host


class Wire:
    """One end of a conversation: what the other end says, by turns; what it is told."""

    def __init__(self, *answers: dict[str, Any], fill: Callable[[memoryview], None] = lambda view: None) -> None:
        self.answers, self.fill = list(answers), fill
        self.told: list[dict[str, Any]] = []

    def send(self, message: dict[str, Any]) -> None:
        self.told.append(message)

    def receive(self) -> dict[str, Any]:
        return self.answers.pop(0)

    def send_bytes(self, data: memoryview) -> int:
        return zlib.crc32(data)

    def receive_bytes(self, view: memoryview) -> int:
        self.fill(view)
        return zlib.crc32(view)


def test_a_copy_carries_the_seal_of_what_was_sealed_not_of_what_was_sent(tmp_path: Path) -> None:
    _, ring = taken(tmp_path)
    flip(ring)  # it rots before it is sent: the copy's checksum fits, its seal does not
    sent = Wire({"t": "go"}, {"t": "got"}, {"t": "held"})
    read_version(ring, 7, 3, sent)  # type: ignore[arg-type]
    end = sent.told[-1]
    version = ring.find(7, 3)
    assert version is not None and end["t"] == "whole" and end["seal"] == ring.checksum(version)
    rotten = bytes(ring.slot(version.slot))

    def fill(view: memoryview) -> None:
        view[:] = rotten

    name = file_name("peer", "r1s1t1p1c1e1", 0)
    copied = Wire(end, fill=fill)
    write_version(tmp_path, name, ring.header, ring.slot_bytes, copied, {"step": 7, "attempt": 3})  # type: ignore[arg-type]
    with pytest.raises(CheckpointError, match=r"peer\..* step 7 of attempt 3 does not match its checksum"):
        open_shard(tmp_path / name, restore(tmp_path / name, tier="peer"))
