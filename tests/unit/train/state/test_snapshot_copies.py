"""Which version is copied next, and that nothing of the host's own memory waits for it."""

import pytest
import torch

from muster.checkpoint_format.snapshot_ring import NoRoom, Ring, file_name
from muster.core.types import Layout
from muster.protocol.ranks import RankContext
from muster.train.state import snapshot
from muster.train.state.snapshot import COPY_PATIENCE_S, Snapshots

STATE = {"w": torch.arange(4.0)}


@pytest.fixture
def now(monkeypatch):
    at = [100.0]
    monkeypatch.setattr(snapshot.time, "monotonic", lambda: at[0])
    return at


def snapshots(tmp_path, *, replicate_snapshots=True, notes=None):
    context = RankContext(
        run_id="r", run_dir=str(tmp_path), attempt=1, host="host-0", rank=0, local_rank=0, world_size=1,
        local_world_size=1, layout=Layout(), master_addr="", master_port=0, snapshot_dir=str(tmp_path),
        replicate_snapshots=replicate_snapshots,
    )  # fmt: skip
    made = Snapshots(context, STATE, report=(notes if notes is not None else []).append)
    made.start(copies=True, replicated_step=-1)
    return made


def ring(tmp_path):
    return Ring.open(tmp_path / file_name("own", Layout().key, 0), writable=True)


def steps(tmp_path):
    return sorted(version.step for version in ring(tmp_path).versions())


def taken(found, *wanted):
    """Steps as the loop takes them: it asks whether the copy is behind, then snapshots."""
    for step in wanted:
        found.save(step, STATE, copies_arrived=not found.copy_is_pending())


def copied(tmp_path, world=1):
    """The replicator says: the peer holds what was ordered."""
    made = ring(tmp_path)
    made.note_copied(made.find(*made.requested_copy()), world=world)
    return made.requested_copy()[0]


def test_every_step_is_taken_and_the_next_copy_is_ordered_when_the_last_one_is_there(tmp_path, now):
    found = snapshots(tmp_path)
    assert not found.copy_is_pending(), "nothing was ordered yet"
    taken(found, 1, 2, 3, 4, 5)
    assert found.copy_is_pending() and ring(tmp_path).requested_copy()[0] == 1
    assert found.newest_steps() == {"snapshot_step": 5}
    assert steps(tmp_path) == [1, 4, 5], "what is being copied is protected"
    assert copied(tmp_path) == 1
    assert not found.copy_is_pending()
    taken(found, 6)
    assert ring(tmp_path).requested_copy()[0] == 6 and ring(tmp_path).agreed() == 1
    assert found.newest_steps() == {"snapshot_step": 6, "peer_step": 1}


def test_a_fourth_slot_is_reserved_only_where_a_copy_takes_longer_than_a_step(tmp_path, now):
    found = snapshots(tmp_path)
    for step in range(1, 8):
        taken(found, step)
        copied(tmp_path)
    assert ring(tmp_path).slots == 3
    taken(found, 8, 9, 10, 11)  # 8 is ordered, 7 is what the peer has
    assert ring(tmp_path).slots == 4 and steps(tmp_path) == [7, 8, 10, 11]


def test_where_the_fourth_slot_finds_no_room_the_newest_is_written_over(tmp_path, now, monkeypatch):
    found = snapshots(tmp_path)
    taken(found, 1)
    copied(tmp_path)
    taken(found, 2)

    def full(ring, slots):
        raise NoRoom(1, 0, tmp_path)

    monkeypatch.setattr(Ring, "grow", full)
    taken(found, 3, 4, 5)
    assert steps(tmp_path) == [1, 2, 5], "what a lost host would cost comes before what a lost rank would"


def test_an_agreement_that_was_begun_before_an_order_is_not_about_it(tmp_path, now):
    found = snapshots(tmp_path)
    found.save(1, STATE, copies_arrived=True)
    assert ring(tmp_path).requested_copy()[0] == -1, "nobody had been asked"
    taken(found, 2)
    found.save(3, STATE, copies_arrived=True)
    assert ring(tmp_path).requested_copy()[0] == 2 and ring(tmp_path).agreed() == -1


def test_what_another_worlds_peer_held_is_no_copy_in_this_one(tmp_path, now):
    found = snapshots(tmp_path)
    taken(found, 1)
    copied(tmp_path, world=0)
    assert found.copy_is_pending()


def test_a_copy_that_does_not_come_is_said_once_until_one_comes(tmp_path, now):
    notes = []
    found = snapshots(tmp_path, notes=notes)
    taken(found, 1)
    now[0] += COPY_PATIENCE_S + 1
    taken(found, 2, 3, 4)
    assert len(notes) == 1 and "step 1 has not reached the other host" in notes[0]
    copied(tmp_path)
    taken(found, 5)
    now[0] += COPY_PATIENCE_S + 1
    taken(found, 6, 7)
    assert len(notes) == 2 and "step 5" in notes[1] and "it has step 1" in notes[1]


def test_without_a_peer_two_slots_do(tmp_path, now):
    found = snapshots(tmp_path, replicate_snapshots=False)
    taken(found, 1, 2, 3)
    assert ring(tmp_path).slots == 2 and steps(tmp_path) == [2, 3] and not found.copy_is_pending()
