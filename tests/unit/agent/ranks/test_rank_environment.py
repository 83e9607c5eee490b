"""The environment of ranks: NCCL leaves a healthy replica alone, and only where there is one."""

import pytest

from muster.agent.ranks.rank_environment import SURVIVE_ABORTS, fork_server_environment
from muster.config.spec import RunSpec


def spec(**changes):
    given = {"name": "case", "model": {"source": "m"}, "data": {"sources": [{"type": "random"}]}, **changes}
    return RunSpec.model_validate(given)


REPLICAS = {"parallelism": {"dp_replicate": 2}}


def nccl(environment):
    return {name: value for name, value in environment.items() if "NCCL" in name}


def test_ranks_of_a_healthy_replica_live_through_an_abort():
    found = fork_server_environment(spec(**REPLICAS), {"PATH": "/bin"}, cores=4)
    assert nccl(found) == SURVIVE_ABORTS and found["PATH"] == "/bin"
    assert found["TORCH_NCCL_ASYNC_ERROR_HANDLING"] == "0", "2 aborts by itself, 1 and 3 end the process"


@pytest.mark.parametrize(
    "changes", [{}, {**REPLICAS, "model": None, "data": None, "command": ["train.py"]}], ids=["one replica", "command"]
)
def test_where_nobody_outlives_a_loss_nccl_is_left_as_it_is(changes):
    assert nccl(fork_server_environment(spec(**changes), {}, cores=4)) == {}


@pytest.mark.parametrize("name", ["TORCH_NCCL_ASYNC_ERROR_HANDLING", "NCCL_ASYNC_ERROR_HANDLING"])
def test_what_the_user_set_stays(name):
    found = nccl(fork_server_environment(spec(**REPLICAS), {name: "1"}, cores=4))
    assert found[name] == "1"
    assert {value for other, value in found.items() if other != name} == {"0"}
    assert sum("ASYNC_ERROR_HANDLING" in other for other in found) == 1


@pytest.mark.parametrize(
    ("resources", "hosts_here", "threads"),
    [
        ({}, 1, "8"),
        ({"ranks_per_host": 4}, 1, "2"),
        ({"ranks_per_host": 4, "hosts": 4}, 4, "1"),
        ({"ranks_per_host": 4, "hosts": 4}, 1, "2"),
        ({"threads_per_rank": 3}, 1, "3"),
    ],
)
def test_the_cores_are_shared_out(resources, hosts_here, threads):
    found = fork_server_environment(spec(resources=resources), {}, cores=8, hosts_here=hosts_here)
    assert found["OMP_NUM_THREADS"] == threads
