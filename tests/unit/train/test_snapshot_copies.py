"""When the next snapshot may be taken: the last one's copy has reached the peer, or no copy comes any more."""

import pytest
import torch

from muster.core.nouns import Layout
from muster.core.ranks import RankContext
from muster.core.ring import Ring, file_name
from muster.train import snapshot
from muster.train.snapshot import COPY_PATIENCE_S, Snapshots

STATE = {"w": torch.arange(4.0)}


@pytest.fixture
def now(monkeypatch):
    at = [100.0]
    monkeypatch.setattr(snapshot.time, "monotonic", lambda: at[0])
    return at


def snapshots(tmp_path, *, peer_copy=True):
    context = RankContext(
        run_id="r", run_dir=str(tmp_path), attempt=1, host="host-0", rank=0, local_rank=0, world_size=1,
        local_world_size=1, layout=Layout(), master_addr="", master_port=0, snapshot_dir=str(tmp_path),
        peer_copy=peer_copy,
    )  # fmt: skip
    return Snapshots(context, STATE)


def copied(tmp_path, step):
    """The mover's word: the peer holds it."""
    ring = Ring.open(tmp_path / file_name("own", Layout().key, 0), writable=True)
    ring.note_copied(next(version for version in ring.versions() if version.step == step))
    ring.close()


def test_a_snapshot_waits_for_the_copy_of_the_one_before(tmp_path, now):
    taken = snapshots(tmp_path)
    assert not taken.behind(), "there is none yet"
    taken.save(1, STATE)
    assert taken.behind() and taken.held() == {"snapshot_step": 1}
    copied(tmp_path, 1)
    assert not taken.behind()
    taken.save(2, STATE)
    assert taken.held() == {"snapshot_step": 2, "peer_step": 1}


def test_where_no_copy_comes_the_hosts_own_memory_is_kept_up(tmp_path, now):
    taken = snapshots(tmp_path)
    taken.save(1, STATE)
    copied(tmp_path, 1)
    taken.save(2, STATE)
    now[0] += COPY_PATIENCE_S - 1
    assert taken.behind()
    now[0] += 1
    assert not taken.behind()
    taken.save(3, STATE)
    assert taken.held() == {"snapshot_step": 3, "peer_step": 1}, "the peer's is no newer for that"
    assert taken.behind(), "and the next one gets its chance"


def test_without_a_peer_nobody_waits(tmp_path, now):
    taken = snapshots(tmp_path, peer_copy=False)
    taken.save(1, STATE)
    assert not taken.behind()
