"""What a host holds in memory, and what it holds no longer."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
from fakes.host import spec_of

from muster.agent.edge.snapshots import SnapshotStore
from muster.checkpoint_format.snapshot_ring import Ring, file_name
from muster.core.types import Layout
from muster.protocol.ranks import RankContext, Restore
from muster.protocol.to_agent import StartAttempt

KEY = "r1s2t1p1c1e1"
SPEC = spec_of()


@pytest.fixture
def store(tmp_path):
    for tier, rank in (("own", 0), ("peer", 1)):
        ring = Ring.create(tmp_path / file_name(tier, KEY, rank), header=b"{}", slot_bytes=64)
        for step in (8, 9):
            ring.commit(ring.begin(), step=step, attempt=2, rank=rank)
        ring.close()
    return SnapshotStore(memory=SimpleNamespace(folder=tmp_path), host="host-0")


def held(store):
    return {(copy.tier, copy.rank, copy.step) for copy in store.held()}


def test_a_damaged_copy_is_listed_no_more_and_all_others_are(store):
    damaged = next(copy for copy in store.held() if (copy.tier, copy.step) == ("peer", 9))
    assert damaged.host == "host-0"
    store.drop([damaged])
    assert held(store) == {("memory", 0, 8), ("memory", 0, 9), ("peer", 1, 8)}
    store.drop([damaged])  # told twice: by the rank, and by the supervisor


def test_what_is_another_hosts_or_gone_drops_nothing(store):
    before, copy = held(store), store.held()[0]
    store.drop([replace(copy, host="host-1"), replace(copy, rank=7), replace(copy, attempt=3), replace(copy, step=7)])
    assert held(store) == before


@pytest.mark.parametrize("kept, share", [((None, None), True), ((0, None), False)])
def test_files_are_verified_in_shares_only_where_no_rank_is_retained(store, kept, share):
    """One that is retained reads no file: nobody would verify its share."""
    contexts = tuple(
        RankContext(
            run_id="r", run_dir=".", attempt=3, host="host-0", rank=rank, local_rank=rank, world_size=2,
            local_world_size=2, layout=Layout(dp_replicate=2), master_addr="", master_port=1, kept_rank=kept_rank,
            restore=Restore(step=9, attempt=2, layout=Layout(dp_replicate=4)),
        )
        for rank, kept_rank in enumerate(kept)
    )  # fmt: skip
    begun = store.prepare(StartAttempt(attempt=3, contexts=contexts, fetch=(), peer=None), SPEC)
    assert [context.restore.share_verification for context in begun.contexts] == [share, share]


def test_copies_of_former_partners_go_once_the_new_ones_have_arrived(store, tmp_path):
    """The same layout, but other hosts copy here from now on."""

    def start(attempt, *copies_of):
        context = RankContext(
            run_id="r", run_dir=".", attempt=attempt, host="host-0", rank=0, local_rank=0, world_size=2,
            local_world_size=1, layout=Layout(dp_shard=2), master_addr="", master_port=1,
            restore=Restore(step=9, attempt=2, layout=Layout(dp_shard=2)),
        )  # fmt: skip
        order = StartAttempt(attempt=attempt, contexts=(context,), peer=("host-1", 1), copies_of=copies_of)
        assert store.prepare(order, SPEC).copies.copies_of == copies_of

    def commit(tier, rank, step, attempt):
        ring = Ring.create(tmp_path / file_name(tier, KEY, rank), header=b"{}", slot_bytes=64)
        version = ring.commit(ring.begin(), step=step, attempt=attempt, rank=rank)
        ring.note_copied(version)
        ring.close()

    assert Layout(dp_shard=2).key == KEY
    start(3, 1)
    commit("own", 0, 10, 3)
    commit("peer", 1, 10, 3)
    store.on_step(3)
    assert ("peer", 1, 10) in held(store)  # the partner is the same
    start(4, 2)
    commit("own", 0, 11, 4)
    commit("peer", 2, 10, 3)  # what the attempt started from
    store.on_step(4)
    assert ("peer", 1, 10) in held(store)
    commit("peer", 2, 11, 4)
    store.on_step(4)
    assert {copy[:2] for copy in held(store)} == {("memory", 0), ("peer", 2)}
