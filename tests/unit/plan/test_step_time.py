"""Step time: parts that can be recomputed by hand, and rules that hold whatever the constants are."""

from dataclasses import replace

import pytest
from planning import job, option

from muster.core.errors import NoPlanError
from muster.core.types import Layout
from muster.plan.step_time import DEFAULT, step_time, tokens_per_second_per_gpu
from muster.plan.workload import Setting


def at(shards=8, replicas=1, tp=1, micro=1, kind="none"):
    layout = Layout(dp_replicate=replicas, dp_shard=shards, tp=tp)
    return Setting(layout=layout, micro_batch_size=micro, activation_checkpointing=kind)


def test_matrices_of_8b_on_one_gpu_by_hand():
    work = job(global_batch_size=1, compile=True)
    time = step_time(work, at(1), option("a3-highgpu-1g"), 1)
    by_hand = 48.25e9 * 4096 / (794.5e12 * DEFAULT.efficiency)
    assert time.parts["matrices"] == pytest.approx(by_hand, rel=3e-3)
    assert time.parts["sharding"] == time.parts["tensor parallel"] == time.parts["replicas"] == 0
    assert time.mfu == pytest.approx(48.25e9 * 4096 / time.seconds / 989e12, rel=3e-3)


def test_full_recomputation_adds_a_forward_pass_but_the_heads():
    work = job(global_batch_size=1)
    plain = step_time(work, at(1), option("a3-highgpu-1g"), 1).parts["matrices"]
    again = step_time(work, at(1, kind="full"), option("a3-highgpu-1g"), 1).parts["matrices"]
    head = 6 * 128256 * 4096 / 48.25e9
    assert again / plain == pytest.approx(1 + (1 - head) / 3, rel=2e-3)


def test_lora_does_two_thirds():
    full = step_time(job(), at(8, micro=8), option(), 1).parts["matrices"]
    lora = step_time(job(lora_rank=16), at(8, micro=8), option(), 1).parts["matrices"]
    assert 0.66 < lora / full < 0.70


def test_a_trained_head_needs_its_weight_gradient():
    """2 P of the head more; the embedding is looked up, not multiplied, so it adds no product."""
    frozen, trained = job(lora_rank=16), job(lora_rank=16, lora_embeddings=True)
    a, b = (step_time(each, at(8, micro=8), option(), 1) for each in (frozen, trained))
    head = 2 * 128256 * 4096 / (4 * 7.5e9)
    assert b.parts["matrices"] / a.parts["matrices"] == pytest.approx(1 + head, rel=0.02)
    assert b.parts["optimizer"] > 20 * a.parts["optimizer"]
    more = trained.useful_flops_per_token() - frozen.useful_flops_per_token()
    assert more == pytest.approx(2 * 128256 * 4096, rel=0.08)  # attention's share is scaled, too


def test_padding_of_uneven_batches_is_time_but_not_work():
    even, uneven = job(global_batch_size=8), job(global_batch_size=9)
    a, b = (step_time(each, at(8), option(), 1) for each in (even, uneven))
    assert a.parts["padding"] == 0
    assert b.parts["padding"] / b.seconds > 0.3
    assert b.mfu < a.mfu


def test_a_slower_network_is_seen_across_machines_alone():
    spot, placed = option("a4-highgpu-8g", "spot"), option("a4-highgpu-8g", "flex_start")
    work = job("70B", global_batch_size=128)
    assert step_time(work, at(128), spot, 16).seconds > step_time(work, at(128), placed, 16).seconds
    work = job("8B", global_batch_size=8)
    assert step_time(work, at(8), spot, 1).seconds == step_time(work, at(8), placed, 1).seconds


def test_replicated_sharding_pays_where_gathers_cannot_hide():
    """A2 has 100 Gbps for 8 GPUs: gathers inside the machine and one sum across beat sharding over the network."""
    work = job("1B", global_batch_size=256)  # four rounds: sharding gathers in each, replicas are summed once
    across = step_time(work, at(64), option("a2-highgpu-8g", "spot"), 8)
    inside = step_time(work, at(8, replicas=8), option("a2-highgpu-8g", "spot"), 8)
    assert inside.parts["replicas"] > 0
    assert inside.seconds < across.seconds


def test_tensor_parallel_costs_reductions():
    time = step_time(job(), at(1, tp=8), option(), 1)
    stream = 4096 * 4096 * 2
    one = 2 * 7 / 8 * stream / (450e9 * 0.8) + 30e-6
    assert time.parts["tensor parallel"] == pytest.approx(64 * 32 * 4 * one, rel=1e-6)


def test_fp8_is_faster_but_not_for_attention():
    work = job(global_batch_size=8)
    bf16 = step_time(work, at(8), option("a3-ultragpu-8g", "spot"), 1)
    fp8 = step_time(work, at(8), option("a3-ultragpu-8g", "spot"), 1, replace(DEFAULT, precision="fp8"))
    assert 1.2 < bf16.seconds / fp8.seconds < 1.9


def test_mxfp8_is_faster_where_the_chip_has_it_and_planned_nowhere_else():
    work, asked = job(global_batch_size=8), replace(DEFAULT, precision="mxfp8")
    bf16 = step_time(work, at(8), option("a4-highgpu-8g", "spot"), 1)
    assert 1.2 < bf16.seconds / step_time(work, at(8), option("a4-highgpu-8g", "spot"), 1, asked).seconds < 1.9
    with pytest.raises(NoPlanError, match="mxfp8 peak of H200 is unknown, or it has none"):
        step_time(work, at(8), option("a3-ultragpu-8g", "spot"), 1, asked)


def test_snapshots_stall_each_step_until_they_are_rarer():
    every = step_time(job(snapshot_every=1), at(8, micro=8), option(), 1)
    fourth = step_time(job(snapshot_every=4), at(8, micro=8), option(), 1)
    assert every.parts["snapshots"] == pytest.approx(12 * 8.03e9 / 8 / 20e9, rel=1e-3)
    assert fourth.parts["snapshots"] * 4 == pytest.approx(every.parts["snapshots"])


def test_a_parts_sum_is_the_step_and_throughput_follows():
    work = job()
    time = step_time(work, at(8, micro=8), option(), 1)
    assert time.seconds == pytest.approx(sum(time.parts.values()))
    assert tokens_per_second_per_gpu(work, time) == pytest.approx(64 * 4096 / time.seconds / 8)


def test_an_unknown_peak_or_network_is_no_number():
    with pytest.raises(NoPlanError, match="peak of RTX-PRO-6000 is unknown"):
        step_time(job(), at(8), option("g4-standard-384", "spot"), 1)
    machine = option("a3-megagpu-8g")
    blind = replace(machine, fabric=replace(machine.fabric, inter=None))
    with pytest.raises(NoPlanError, match="data network is unknown"):
        step_time(job(), at(16), blind, 2)


def test_snapshots_by_cost_take_one_per_cent_of_the_time():
    every = step_time(job(snapshot_every=1), at(8, micro=8), option(), 1)
    auto = step_time(job(snapshot_every=None), at(8, micro=8), option(), 1)
    assert every.parts["snapshots"] > 0.01 * every.seconds, "else there is nothing to choose"
    assert auto.snapshot_every == every.snapshot_every_by_cost > 1
    assert auto.parts["snapshots"] <= 0.01 * auto.seconds
    assert auto.seconds < every.seconds and auto.snapshot_s == every.snapshot_s
    small = step_time(job("1B", snapshot_every=None, lora_rank=4), at(8, micro=8), option(), 1)
    assert small.snapshot_every == 1
