"""Which ranks outlive their attempt: pure, and through the machine in virtual time."""

import random

import pytest
from fakes.virtual_run import without_copies
from hypothesis import given, settings
from hypothesis import strategies as st

from muster.config.spec import RunSpec
from muster.core.snapshots import SnapshotCopy
from muster.core.types import Layout
from muster.policy.builtin import SHIPPED
from muster.protocol.held_snapshots import has_replica_on_other_host, newest_complete
from muster.simulate.cluster import Cluster
from muster.simulate.stage_arithmetic import Stages
from muster.supervise.recovery.attempts import prefer_hosts_of_whole_replicas, rank_mapping, whole_replicas
from muster.supervise.recovery.inputs import Settings
from muster.supervise.recovery.state_machine import RecoveryStateMachine

TWO_BY_TWO = Layout(dp_replicate=2, dp_shard=2)
ON_FOUR = {0: "a", 1: "b", 2: "c", 3: "d"}


def test_a_replica_counts_only_when_every_rank_of_it_stands_still():
    assert whole_replicas(TWO_BY_TWO, ON_FOUR, {"a": {0}, "c": {2}, "d": {3}}) == [(2, 3)]
    assert whole_replicas(TWO_BY_TWO, ON_FOUR, {"c": {3}, "d": {2}}) == [], "a rank stands on its own host only"


def test_a_smaller_world_is_made_of_the_hosts_of_the_living_replica():
    assert prefer_hosts_of_whole_replicas(["b", "c", "d"], ON_FOUR, [(2, 3)]) == ["c", "d", "b"]


def test_ranks_that_go_on_keep_their_shard_and_if_they_can_their_number():
    one_host = dict.fromkeys(range(4), "a")
    assert rank_mapping(TWO_BY_TWO, one_host, TWO_BY_TWO, one_host, [(2, 3)]) == {2: 2, 3: 3}
    alone = Layout(dp_shard=2)
    assert rank_mapping(TWO_BY_TWO, ON_FOUR, alone, {0: "c", 1: "d"}, [(2, 3)]) == {0: 2, 1: 3}
    assert rank_mapping(TWO_BY_TWO, ON_FOUR, alone, {0: "d", 1: "c"}, [(2, 3)]) == {}, "the shards would be exchanged"
    assert rank_mapping(TWO_BY_TWO, ON_FOUR, Layout(dp_shard=3), {0: "b", 1: "c", 2: "d"}, [(2, 3)]) == {}


def test_a_twin_gives_its_own_file_under_its_own_rank():
    held = [
        SnapshotCopy(step=7, attempt=1, rank=rank, layout="r2s2t1p1c1e1", host=host, tier="memory")
        for rank, host in ((2, "c"), (3, "d"))
    ]
    found = newest_complete(held)
    assert {rank: (one.host, one.rank) for rank, one in found.shards.items()} == {
        0: ("c", 2), 1: ("d", 3), 2: ("c", 2), 3: ("d", 3),
    }  # fmt: skip


def test_a_second_copy_is_needed_only_where_no_twin_is_on_another_host():
    assert has_replica_on_other_host(TWO_BY_TWO, ON_FOUR, "a")
    assert not has_replica_on_other_host(TWO_BY_TWO, dict.fromkeys(range(4), "a"), "a")
    assert not has_replica_on_other_host(Layout(dp_shard=4), ON_FOUR, "a")


def replicated(hosts, replicas, shards, stages=1, **resources):
    return RunSpec.model_validate(
        {
            "name": "virtual",
            "model": {"config": {}},
            "data": {"sources": [{"type": "random"}]},
            "training": {"epochs": 1},  # each cluster says how many steps that is
            "parallelism": {"dp_replicate": replicas, "dp_shard": shards, "pp": stages},
            "resources": {"ranks_per_host": 1, "hosts": hosts, **resources},
            "recovery": {"start_timeout_s": 60.0, "max_restarts_without_progress": 20},
        }
    )


def cluster(spec, steps=200):
    names = [f"host-{number}" for number in range(spec.resources.hosts + spec.resources.spare_hosts)]
    per_host = spec.resources.ranks_per_host
    made = Settings(spec=without_copies(spec), run_id="r", run_dir="/r", ranks_per_host=per_host)
    machine = RecoveryStateMachine(settings=made, policy=SHIPPED["default"])
    return Cluster(machine=machine, names=names, total_steps=steps, stages=Stages())


def attempts(found):
    return [log.detail for _, log in found.log if log.kind == "attempt.started"]


def test_a_lost_host_of_one_replica_is_swapped_under_the_feet_of_the_other():
    found = cluster(replicated(4, 2, 2, spare_hosts=1))
    found.at(10.0, lambda: found.kill_host("host-1"))
    assert found.run().exit_code == 0
    assert attempts(found)[-1]["kept"] == [2, 3]
    assert attempts(found)[-1]["resume_step"] > 0, "the state comes from the living replica"
    assert list(attempts(found)[-1]["hosts"]) == ["host-0", "host-4", "host-2", "host-3"]


