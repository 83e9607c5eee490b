"""Snapshots in memory become a checkpoint without any rank, and it restores in any layout."""

import dataclasses
import json
import subprocess
import sys

import pytest

torch = pytest.importorskip("torch")

from muster.agent.replicator.memory_flush import commit_flushed, flush  # noqa: E402
from muster.checkpoint.load import load_into, newest_valid  # noqa: E402
from muster.checkpoint_format import fences  # noqa: E402
from muster.checkpoint_format import manifest as manifests  # noqa: E402
from muster.checkpoint_format.shards import ShardHeader, encode_header  # noqa: E402
from muster.checkpoint_format.snapshot_ring import Ring, file_name  # noqa: E402
from muster.core.errors import CheckpointError, ConflictError  # noqa: E402
from muster.core.snapshots import SnapshotCopy, SnapshotNotIntact  # noqa: E402
from muster.core.types import Layout  # noqa: E402
from muster.protocol.to_agent import CommitFlushed, FlushShard, FlushSnapshots  # noqa: E402
from muster.storage.store import open_store  # noqa: E402
from muster.train.state.snapshot import chunks_of  # noqa: E402

LAYOUT = Layout(dp_shard=2)
EXTRA = {"data_fingerprint": "f00d"}


def whole():
    generator = torch.Generator().manual_seed(7)
    return {
        "model.w": torch.randn((7, 3), generator=generator),
        "model.half": torch.randn((3, 5), generator=generator).to(torch.bfloat16),
        "model.norm": torch.randn((4,), generator=generator),
        "optimizer.exp_avg.w": torch.randn((7, 3), generator=generator),
    }


