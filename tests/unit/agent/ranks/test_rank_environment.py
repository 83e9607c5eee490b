"""The environment of ranks: NCCL lets a rank say why it ends, and leaves a healthy replica alone."""

import pytest

from muster.agent.ranks.rank_environment import SPEAK_FOR_THEMSELVES, SURVIVE_ABORTS, fork_server_environment
from muster.config.spec import RunSpec


def spec(**changes):
    given = {"name": "case", "model": {"source": "m"}, "data": {"sources": [{"type": "random"}]}, **changes}
    return RunSpec.model_validate(given)


REPLICAS = {"parallelism": {"dp_replicate": 2}}


def nccl(environment):
    return {name: value for name, value in environment.items() if "NCCL" in name}


def test_ranks_of_a_healthy_replica_live_through_an_abort():
    found = fork_server_environment(spec(**REPLICAS), {"PATH": "/bin"}, cores=4)
    assert nccl(found) == SPEAK_FOR_THEMSELVES | SURVIVE_ABORTS and found["PATH"] == "/bin"
    assert found["TORCH_NCCL_ASYNC_ERROR_HANDLING"] == "0", "2 aborts by itself, 1 and 3 end the process"


def test_of_one_replica_the_watchdog_ends_no_rank_without_its_last_words():
    assert nccl(fork_server_environment(spec(), {}, cores=4)) == SPEAK_FOR_THEMSELVES


def test_a_program_of_the_users_own_has_torchs_defaults():
    own = spec(**REPLICAS, model=None, data=None, command=["train.py"], resources={"device": "cuda"})
    found = fork_server_environment(own, {}, cores=4)
    assert nccl(found) == {} and "PYTORCH_ALLOC_CONF" not in found


def test_segments_of_the_gpus_allocator_grow_unless_the_user_says_otherwise():
    on_gpus = spec(resources={"device": "cuda"})
    name, older, grow = "PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True"
    assert fork_server_environment(on_gpus, {}, cores=4)[name] == grow
    assert fork_server_environment(on_gpus, {name: "backend:native"}, cores=4)[name] == "backend:native"
    assert name not in fork_server_environment(on_gpus, {older: "backend:native"}, cores=4)
    assert name not in fork_server_environment(spec(resources={"device": "cpu"}), {}, cores=4)


def test_nobody_opens_cuda_in_the_process_that_forks_ranks_by_asking_whether_it_is_there():
    found = fork_server_environment(spec(), {}, cores=4)
    assert found["PYTORCH_NVML_BASED_CUDA_CHECK"] == "1"


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
