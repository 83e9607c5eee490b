"""Snapshot rings: a version is whole or it is not there."""

import pytest

from muster.checkpoint_format.snapshot_ring import NoRoom, Ring, SnapshotInfo, file_name, list_snapshots
from muster.core.errors import CheckpointError


def write(ring, step, attempt, byte):
    slot = ring.begin()
    ring.slot(slot)[:] = bytes([byte]) * ring.slot_bytes
    ring.commit(slot, step=step, attempt=attempt, rank=0)
    return slot


def versions(ring):
    return [(version.step, version.attempt) for version in ring.versions()]


def test_versions_come_newest_first_and_the_oldest_slot_is_taken_next(tmp_path):
    ring = Ring.create(tmp_path / "own.r1s2t1p1c1e1.0.ring", header=b"{}", slot_bytes=100)
    for step in range(1, 6):
        write(ring, step, 1, step)
    assert versions(ring) == [(5, 1), (4, 1), (3, 1)]
    newest = ring.find(5, 1)
    assert bytes(ring.slot(newest.slot)) == b"\x05" * 100


def test_a_slot_being_written_is_no_version(tmp_path):
    path = tmp_path / "own.r1s2t1p1c1e1.0.ring"
    ring = Ring.create(path, header=b"{}", slot_bytes=10)
    write(ring, 1, 1, 1)
    ring.begin()  # and the writer dies here
    assert versions(Ring.open(path)) == [(1, 1)]


def test_a_ring_of_the_same_shape_is_kept_and_another_replaces_it(tmp_path):
    path = tmp_path / "own.r1s2t1p1c1e1.0.ring"
    write(Ring.create(path, header=b"{}", slot_bytes=10), 7, 2, 1)
    assert versions(Ring.create(path, header=b"{}", slot_bytes=10)) == [(7, 2)]
    assert versions(Ring.create(path, header=b"{}", slot_bytes=20)) == []


def test_what_was_given_up_is_forgotten(tmp_path):
    ring = Ring.create(tmp_path / "own.r1s2t1p1c1e1.0.ring", header=b"{}", slot_bytes=10)
    write(ring, 4, 1, 1)
    write(ring, 5, 1, 1)
    write(ring, 4, 2, 1)
    ring.forget_after(4, attempt=2)
    assert versions(ring) == [(4, 2)]


def test_damaged_files_are_named_or_passed_over(tmp_path):
    bad = tmp_path / file_name("own", "r1s1t1p1c1e1", 0)
    bad.write_bytes(b"not a ring at all, but long enough to hold a header of one")
    with pytest.raises(CheckpointError, match=r"not a snapshot ring|no snapshot ring"):
        Ring.open(bad)
    good = Ring.create(tmp_path / file_name("own", "r1s1t1p1c1e1", 1), header=b"{}", slot_bytes=10_000)
    write(good, 3, 1, 1)
    torn = tmp_path / file_name("peer", "r1s1t1p1c1e1", 2)
    torn.write_bytes((tmp_path / file_name("own", "r1s1t1p1c1e1", 1)).read_bytes()[:5000])
    write(Ring.create(tmp_path / file_name("fetched", "r1s1t1p1c1e1", 3), header=b"{}", slot_bytes=10), 9, 1, 1)
    expected = SnapshotInfo(tier="memory", layout="r1s1t1p1c1e1", rank=1, step=3, attempt=1)
    assert list(list_snapshots(tmp_path)) == [expected]


def test_no_room_is_said_before_the_first_write(tmp_path):
    with pytest.raises(CheckpointError, match="no room"):
        Ring.create(tmp_path / "own.r1s1t1p1c1e1.0.ring", header=b"{}", slot_bytes=1 << 50)
    assert list(tmp_path.iterdir()) == []


def test_no_version_is_without_a_checksum_and_each_is_verified_by_its_own(tmp_path):
    path = tmp_path / "own.r1s1t1p1c1e1.0.ring"
    ring = Ring.create(path, header=b"{}", slot_bytes=10)
    write(ring, 1, 1, 1)
    first = ring.find(1, 1)
    ring.verify(first)
    assert Ring.open(path).checksum(first) == ring.checksum(first)
    for step in (2, 3, 4):  # the slot is taken again
        write(ring, step, 1, step)
    fourth = ring.find(4, 1)
    assert fourth.slot == first.slot and ring.checksum(first) is None
    with pytest.raises(CheckpointError, match="is no longer there"):
        ring.verify(first)
    ring.slot(fourth.slot)[3] ^= 1
    with pytest.raises(CheckpointError, match=r"step 4 of attempt 1 of rank 0 does not match its checksum"):
        ring.verify(fourth)
    ring.drop(fourth)
    assert versions(ring) == [(3, 1), (2, 1)]


