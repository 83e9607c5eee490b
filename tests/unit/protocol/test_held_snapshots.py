"""Layouts for any number of ranks, and the choice of what to restore."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from muster.config.spec import Parallelism
from muster.core.layout import Layout, largest_layout, layout_for
from muster.core.snapshots import SnapshotCopy
from muster.protocol.held_snapshots import Choice, needed_shards, newest_complete


@pytest.mark.parametrize(
    ("given_axes", "ranks", "expected"),
    [
        ({}, 4, Layout(dp_shard=4)),
        ({}, 3, Layout(dp_shard=3)),
        ({"dp_replicate": 2}, 4, Layout(dp_replicate=2, dp_shard=2)),
        ({"dp_replicate": 2}, 3, Layout(dp_shard=3)),
        ({"tp": 2}, 4, Layout(dp_shard=2, tp=2)),
        ({"tp": 2}, 3, None),
        ({"dp_shard": 2, "dp_replicate": 2}, 2, Layout(dp_shard=2)),
        ({"dp_shard": 2, "dp_replicate": 2}, 6, Layout(dp_replicate=3, dp_shard=2)),
        ({"dp_shard": 4}, 3, Layout(dp_shard=3)),
        ({"dp_shard": 4}, 5, None),
        ({"dp_shard": 1, "dp_replicate": 3, "pp": 3}, 8, None),
        ({"dp_shard": 1, "dp_replicate": 3, "pp": 3}, 6, Layout(dp_replicate=2, pp=3)),
        ({"dp_shard": 3, "pp": 3}, 6, Layout(dp_shard=2, pp=3)),
        ({"pp": 3}, 2, None),
    ],
)
def test_layouts(given_axes, ranks, expected):
    assert layout_for(Parallelism(**given_axes).axes, ranks, resize=True) == expected


TWO_OF_THREE = {"dp_shard": 1, "dp_replicate": 2, "pp": 3}


@pytest.mark.parametrize(
    ("given_axes", "hosts", "per_host", "expected"),
    [
        ({"dp_shard": 4}, 5, 1, Layout(dp_shard=4)),
        ({"pp": 3}, 2, 1, Layout(pp=2)),
        ({"pp": 4, "tp": 2}, 3, 2, Layout(pp=3, tp=2)),
        ({"pp": 4, "tp": 2}, 5, 1, Layout(pp=2, tp=2)),
        ({"pp": 4, "tp": 2}, 1, 1, None),
        (TWO_OF_THREE, 3, 2, Layout(dp_replicate=2, pp=3)),
        (TWO_OF_THREE, 2, 2, Layout(dp_replicate=2, pp=2)),
        (TWO_OF_THREE, 1, 2, Layout(pp=2)),
        (TWO_OF_THREE, 5, 1, Layout(pp=3)),  # one whole replica; two hosts wait for the third
        (TWO_OF_THREE, 1, 1, Layout()),
        ({"dp_shard": 2, "pp": 3}, 2, 2, Layout(dp_shard=2, pp=2)),
        ({"pp": 3}, 2, 4, Layout(dp_shard=4, pp=2)),
        ({"pp": 4}, 3, 2, Layout(pp=4)),
    ],
)
def test_the_most_hosts_form_a_layout_with_the_stages_given_if_any_number_can(given_axes, hosts, per_host, expected):
    assert largest_layout(Parallelism(**given_axes).axes, hosts, per_host) == expected


def snap(rank, step, host, *, attempt=1, layout="r1s2t1p1c1e1", tier="memory"):
    return SnapshotCopy(step=step, attempt=attempt, rank=rank, layout=layout, host=host, tier=tier)


def test_the_newest_step_that_every_rank_has():
    found = newest_complete([snap(0, 4, "a"), snap(0, 5, "a"), snap(1, 4, "b"), snap(1, 3, "b")])
    assert (found.step, {rank: held.host for rank, held in found.shards.items()}) == (4, {0: "a", 1: "b"})


def test_a_lost_ranks_shard_comes_from_its_peer():
    found = newest_complete([snap(0, 5, "a"), snap(1, 5, "a", tier="peer")])
    assert (
        {rank: held.host for rank, held in found.shards.items()},
        {rank: held.tier for rank, held in found.shards.items()},
    ) == ({0: "a", 1: "a"}, {0: "memory", 1: "peer"})


def test_versions_of_two_attempts_never_mix():
    assert newest_complete([snap(0, 5, "a", attempt=1), snap(1, 5, "b", attempt=2)]) is None


def test_a_replica_stands_in_for_its_twin():
    found = newest_complete([snap(2, 5, "b", layout="r2s2t1p1c1e1"), snap(3, 5, "b", layout="r2s2t1p1c1e1")])
    assert found.step == 5 and found.layout == Layout(dp_replicate=2, dp_shard=2)
    assert set({rank: held.host for rank, held in found.shards.items()}.values()) == {"b"}


def test_an_order_to_flush_names_where_each_shard_is_held_own_snapshots_first():
    twins = newest_complete([snap(0, 7, "a", layout="r2s2t1p1c1e1"), snap(3, 7, "a", layout="r2s2t1p1c1e1")])
    assert [(each.rank, each.copy.rank) for each in twins.flush_shards("a")] == [(0, 0), (1, 3), (2, 0), (3, 3)]
    copies = [snap(0, 9, "a", tier="peer"), snap(1, 9, "a", tier="peer")]
    own = newest_complete([*copies, snap(0, 9, "a"), snap(1, 9, "b")])
    assert [(each.rank, each.copy.rank, each.copy.tier) for each in own.flush_shards("a")] == [(0, 0, "memory")]
    assert [(each.rank, each.copy.rank, each.copy.tier) for each in own.flush_shards("b")] == [(1, 1, "memory")]


def test_nothing_is_none():
    assert newest_complete([]) is None
    assert newest_complete([snap(1, 9, "a")]) is None


@given(
    st.lists(
        st.builds(
            snap,
            st.integers(0, 2),
            st.integers(0, 4),
            st.sampled_from("ab"),
            attempt=st.integers(1, 2),
            layout=st.sampled_from(["r1s2t1p1c1e1", "r1s3t1p1c1e1"]),
            tier=st.sampled_from(["memory", "peer"]),
        ),
        max_size=20,
    )
)
def test_a_choice_is_complete_and_none_is_newer(snapshots):
    found = newest_complete(snapshots)
    complete = [
        (step, attempt)
        for step in range(5)
        for attempt in (1, 2)
        for layout, world in (("r1s2t1p1c1e1", 2), ("r1s3t1p1c1e1", 3))
        if all(
            any((s.step, s.attempt, s.layout, s.rank) == (step, attempt, layout, r) for s in snapshots)
            for r in range(world)
        )
    ]
    assert (found is None) == (not complete)
    if found is not None:
        assert (found.step, found.attempt) == max(complete)
        for rank, held in found.shards.items():
            assert held.rank == rank and held in snapshots


@pytest.mark.parametrize(
    ("name", "needed"), [("host-0", [0, 1]), ("host-1", [2, 3]), ("host-2", [0, 5]), ("host-3", [0, 1])]
)
def test_another_layout_needs_one_replica_and_what_lies_there_is_not_fetched(name, needed):
    layout = Layout(dp_replicate=3, dp_shard=2)
    hosts = ["host-0", "host-0", "host-1", "host-1", "host-0", "host-2"]
    shards = {
        rank: SnapshotCopy(step=7, attempt=1, rank=rank, layout=layout.key, host=host, tier="memory")
        for rank, host in enumerate(hosts)
    }
    assert needed_shards(Choice(step=7, attempt=1, layout=layout, shards=shards), name) == needed


def test_a_host_takes_what_a_peers_copy_in_its_own_memory_holds_before_anybody_elses():
    held = [
        SnapshotCopy(step=7, attempt=1, rank=0, layout="r1s2t1p1c1e1", host="host-0", tier="memory"),
        SnapshotCopy(step=7, attempt=1, rank=0, layout="r1s2t1p1c1e1", host="host-1", tier="peer"),
        SnapshotCopy(step=7, attempt=1, rank=1, layout="r1s2t1p1c1e1", host="host-1", tier="memory"),
    ]
    choice = newest_complete(held)
    assert choice.nearest(0, "host-1").tier == "peer" and choice.nearest(0, "host-0").tier == "memory"
    assert choice.nearest(0, "host-2").host == "host-0" and choice.nearest(1, "host-0").host == "host-1"
    twins = newest_complete(
        [
            SnapshotCopy(step=7, attempt=1, rank=rank, layout="r2s1t1p1c1e1", host=f"host-{rank}", tier="memory")
            for rank in (0, 1)
        ]
    )
    assert twins.nearest(0, "host-1").rank == 1, "a replica's twin that lies here serves as well"


TWO = "r2s1t1p1c1e1"


def test_with_local_steps_a_replicas_own_state_is_taken_before_a_newer_twin():
    """A copy over a slow link is behind: three steps are redone, and no replica loses its own."""
    held = [snap(0, step, "a", layout=TWO) for step in (12, 15)] + [snap(1, 12, "a", layout=TWO, tier="peer")]
    assert newest_complete(held).step == 15
    found = newest_complete(held, local_steps=10)
    assert (found.step, found.shards[1].rank, found.shards[1].tier) == (12, 1, "peer")
    assert needed_shards(found, "a") == [0, 1]


def test_with_local_steps_a_copy_from_before_the_last_meeting_is_no_better_than_a_twin():
    held = [snap(0, step, "a", layout=TWO) for step in (8, 15)] + [snap(1, 8, "a", layout=TWO, tier="peer")]
    found = newest_complete(held, local_steps=10)
    assert (found.step, found.shards[1].rank) == (15, 0)
    assert needed_shards(found, "a") == [0]


def test_with_local_steps_a_host_that_holds_a_twin_fetches_the_replicas_own():
    held = [snap(0, 5, "a", layout=TWO), snap(1, 5, "b", layout=TWO)]
    assert newest_complete(held).nearest(1, "a").rank == 0
    assert newest_complete(held, local_steps=10).nearest(1, "a").rank == 1
