"""Three replicas of three stages in virtual time: which ranks keep their process, on which layout the others go on.

``tests/live/test_pipeline_recovery_live.py`` is the same with processes, every night.
"""

import pytest
from fakes.virtual_run import actions, check_invariants
from fakes.virtual_run import cluster as cluster_in_virtual_time
from fakes.virtual_run import spec as spec_of

from muster.config.sections.parallelism import Parallelism


def grid(hosts, *, shards=1, replicas=3, **resources):
    of = spec_of(hosts=hosts, ranks_per_host=9 // hosts, **resources)
    axes = Parallelism(dp_replicate=replicas, dp_shard=shards, pp=3)
    return cluster_in_virtual_time(of.model_copy(update={"parallelism": axes}), steps=600)


def attempts(cluster):
    """(ranks that kept their process, replicas, shards, stages) of every attempt."""
    started = [log.detail for _, log in cluster.log if log.kind == "attempt.started"]
    return [
        (found.get("kept", []), *(found["layout"][axis] for axis in ("dp_replicate", "dp_shard", "pp")))
        for found in started
    ]


FIRST = ([], 3, 1, 3)


@pytest.mark.parametrize("hosts", [9, 3], ids=["a host for each rank", "a host for each replica"])
def test_a_replica_is_replaced_dropped_and_taken_back_and_the_others_keep_their_processes(hosts):
    cluster = grid(hosts, spare_hosts=1, min_hosts=hosts - hosts // 3)
    per_host = 9 // hosts
    cluster.at(20.0, lambda: cluster.kill_rank(4))
    cluster.at(50.0, lambda: cluster.kill_host(f"host-{hosts - 1}"))  # the last replica's: the spare takes its place
    cluster.at(80.0, lambda: cluster.kill_host(f"host-{3 // per_host}"))  # of the second replica
    cluster.at(110.0, lambda: cluster.return_host(f"host-{3 // per_host}"))
    assert cluster.run().exit_code == 0
    check_invariants(cluster)
    assert actions(cluster) == ["restart", "swap", "shrink", "grow"]
    assert attempts(cluster) == [
        FIRST,
        ([0, 1, 2, 6, 7, 8], 3, 1, 3),
        ([0, 1, 2, 3, 4, 5], 3, 1, 3),
        ([0, 1, 2, 3, 4, 5], 2, 1, 3),
        ([0, 1, 2, 3, 4, 5], 3, 1, 3),
    ]


def test_of_stages_that_are_hosts_none_is_left_alone_and_two_hosts_form_another_layout():
    """Three shards of each stage on its host: every host is in the only replica, and two have fewer shards a stage."""
    cluster = grid(3, shards=3, replicas=1, spare_hosts=1, min_hosts=2)
    cluster.at(20.0, lambda: cluster.kill_host("host-1"))
    cluster.at(50.0, lambda: cluster.kill_host("host-2"))
    cluster.at(80.0, lambda: cluster.return_host("host-2"))
    assert cluster.run().exit_code == 0
    check_invariants(cluster)
    assert actions(cluster) == ["swap", "shrink", "grow"]
    assert attempts(cluster) == [([], 1, 3, 3), ([], 1, 3, 3), ([], 1, 2, 3), ([], 1, 3, 3)]


@pytest.mark.parametrize("lost", [0, 1, 2])
def test_hosts_that_are_no_whole_replica_form_fewer_stages_and_none_is_idle(lost):
    """Two replicas of three stages on three hosts of two ranks: the second host has a stage of each."""
    of = spec_of(hosts=3, ranks_per_host=2, min_hosts=1)
    axes = Parallelism(dp_replicate=2, dp_shard=1, pp=3)
    cluster = cluster_in_virtual_time(of.model_copy(update={"parallelism": axes}), steps=600)
    cluster.at(20.0, lambda: cluster.kill_host(f"host-{lost}"))
    cluster.at(50.0, lambda: cluster.return_host(f"host-{lost}"))
    assert cluster.run().exit_code == 0
    check_invariants(cluster)
    assert actions(cluster) == ["shrink", "grow"]
    assert attempts(cluster) == [([], 2, 1, 3), ([], 2, 1, 2), ([], 2, 1, 3)]
