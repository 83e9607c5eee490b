"""What ``muster checkpoints`` says of every tier, on rings and markers laid out by hand."""

import json
import tempfile
import time

import pytest

from muster.app.inspect.checkpoints import checkpoints, missing_ranks
from muster.checkpoint_format import manifest
from muster.checkpoint_format.checksum import checksum_of
from muster.checkpoint_format.manifest import Manifest
from muster.checkpoint_format.shard_file import StoredFile
from muster.checkpoint_format.snapshot_ring import Ring, file_name
from muster.cli.main import run as command
from muster.config.spec import RunSpec
from muster.core.event_log import EventLog
from muster.core.types import Layout
from muster.storage import run_registry
from muster.storage.memory_dir import MemoryDir
from muster.storage.store import open_store

RESOLVED = RunSpec.model_validate({"name": "c", "model": {"config": {}}, "data": {"sources": [{"type": "random"}]}})
LAYOUT = Layout(dp_shard=2)
STEP = {"loss": 2.0, "grad_norm": 1.0, "learning_rate": 0.1, "tokens": 50, "supervised_tokens": 50,
        "padding_tokens": 0, "step_ns": 1_000}  # fmt: skip


@pytest.fixture
def place(tmp_path, monkeypatch):
    monkeypatch.setenv("MUSTER_HOME", str(tmp_path / "home"))
    with tempfile.TemporaryDirectory() as memory:  # a short path, because of the sockets in it
        monkeypatch.setenv("MUSTER_MEMORY_DIR", memory)
        yield run_registry.create("c-1", tmp_path / "run", run_file="name: c\n", resolved=RESOLVED.model_dump_json())


def hold(place, host, rank, *steps, tier="own", layout=LAYOUT, attempt=1):
    """A host's memory with these steps' snapshots of a rank."""
    folder = MemoryDir.of_host(place.path, run_id=place.run_id, host=host).folder
    ring = Ring.create(folder / file_name(tier, layout.key, rank), header=b"{}", slot_bytes=1 << 20)
    for step in steps:
        ring.commit(ring.begin(), step=step, attempt=attempt, rank=rank)
    ring.close()


def save(place, step, *, attempt=1, data=b"0123456789"):
    found = Manifest(
        run_id=place.run_id, attempt=attempt, step=step, layout=LAYOUT, prefix=manifest.step_prefix(step, attempt),
        files=(StoredFile(name="rank-00000.shard", bytes=len(data), checksum=checksum_of(data)),), bytes=len(data),
        index=StoredFile(name="index.json", bytes=2, checksum=checksum_of(b"{}")),
        created_ns=1, version="0", directory=str(place.checkpoints),
    )  # fmt: skip
    folder = place.checkpoints / found.prefix
    folder.mkdir(parents=True)
    (folder / "rank-00000.shard").write_bytes(data)
    (folder / "index.json").write_bytes(b"{}")
    manifest.claim(open_store(), str(place.checkpoints), run_id=place.run_id, attempt=attempt)
    manifest.commit(open_store(), found)
    return folder


def seen(found):
    return [(each.step, each.tier, each.complete, each.used) for each in found.versions]


def test_the_newest_step_that_is_whole_across_tiers_is_the_one(place):
    save(place, 5)
    hold(place, "host-0", 0, 6, 7, 8)
    hold(place, "host-1", 1, 6, 7)
    hold(place, "host-1", 0, 6, tier="peer")
    found = checkpoints("c-1")
    assert seen(found) == [
        (8, "memory", False, False),
        (7, "memory", True, True),
        (6, "memory", True, False),
        (6, "peer", False, False),
        (5, "disk", True, False),
    ]
    newest = found.versions[0]
    assert (newest.ranks, newest.missing, newest.hosts) == ((0,), (1,), ("host-0",))
    assert found.versions[1].hosts == ("host-0", "host-1") and found.versions[1].bytes == 2 << 20
    assert found.to_json()["would_use"] == {"step": 7, "tier": "memory"}


def test_a_lost_host_s_shard_is_taken_from_its_peer(place):
    save(place, 5)
    hold(place, "host-1", 1, 6, 7)
    hold(place, "host-1", 0, 6, tier="peer")
    used = {(each.step, each.tier) for each in checkpoints("c-1").versions if each.used}
    assert used == {(6, "memory"), (6, "peer")}


def test_versions_never_mix_steps_attempts_or_layouts(place):
    save(place, 2)
    hold(place, "host-0", 0, 4, attempt=1)
    hold(place, "host-1", 1, 4, attempt=2)
    hold(place, "host-1", 1, 3, attempt=1)
    hold(place, "host-2", 1, 4, attempt=1, layout=Layout(dp_shard=3))
    found = checkpoints("c-1")
    assert [each.used for each in found.versions].count(True) == 1
    assert found.used.tier == "disk" and found.used.step == 2


def test_a_newer_save_beats_memory_and_a_short_one_is_passed_over(place):
    save(place, 9)
    (save(place, 12) / "rank-00000.shard").write_bytes(b"0123")
    hold(place, "host-0", 0, 8, layout=Layout())
    found = checkpoints("c-1")
    assert seen(found) == [(12, "disk", False, False), (9, "disk", True, True), (8, "memory", True, False)]
    assert "truncated" in found.versions[0].problem


def test_of_one_step_the_memory_is_taken_and_its_age_is_the_step_s(place):
    save(place, 3)
    hold(place, "host-0", 0, 3, layout=Layout())
    log = EventLog(run_id=place.run_id, directory=place.events, writer="host-0", attempt=1)
    log.append("step", rank=0, step=3, wall_ns=time.time_ns() - 5_000_000_000, detail=STEP)
    log.append("step", rank=0, step=4, wall_ns=time.time_ns(), detail=STEP)
    log.close()
    found = checkpoints("c-1")
    assert found.used.tier == "memory" and 5 <= found.age_s(found.used) < 60


def test_a_replica_s_shard_stands_in_for_its_twin():
    layout = Layout(dp_replicate=2, dp_shard=2)
    assert missing_ranks(layout, {0, 3}) == [] and missing_ranks(layout, {0, 2}) == [1, 3]


def test_the_command_marks_it_and_says_who_is_missing(place, capsys):
    assert command(["checkpoints", "c-1"]) == 0
    told = capsys.readouterr()
    assert told.out == "" and "start from the beginning" in told.err
    save(place, 5)
    hold(place, "host-0", 0, 6)
    assert command(["checkpoints", "c-1"]) == 0
    head, memory, disk = capsys.readouterr().out.splitlines()
    assert head.split() == ["step", "attempt", "tier", "age", "held-out", "loss", "size", "layout", "whole", "where"]
    assert "no: without rank 1" in memory and memory.endswith("host-0")
    assert disk.startswith(">") and "yes" in disk and "step-00000005.a1" in disk
    assert command(["checkpoints", "c-1", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [(each["tier"], each["missing"], each["used"]) for each in found["versions"]] == [
        ("memory", [1], False), ("disk", [], True)
    ]  # fmt: skip
    assert found["committed"][0]["step"] == 5
