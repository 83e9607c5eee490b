"""Old snapshots in memory are dropped only once new ones exist."""

from muster.agent.replicator import snapshot_cleanup
from muster.checkpoint_format.snapshot_ring import Ring, file_name

OLD, NEW = "r1s4t1p1c1e1", "r1s3t1p1c1e1"


def ring(memory, layout, rank, *versions, tier="own"):
    made = Ring.create(memory / file_name(tier, layout, rank), header=b"{}", slot_bytes=64)
    for step, attempt in versions:
        made.commit(made.begin(), step=step, attempt=attempt, rank=rank)
    return made


def steps(memory, layout, rank, tier="own"):
    return [version.step for version in Ring.open(memory / file_name(tier, layout, rank)).versions()]


def test_an_attempt_has_snapshots_when_all_its_ranks_here_hold_a_version_and_the_peer_has_one(tmp_path):
    def has_snapshots(replicate_snapshots=True):
        return snapshot_cleanup.has_snapshots(
            tmp_path, layout=NEW, ranks=[0, 1], attempt=2, replicate_snapshots=replicate_snapshots
        )

    assert not has_snapshots()
    rings = [ring(tmp_path, NEW, rank, (9, 1)) for rank in (0, 1)]  # what they were restored from is no new version
    assert not has_snapshots(replicate_snapshots=False)
    for made in rings:
        made.commit(made.begin(), step=10, attempt=2, rank=0)
        assert not has_snapshots()
    assert has_snapshots(replicate_snapshots=False)
    for made in rings:
        made.note_copied(made.find(9, 1))  # an older attempt's copy may lie on a host that is gone
    assert not has_snapshots()
    for made in rings:
        made.note_copied(made.find(10, 2))
    assert has_snapshots()


def test_other_layouts_and_fetched_rings_are_dropped_separately(tmp_path):
    ring(tmp_path, OLD, 0, (9, 1))
    ring(tmp_path, OLD, 3, (9, 1), tier="peer")
    ring(tmp_path, NEW, 0, (10, 2))
    ring(tmp_path, OLD, 2, (9, 1), tier="fetched")
    (tmp_path / "fetched.r1s4t1p1c1e1.1.ring.failed").write_text("why")
    snapshot_cleanup.drop_fetched(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "own.r1s3t1p1c1e1.0.ring",
        "own.r1s4t1p1c1e1.0.ring",
        "peer.r1s4t1p1c1e1.3.ring",
    ]
    snapshot_cleanup.drop_other_layouts(tmp_path, keep={NEW})
    assert [path.name for path in tmp_path.iterdir()] == ["own.r1s3t1p1c1e1.0.ring"]


def test_abandoned_versions_are_dropped_in_other_layouts(tmp_path):
    ring(tmp_path, OLD, 0, (8, 1), (9, 1), (10, 1))
    ring(tmp_path, OLD, 3, (9, 1), (10, 1), tier="peer")
    ring(tmp_path, NEW, 0, (10, 1))
    (tmp_path / "own.r1s4t1p1c1e1.7.ring").write_bytes(b"torn")
    ring(tmp_path, "r2s4t1p1c1e1", 0, (7, 1))  # of a world before: what the new one begins from is newer
    snapshot_cleanup.begin_layout(tmp_path, layout=NEW, origin=OLD, step=9, attempt=1)
    assert not (tmp_path / "own.r2s4t1p1c1e1.0.ring").exists()
    assert steps(tmp_path, OLD, 0) == [9, 8]
    assert steps(tmp_path, OLD, 3, "peer") == [9]
    assert steps(tmp_path, NEW, 0) == [10]
    snapshot_cleanup.begin_layout(tmp_path, layout=NEW, origin=None, step=-1, attempt=0)  # no snapshot to start from
    assert [path.name for path in tmp_path.iterdir()] == ["own.r1s3t1p1c1e1.0.ring"]
