"""No room for snapshots: fewer tiers, one note with numbers and a key, and nothing that lies there is touched."""

from types import SimpleNamespace

import pytest
import torch

from muster.checkpoint_format import snapshot_ring as rings
from muster.checkpoint_format.snapshot_ring import Ring, file_name
from muster.core.types import Layout
from muster.protocol.ranks import RankContext, Restore
from muster.train.state.snapshot import Snapshots
from muster.train.state.snapshot_tiers import open_together

STATE = {"w": torch.zeros(1 << 18)}  # 1 MiB
MIB = 1 << 20


@pytest.fixture
def room(monkeypatch):
    """Free bytes, less what the rings have taken."""

    def leave(folder, count):
        def free(_):
            return count - sum(path.stat().st_blocks * 512 for path in folder.glob("*.ring"))

        monkeypatch.setattr(rings, "_free", free)

    return leave


def context(folder, **changes):
    return RankContext(
        run_id="r", run_dir=str(folder), attempt=2, host="host-0", rank=0, local_rank=0, world_size=1,
        local_world_size=1, layout=Layout(), master_addr="", master_port=0, snapshot_dir=str(folder),
        **{"replicate_snapshots": True, **changes},
    )  # fmt: skip


def opened(folder, **changes):
    notes = []
    agent = SimpleNamespace(emit=lambda kind, *, text: notes.append(text))
    return open_together(context(folder, **changes), lambda: STATE, every_steps=1, group=None, agent=agent), notes


def test_where_there_is_room_nothing_is_said(tmp_path, room):
    room(tmp_path, 3 * MIB + 65536)
    found, notes = opened(tmp_path)
    assert found is not None and notes == [] and found._copies


def test_without_room_for_three_the_copies_go_first(tmp_path, room):
    room(tmp_path, 2 * MIB + 65536)
    found, (note,) = opened(tmp_path)
    assert found is not None and not found._copies
    assert "3.15 MB wanted, 2.16 MB free" in note and "checkpoint.replicate_snapshots: false" in note
    for step in (1, 2, 3):
        found.save(step, STATE, copies_arrived=not found.copy_is_pending())
    found.settle()
    assert found.newest_steps() == {"snapshot_step": 3}


def test_without_room_for_two_there_are_none_and_nothing_stays_behind(tmp_path, room):
    room(tmp_path, MIB)
    found, (note,) = opened(tmp_path, replicate_snapshots=False)
    assert found is None and "checkpoint.snapshot_every_steps: 0" in note
    assert list(tmp_path.iterdir()) == []


def test_what_the_attempt_starts_from_is_kept_where_there_is_no_room_for_more(tmp_path, room):
    """A swapped-in host fetched it, with a slot of its own, and another one does not fit."""
    made = Snapshots(context(tmp_path, replicate_snapshots=False), STATE)
    made.save(9, STATE)
    path = tmp_path / file_name("own", "r1s1t1p1c1e1", 0)
    whole = Ring.open(path)
    fetched = Ring.create(tmp_path / "fetched", header=whole.header, slot_bytes=whole.slot_bytes, slots=1)
    fetched.commit(fetched.begin(), step=9, attempt=2, rank=0)
    (tmp_path / "fetched").rename(path)
    room(tmp_path, MIB)
    found, (note,) = opened(tmp_path, restore=Restore(step=9, attempt=2, layout=Layout()))
    assert found is None and "no room" in note
    assert [version.step for version in Ring.open(path).versions()] == [9]
