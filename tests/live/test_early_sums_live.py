"""Sums over replicas that begin within the backward pass: real gloo groups, the bits and what a loss does."""

import json
import multiprocessing

import pytest
from early_sum_ranks import STEPS, main

pytestmark = [pytest.mark.live, pytest.mark.timeout(300)]

LORA = {"model": {"lora": {"rank": 4}}}
#: In FSDP the root and two layers: three units; of adapters, which are in the layers alone, two. A model that one rank
#: holds whole has no FSDP, and as many units as buckets.
SAME = {
    f"{name}-{replicas}x{shards}": {"replicas": replicas, "shards": shards, **given}
    for replicas, shards in ((3, 1), (2, 2))
    for name, given in {
        "each-round": {"sums": "each round"},
        "once": {"sums": "once"},
        "exact": {"sums": "exact"},
        "lora": {"sums": "once", **LORA},
        "one-unit": {"sums": "once", "whole_below": 1 << 30},
    }.items()
}
UNITS = {"lora": 2, "one-unit": 1}


def run(folder, cases, *, lost=()):
    """What each rank of each case wrote, as ``{case: {rank: found}}``."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["early_sum_ranks", "transformers.models.llama.modeling_llama", "peft"])
    world = max(case["replicas"] * case["shards"] for case in cases.values())
    ranks = [context.Process(target=main, args=(rank, cases, str(folder))) for rank in range(world)]
    for rank in ranks:
        rank.start()
    try:
        for number, rank in enumerate(ranks):
            if number not in lost:
                rank.join(240)
                assert rank.exitcode == 0, f"rank {number} ended with {rank.exitcode}"
    finally:
        for rank in ranks:
            rank.kill()
    return {
        name: {
            int(path.stem.rpartition("-")[2]): json.loads(path.read_text()) for path in folder.glob(f"{name}-*.json")
        }
        for name in cases
    }


@pytest.fixture(scope="module")
def same(tmp_path_factory):
    return run(tmp_path_factory.mktemp("same"), SAME)


@pytest.mark.parametrize("case", SAME)
def test_they_have_the_bits_of_sums_that_begin_afterwards(same, case):
    given = SAME[case]
    assert sorted(same[case]) == list(range(given["replicas"] * given["shards"]))
    for found in same[case].values():
        whole = given["shards"] == 1
        assert found["whole"] == whole
        units = found["units"] if whole else UNITS.get(case.rsplit("-", 1)[0], 3)
        assert units > 1 or case.startswith("one-unit"), found
        assert found["begun"] == [0] + [units] * (STEPS - 1), "in the backward pass, from the second step on"
        assert found["later"] == [0] * STEPS
        assert found["different"] == 0 and found["smallest_norm"] > 0


@pytest.mark.parametrize("number", ["SIGKILL", "SIGSTOP"])
@pytest.mark.parametrize(("replicas", "shards", "sums"), [(3, 1, "once"), (2, 2, "once"), (2, 2, "exact")])
def test_a_replica_lost_in_the_middle_of_the_backward_pass(tmp_path, replicas, shards, sums, number):
    """The others hear of it after their own backward pass, hang nowhere, and the same processes go on alone."""
    case = {"replicas": replicas, "shards": shards, "sums": sums, "lost": number}
    lost = range((replicas - 1) * shards, replicas * shards)
    found = run(tmp_path, {"lost": case}, lost=lost)["lost"]
    assert sorted(found) == list(range((replicas - 1) * shards))
    for rank in found.values():
        assert rank["same"] and rank["norm"] > 0 and rank["seconds"] < 60, rank