@pytest.mark.parametrize("change", [{"step": 8}, {"attempt": 2}, {"rank": 1}])
def test_the_checksum_is_bound_to_step_attempt_and_rank(tmp_path, change):
    ring = Ring.create(tmp_path / "own.r1s1t1p1c1e1.0.ring", header=b"{}", slot_bytes=10)
    write(ring, 7, 1, 1)
    given = {"step": 7, "attempt": 1, "rank": 0}
    expected = ring.checksum(ring.find(7, 1))
    slot = ring.begin()
    ring.slot(slot)[:] = b"\x01" * 10
    with pytest.raises(CheckpointError, match="does not match its checksum on arrival"):
        ring.commit(slot, **{**given, **change}, expected=expected)
    assert versions(ring) == [(7, 1)]
    ring.commit(slot, **given, expected=expected)


def test_the_checksum_covers_the_header(tmp_path):
    path = tmp_path / "own.r1s1t1p1c1e1.0.ring"
    ring = Ring.create(path, header=b'{"byte_offset":28736}', slot_bytes=10)
    write(ring, 7, 1, 1)
    data = path.read_bytes()
    path.write_bytes(data.replace(b"28736", b"68736"))
    changed = Ring.open(path)
    with pytest.raises(CheckpointError, match="does not match its checksum"):
        changed.verify(changed.find(7, 1))


def test_a_ring_of_an_older_format_is_refused_by_number(tmp_path):
    path = tmp_path / "own.r1s1t1p1c1e1.0.ring"
    Ring.create(path, header=b"{}", slot_bytes=10)
    path.write_bytes(path.read_bytes().replace(b"MUSTRNG4", b"MUSTRNG3"))
    with pytest.raises(CheckpointError, match="a snapshot ring of format 3, this version reads 4"):
        Ring.open(path)


def test_a_link_is_not_followed(tmp_path):
    path = tmp_path / "own.r1s1t1p1c1e1.0.ring"
    Ring.create(tmp_path / "elsewhere", header=b"{}", slot_bytes=10)
    path.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(CheckpointError, match="no snapshot ring"):
        Ring.open(path)


def test_a_ring_grows_and_keeps_what_it_holds_and_takes_memory_for_no_more(tmp_path):
    path = tmp_path / "own.r1s1t1p1c1e1.0.ring"
    ring = Ring.create(path, header=b"{}", slot_bytes=1 << 20, slots=1)
    write(ring, 5, 1, 7)
    assert ring.slots == 1 and path.stat().st_blocks * 512 < 2 << 20
    with pytest.raises(CheckpointError, match="spared"):
        ring.begin(spare=(5,))
    again = Ring.create(path, header=b"{}", slot_bytes=1 << 20, slots=2)
    assert again.slots == ring.slots == 2, "those who mapped it before see it too"
    write(again, 6, 1, 8)
    assert versions(ring) == [(6, 1), (5, 1)] and path.stat().st_blocks * 512 < 3 << 20
    ring.grow(1)
    assert ring.slots == 2
    assert again.next_slot(spare=(5, 6)) is None and again.next_slot(spare=(5,)) == 1


def test_growing_without_room_leaves_everything_as_it_is(tmp_path):
    path = tmp_path / "own.r1s1t1p1c1e1.0.ring"
    ring = Ring.create(path, header=b"{}", slot_bytes=1 << 40, slots=0)
    with pytest.raises(NoRoom, match=r"no room for snapshots in memory: 2199\.0 GB wanted"):
        Ring.create(path, header=b"{}", slot_bytes=1 << 40, slots=2)
    assert ring.slots == 0 and path.exists()


def test_marks_outlive_the_one_who_set_them(tmp_path):
    path = tmp_path / "own.r1s1t1p1c1e1.0.ring"
    ring = Ring.create(path, header=b"{}", slot_bytes=10)
    write(ring, 5, 1, 1)
    version = ring.find(5, 1)
    assert (ring.requested_copy(), ring.copied(), ring.agreed()) == ((-1, -1), (-1, -1), -1)
    ring.request_copy(version)
    ring.note_copied(version, world=3)
    ring.note_agreed(5)
    other = Ring.open(path)
    assert other.requested_copy() == other.copied() == other.copied(world=3) == (5, 1) and other.agreed() == 5
    assert other.copied(world=4) == (-1, -1), "another attempt's peer may be another host"
    ring.request_copy(None)
    assert other.requested_copy() == (-1, -1)


@pytest.mark.parametrize("number", [0, 1, 2], ids=["step", "attempt", "rank"])
def test_a_stamp_with_a_flipped_sign_is_no_version(tmp_path, number):
    """Every reader of a host's list refuses a negative number, and with it the whole list."""
    path = tmp_path / file_name("own", "r1s2t1p1c1e1", 1)
    ring = Ring.create(path, header=b"{}", slot_bytes=64)
    write(ring, 8, 2, 1)
    write(ring, 9, 2, 2)
    slot = ring.find(9, 2).slot
    ring.mapped[24 + 32 * (3 + slot) + 8 * number + 7] ^= 0x80
    assert [(found.step, found.attempt) for found in list_snapshots(tmp_path)] == [(8, 2)]
    assert ring.next_slot() == slot, "free again"