def parts(rank):
    """What a rank of two holds, cut along the first axis; the norm is whole on both."""
    found, places = {}, {}
    for name, tensor in whole().items():
        cut = tensor.shape[0] if name == "model.norm" else -(-tensor.shape[0] // 2)
        begin = 0 if name == "model.norm" else rank * cut
        found[name] = tensor[begin : begin + cut].clone()
        places[name] = (list(tensor.shape), [begin] + [0] * (tensor.dim() - 1))
    return found, places


def ring_of(memory, rank, *, tier="own", step=12, attempt=3):
    """A ring as a rank's ``Snapshots`` leaves it."""
    memory.mkdir(exist_ok=True)
    tensors, places = parts(rank)
    held, slot_bytes = chunks_of(tensors)
    chunks = []
    for chunk in held:
        shape, offsets = places[chunk.name]
        chunks.append(dataclasses.replace(chunk, global_shape=tuple(shape), offsets=tuple(offsets)))
    header = ShardHeader(run_id="run", rank=-1, layout=LAYOUT, extra=EXTRA, tensors=tuple(chunks))
    ring = Ring.create(memory / file_name(tier, LAYOUT.key, rank), header=encode_header(header), slot_bytes=slot_bytes)
    slot = ring.begin()
    for chunk in chunks:
        data = tensors[chunk.name].contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        ring.slot(slot)[chunk.byte_offset : chunk.byte_offset + len(data)] = data
    ring.commit(slot, step=step, attempt=attempt, rank=rank)
    return ring


def version(tmp_path):
    return {"step": 12, "attempt": 3, "layout": LAYOUT.key, "uri": str(tmp_path / "checkpoints")}


def write(tmp_path, host, *ranks, tier="memory", **changes):
    """The files that a host flushes of these ranks."""
    held = [
        FlushShard(
            rank=rank,
            copy=SnapshotCopy(step=12, attempt=3, rank=rank, layout=LAYOUT.key, host=host, tier=tier),
        )
        for rank in ranks
    ]
    order = FlushSnapshots(**{**version(tmp_path), **changes}, ranks=tuple(held))
    return flush(order, tmp_path / host, run_id="run").files


def commit(tmp_path, files, fence=0):
    return commit_flushed(CommitFlushed(**version(tmp_path), files=tuple(files)), run_id="run", fence=fence)


def flushed_by_two_hosts(tmp_path):
    """Rank 0 from its own host's memory, rank 1 (whose host is gone) from the copy that a peer holds."""
    ring_of(tmp_path / "a", 0)
    ring_of(tmp_path / "b", 1, tier="peer")
    return write(tmp_path, "a", 0) + write(tmp_path, "b", 1, tier="peer")


def test_two_hosts_snapshots_restore_through_the_normal_reader(tmp_path):
    files = flushed_by_two_hosts(tmp_path)
    directory = str(tmp_path / "checkpoints")
    assert manifests.committed(open_store(), directory) == []  # nothing counts before the marker
    answer = commit(tmp_path, files, fence=5)
    wanted = whole()
    restored = {name: torch.zeros_like(tensor) for name, tensor in wanted.items()}
    found = newest_valid(open_store(), directory, state=restored)
    assert (found.step, found.attempt, found.extra, found.layout) == (12, 5, EXTRA, LAYOUT)
    assert (answer.uri, answer.bytes) == (found.uri, found.bytes)
    load_into(found, restored)
    assert all(torch.equal(restored[name], wanted[name]) for name in wanted)


def test_ranks_of_one_host_write_what_both_hold_once(tmp_path):
    ring_of(tmp_path / "a", 0)
    ring_of(tmp_path / "a", 1)
    files = write(tmp_path, "a", 0, 1)
    commit(tmp_path, files)
    (found,) = manifests.committed(open_store(), str(tmp_path / "checkpoints"))
    index = json.loads((tmp_path / "checkpoints" / found.prefix / "flushed-index.json").read_text())
    held = [entry[0] for item in index["files"] for entry in item["tensors"]]
    assert held.count("model.norm") == 1 and held.count("model.w") == 2
    assert manifests.damage(found) is None


def test_the_same_orders_twice_make_one_checkpoint(tmp_path):
    files = flushed_by_two_hosts(tmp_path)
    assert commit(tmp_path, files, fence=5) == commit(tmp_path, files, fence=5)
    assert write(tmp_path, "a", 0) == ()  # it stands: nothing is written over it
    assert len(manifests.committed(open_store(), str(tmp_path / "checkpoints"))) == 1


def test_what_is_not_whole_is_not_committed(tmp_path):
    files = flushed_by_two_hosts(tmp_path)
    with pytest.raises(CheckpointError, match="not the whole state"):
        commit(tmp_path, files[:1])
    missing = [dataclasses.replace(files[0], name="flushed-rank-00007.shard"), files[1]]
    with pytest.raises(CheckpointError, match="same folder"):
        commit(tmp_path, missing)
    short = [dataclasses.replace(files[0], bytes=files[0].bytes + 1), files[1]]
    with pytest.raises(CheckpointError, match="truncated"):
        commit(tmp_path, short)
    assert manifests.committed(open_store(), str(tmp_path / "checkpoints")) == []


def test_a_version_that_is_gone_or_goes_meanwhile_is_refused(tmp_path, monkeypatch):
    ring = ring_of(tmp_path / "a", 0)
    with pytest.raises(CheckpointError, match="no longer there"):
        write(tmp_path, "a", 0, step=11)
    from muster.agent.replicator import memory_flush as module

    real = module.write_shard

    def overwritten(uri, parts):
        found = real(uri, parts)
        ring.forget_after(11)  # as a living rank does when it takes the slot
        return found

    monkeypatch.setattr(module, "write_shard", overwritten)
    with pytest.raises(CheckpointError, match="overwritten"):
        write(tmp_path, "a", 0)


def test_bytes_that_are_not_what_was_sealed_are_not_written(tmp_path):
    ring = ring_of(tmp_path / "a", 0)
    found = ring.find(12, 3)
    ring.slot(found.slot)[7] ^= 0x20
    message = r"own\.r1s2t1p1c1e1\.0\.ring.* step 12 of attempt 3 of rank 0 does not match its checksum"
    with pytest.raises(SnapshotNotIntact, match=message) as caught:
        write(tmp_path, "a", 0)
    assert [(copy.host, copy.rank, copy.step) for copy in caught.value.copies] == [("a", 0, 12)]
    assert not list((tmp_path / "checkpoints").rglob("*.shard"))
    ring.slot(found.slot)[7] ^= 0x20
    assert len(write(tmp_path, "a", 0)) == 1


def test_the_replicator_verifies_checksums_without_torch():
    code = "import sys; import muster.agent.replicator.main; print([n for n in ('torch', 'numpy') if n in sys.modules])"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"


def test_a_newer_attempt_holds_the_folder(tmp_path):
    files = flushed_by_two_hosts(tmp_path)
    directory = str(tmp_path / "checkpoints")
    manifests.claim(open_store(), directory, run_id="run", attempt=6)
    with pytest.raises(ConflictError):
        commit(tmp_path, files, fence=5)
    assert fences.read(open_store(), directory).attempt == 6
    commit(tmp_path, files, fence=6)
    assert [found.attempt for found in manifests.committed(open_store(), directory)] == [6]
