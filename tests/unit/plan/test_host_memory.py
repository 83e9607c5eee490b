"""Snapshots against a machine's own memory: figures by hand."""

import pytest
from planning import job

from muster.core.optimizers import ADAMW, ADAMW_8BIT
from muster.core.types import Layout
from muster.plan.plan_file import host_memory
from muster.plan.step_time import local_state_bytes
from muster.plan.workload import Setting


def of(size, *, nodes, machine="a3-ultragpu-8g", replicas=1, **changes):
    layout = Layout(dp_replicate=replicas, dp_shard=nodes * 8 // replicas)
    setting = Setting(layout=layout, micro_batch_size=1, activation_checkpointing="full")
    work = job(size, **{"snapshot_every": 1, **changes})
    return host_memory(work, setting, machine=machine, gpus_per_node=8, num_nodes=nodes)


def test_two_hosts_hold_three_of_their_own_and_two_of_each_others_halves():
    found = of("8B", nodes=2)
    half = 8.03e9 * 12 / 2
    assert found.items["own snapshots"] == pytest.approx(3 * half, rel=0.01)
    assert found.items["another host's copies"] == pytest.approx(2 * half, rel=0.01)
    assert found.items["staged save"] == pytest.approx(half, rel=0.01)
    assert found.warning is None


def test_too_little_memory_is_said_with_numbers_and_the_key_that_helps():
    found = of("70B", nodes=2)  # 423 GB a host: 2,117 GB of 2,059 GB
    assert found.snapshot_bytes > found.limit_bytes > found.without_copies_bytes
    assert "2,117 GB" in found.warning and "checkpoint.replicate_snapshots: false" in found.warning
    assert of("70B", nodes=4).warning is None
    assert "checkpoint.snapshot_every_steps: 0" in of("70B", nodes=1, machine="a3-highgpu-8g").warning


@pytest.mark.parametrize(
    ("changes", "names"),
    [
        ({"replicate_snapshots": False}, {"own snapshots", "staged save"}),
        ({"replicas": 2}, {"own snapshots", "staged save"}),
        ({"replicas": 2, "replicate_snapshots": True}, {"own snapshots", "another host's copies", "staged save"}),
        ({"snapshot_every": 0}, {"staged save"}),
        ({"snapshot_every": 0, "asynchronous": False}, set()),
    ],
)
def test_what_is_not_made_takes_nothing(changes, names):
    found = of("8B", nodes=2, **changes)
    assert set(found.items) == names
    copies = "another host's copies" in names
    if "own snapshots" in names:
        state = 8.03e9 * 12 / (2 / changes.get("replicas", 1))
        assert found.items["own snapshots"] == pytest.approx((3 if copies else 2) * state, rel=0.01)


def test_eight_bit_moments_lie_in_a_snapshot_as_float32():
    setting = Setting(layout=Layout(dp_shard=8), micro_batch_size=1, activation_checkpointing="full")
    eight, plain = (local_state_bytes(job("8B", optimizer=traits), setting) for traits in (ADAMW_8BIT, ADAMW))
    assert eight == plain


def test_a_machine_that_nobody_knows_has_no_limit():
    assert of("70B", nodes=1, machine="workstation").limit_bytes is None
