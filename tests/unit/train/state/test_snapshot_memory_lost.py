"""The memory folder is deleted under a rank: snapshots go on once there is one again, and never in another's."""

import os
import shutil
import tempfile
from pathlib import Path

import pytest
import torch

from muster.checkpoint_format import snapshot_ring as rings
from muster.checkpoint_format.snapshot_ring import Ring, file_name, list_snapshots
from muster.core.types import Layout
from muster.protocol.ranks import RankContext
from muster.storage.memory_dir import MemoryDir
from muster.train.state.snapshot import Snapshots

STATE = {"w": torch.arange(4.0)}


@pytest.fixture
def memory(tmp_path, monkeypatch):
    with tempfile.TemporaryDirectory() as root:
        os.chmod(root, 0o1777)
        monkeypatch.setenv("MUSTER_MEMORY_DIR", root)
        yield MemoryDir.create(tmp_path, run_id="r", host="host-0")


@pytest.fixture
def notes():
    return []


@pytest.fixture
def found(tmp_path, memory, notes):
    context = RankContext(
        run_id="r", run_dir=str(tmp_path), attempt=1, host="host-0", rank=0, local_rank=0, world_size=1,
        local_world_size=1, layout=Layout(), master_addr="", master_port=0, snapshot_dir=str(memory.folder),
        replicate_snapshots=True,
    )  # fmt: skip
    made = Snapshots(context, STATE, report=notes.append)
    made.start(copies=True, replicated_step=-1)
    return made


def taken(found, *wanted):
    for step in wanted:
        found.save(step, STATE, copies_arrived=not found.copy_is_pending())


def held(memory):
    return sorted(snapshot.step for snapshot in list_snapshots(memory.folder))


def renewed(memory, tmp_path):
    memory.renew(tmp_path, run_id="r", host="host-0")


def test_steps_go_on_without_a_folder_and_snapshots_with_a_new_one(tmp_path, memory, found, notes):
    taken(found, 1, 2)
    assert held(memory) == [1, 2] and found.newest_steps()["snapshot_step"] == 2
    shutil.rmtree(memory.folder)
    taken(found, 3, 4)
    assert found.newest_steps() == {}, "nothing is held, and nothing is claimed"
    renewed(memory, tmp_path)
    assert held(memory) == []
    taken(found, 5)
    assert held(memory) == [5] and found.newest_steps() == {"snapshot_step": 5}
    ring = Ring.open(memory.path(file_name("own", Layout().key, 0)))
    ring.verify(ring.find(5, 1))
    assert notes == []


def test_copies_to_the_other_host_go_on_after_it(tmp_path, memory, found):
    taken(found, 1, 2)
    assert found.copy_is_pending()
    shutil.rmtree(memory.folder)
    renewed(memory, tmp_path)
    taken(found, 3)
    assert not found.copy_is_pending(), "what was ordered is gone: the other ranks do not wait for it"
    taken(found, 4)
    ring = Ring.open(memory.path(file_name("own", Layout().key, 0)), writable=True)
    assert ring.requested_copy() == (4, 1) and found.copy_is_pending()
    ring.note_copied(ring.find(4, 1), world=1)
    taken(found, 5)
    assert found.newest_steps() == {"snapshot_step": 5, "peer_step": 4} and ring.agreed() == 4


def test_a_deleted_ring_alone_is_made_again(memory, found):
    taken(found, 1)
    memory.unlink(file_name("own", Layout().key, 0))
    taken(found, 2)
    assert held(memory) == [2]


def test_a_folder_that_is_not_ours_alone_gets_nothing(tmp_path, memory, found):
    """Somebody was quicker with the name; the agent then takes another, and records it."""
    taken(found, 1)
    before = memory.folder
    shutil.rmtree(before)
    before.mkdir()
    before.chmod(0o777)
    taken(found, 2)
    assert list(before.iterdir()) == []
    renewed(memory, tmp_path)
    assert memory.folder != before
    taken(found, 3)
    assert held(memory) == [3] and list(before.iterdir()) == []


def test_without_room_for_another_ring_it_is_said_once(tmp_path, memory, found, notes, monkeypatch):
    taken(found, 1)
    shutil.rmtree(memory.folder)
    renewed(memory, tmp_path)
    monkeypatch.setattr(rings, "_free", lambda folder: 0)
    taken(found, 2, 3)
    (note,) = notes
    assert "no room for snapshots" in note and "rank 0" in note
    monkeypatch.undo()
    taken(found, 4)
    assert held(memory) == [4]


def test_the_lost_rings_memory_is_given_back_before_there_is_another(memory, found):
    taken(found, 1, 2, 3)
    shutil.rmtree(memory.folder)
    taken(found, 4)
    assert str(memory.folder) not in Path("/proc/self/maps").read_text()