def test_a_shrunken_world_is_the_living_replica_and_grows_under_its_feet():
    found = cluster(replicated(4, 2, 2, min_hosts=2), steps=400)
    found.at(10.0, lambda: found.kill_host("host-0"))
    found.at(60.0, lambda: found.return_host("host-0"))
    assert found.run().exit_code == 0
    shrunk, grown = attempts(found)[-2:]
    assert list(shrunk["hosts"]) == ["host-2", "host-3"] and shrunk["kept"] == [0, 1]
    assert grown["world_size"] == 4 and grown["kept"] == [0, 1]


def test_three_by_three_on_nine_hosts_of_one_rank():
    """A rank; a host with a spare; one without, whose replica is dropped while the others keep their processes; and it
    comes back."""
    found = cluster(replicated(9, 3, 1, 3, spare_hosts=1, min_hosts=3), steps=900)
    found.at(20.0, lambda: found.kill_rank(4))
    found.at(60.0, lambda: found.kill_host("host-8"))
    found.at(100.0, lambda: found.kill_host("host-5"))
    found.at(160.0, lambda: found.return_host("host-5"))
    assert found.run().exit_code == 0
    begun = attempts(found)
    assert [detail["world_size"] for detail in begun] == [9, 9, 9, 6, 9]
    assert [detail.get("kept", []) for detail in begun] == [
        [], [0, 1, 2, 6, 7, 8], [0, 1, 2, 3, 4, 5], [0, 1, 2, 3, 4, 5], [0, 1, 2, 3, 4, 5],
    ]  # fmt: skip
    assert all(detail["layout"]["pp"] == 3 for detail in begun)
    assert list(begun[3]["hosts"]) == ["host-0", "host-1", "host-2", "host-6", "host-7", "host-9"]


def test_three_by_three_with_a_replica_inside_each_of_three_hosts():
    found = cluster(replicated(3, 3, 1, 3, spare_hosts=1, min_hosts=1, ranks_per_host=3), steps=900)
    found.at(20.0, lambda: found.kill_rank(4))
    found.at(60.0, lambda: found.kill_host("host-2"))
    found.at(100.0, lambda: found.kill_host("host-1"))
    found.at(160.0, lambda: found.return_host("host-1"))
    assert found.run().exit_code == 0
    begun = attempts(found)
    assert [detail["world_size"] for detail in begun] == [9, 9, 9, 6, 9]
    assert [detail.get("kept", []) for detail in begun] == [
        [], [0, 1, 2, 6, 7, 8], [0, 1, 2, 3, 4, 5], [0, 1, 2, 3, 4, 5], [0, 1, 2, 3, 4, 5],
    ]  # fmt: skip


def test_stages_across_three_hosts_go_on_in_another_layout_on_two():
    """dp_shard 3 x pp 3, a stage on each host: without the third, two shards of each of three stages."""
    found = cluster(replicated(3, 1, 3, 3, min_hosts=1, ranks_per_host=3), steps=400)
    found.at(20.0, lambda: found.kill_host("host-1"))
    assert found.run().exit_code == 0
    layout = attempts(found)[-1]["layout"]
    assert (layout["dp_shard"], layout["pp"], layout["dp_replicate"]) == (2, 3, 1)


def test_without_replicas_nobody_is_kept():
    found = cluster(replicated(2, 1, 2))
    found.at(10.0, lambda: found.kill_rank(1))
    assert found.run().exit_code == 0
    assert all("kept" not in detail for detail in attempts(found))


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 10**9))
def test_random_faults_never_keep_a_rank_that_was_lost(seed):
    rng = random.Random(seed)
    shards = rng.choice((1, 2))
    replicas = rng.choice((2, 3))
    found = cluster(replicated(shards * replicas, replicas, shards, spare_hosts=rng.choice((0, 1)), min_hosts=shards))
    for _ in range(rng.randint(1, 4)):
        at, host = rng.uniform(6.0, 120.0), f"host-{rng.randrange(shards * replicas)}"
        if rng.random() < 0.5:
            found.at(at, lambda host=host: found.kill_host(host))
            found.at(at + rng.uniform(5.0, 40.0), lambda host=host: found.return_host(host))
        else:
            rank = rng.randrange(shards * replicas)
            found.at(at, lambda rank=rank: found.kill_rank(rank))
    end = found.run(until_s=5000.0)
    assert end is not None and end.exit_code in (0, 75)
    before = None
    for detail in attempts(found):
        for rank in detail.get("kept", ()):
            host = next(name for name, ranks in detail["hosts"].items() if rank in ranks)
            assert host in before["hosts"], "only on a host that ran a rank"
        before = detail


@pytest.mark.parametrize("command", [["train.py"], None])
def test_a_users_own_loop_is_replaced_whole(command):
    spec = replicated(2, 2, 1)
    if command:
        spec = spec.model_copy(update={"command": command})
    found = cluster(spec)
    found.at(10.0, lambda: found.kill_rank(1))
    found.run()
    assert bool(attempts(found)[-1].get("kept")) is (command is None)
