"""Step time: parts that can be recomputed by hand, and rules that hold whatever the constants are."""

from dataclasses import replace

import pytest
from planning import job, option

from muster.core.errors import NoPlanError
from muster.core.layout import kept_in_v
from muster.core.types import Layout
from muster.plan.constants import DEFAULT, ON_CPU
from muster.plan.layouts import Pins, layouts
from muster.plan.memory import memory
from muster.plan.step_time import ALLREDUCE_LATENCY_S, step_time, tokens_per_second_per_gpu
from muster.plan.workload import Setting


def at(shards=8, replicas=1, tp=1, micro=1, kind="none"):
    layout = Layout(dp_replicate=replicas, dp_shard=shards, tp=tp)
    return Setting(layout=layout, micro_batch_size=micro, activation_checkpointing=kind)


def test_matrices_of_8b_on_one_gpu_by_hand():
    work = job(global_batch_size=1, compile=True)
    time = step_time(work, at(1), option("a3-highgpu-1g"), 1)
    attention = 6 * 32 * 4096 * 4096  # a token's causal half of the square, forward and twice backward
    by_hand = (48.25e9 - attention) * 4096 / (794.5e12 * DEFAULT.efficiency)
    assert time.parts["matrices"] == pytest.approx(by_hand, rel=3e-3)
    assert time.parts["attention"] == pytest.approx(attention * 4096 / (259e12 * 4096 / 4396 * 0.89), rel=3e-3)
    assert time.parts["sharding"] == time.parts["tensor parallel"] == time.parts["replicas"] == 0
    assert time.mfu == pytest.approx(48.25e9 * 4096 / time.seconds / 989e12, rel=3e-3)


def test_full_recomputation_adds_a_forward_pass_but_the_heads():
    work = job(global_batch_size=1)
    plain = step_time(work, at(1), option("a3-highgpu-1g"), 1).parts["matrices"]
    again = step_time(work, at(1, kind="full"), option("a3-highgpu-1g"), 1).parts["matrices"]
    head = 6 * 128256 * 4096 / (48.25e9 - 6 * 32 * 4096 * 4096)
    assert again / plain == pytest.approx(1 + (1 - head) / 3, rel=2e-3)


def test_the_traced_step_is_met_in_its_parts():
    """1B in full on one H100, 8 sequences of 4,096 in micro-batches of 4, of which a trace says: attention 134 ms."""
    work = job("1B", global_batch_size=8, compile=True, loss_chunk_tokens=2048, snapshot_every=0)
    time = step_time(work, at(1, micro=4), option("a3-highgpu-1g"), 1)
    assert time.parts["attention"] == pytest.approx(0.134, rel=0.02)
    assert time.seconds == pytest.approx(8 * 4096 / 54_661, rel=0.07)


def test_attention_is_slower_on_short_documents_and_faster_with_a_newer_kernel():
    def rate(machine="a3-highgpu-1g", **changes):
        work = job(global_batch_size=1, **changes)
        return work.attention_flops_per_token() / step_time(work, at(1), option(machine), 1).parts["attention"]

    assert rate(document_length=512) / rate() == pytest.approx((512 / 812) / (4096 / 4396))
    assert rate(attention="flash3") / rate() == pytest.approx(475 / 259)
    assert rate("a4-highgpu-8g") / rate() == pytest.approx(292 / 259)


def test_attention_whose_kernel_nobody_measured_is_planned_as_matrices():
    work = job(global_batch_size=1, attention="")
    time = step_time(work, at(1), option("a3-highgpu-1g"), 1)
    share = work.attention_flops_per_token() / (48.25e9 - work.attention_flops_per_token())
    assert time.parts["attention"] / time.parts["matrices"] == pytest.approx(share, rel=3e-3)


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
    for kind in ("selective", "full"):
        again = step_time(job(), at(1, tp=8, kind=kind), option(), 1)
        assert again.parts["tensor parallel"] == pytest.approx(64 * 32 * 5 * one, rel=1e-6)


def test_on_a_cpu_each_split_matrix_costs_its_dispatch_beside_its_bytes():
    """Nothing runs ahead there, as kernels of a GPU do: the rank that dispatches is the one that computes."""
    two = at(1, tp=2)
    dear, free = (
        step_time(job(), two, option(), 1, replace(ON_CPU, split_matrix_s=seconds)).parts["tensor parallel"]
        for seconds in (ON_CPU.split_matrix_s, 0.0)
    )
    assert dear - free == pytest.approx(64 * 32 * 7 * ON_CPU.split_matrix_s)
    assert ON_CPU.split_matrix_s > 10 * ALLREDUCE_LATENCY_S and DEFAULT.split_matrix_s == 0


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


def test_snapshots_are_waited_for_where_steps_are_shorter():
    """12 GB a rank: 0.6 s of copy and 1.2 s of checksum beside steps of about a second and a half."""
    none = step_time(job(global_batch_size=16, snapshot_every=0), at(8, micro=2), option(), 1)
    every = step_time(job(global_batch_size=16, snapshot_every=1), at(8, micro=2), option(), 1)
    second = step_time(job(global_batch_size=16, snapshot_every=8), at(8, micro=2), option(), 1)
    size = 12 * 8.03e9 / 8
    assert every.snapshot_s == pytest.approx(size / 20e9 + size / 10e9, rel=1e-3)
    assert 0 < none.seconds < every.snapshot_s, "else there is nothing to wait for"
    assert every.seconds == pytest.approx(every.snapshot_s, rel=1e-3), "a step is as long as its snapshot"
    held = size / 20e9 - none.seconds + none.parts["optimizer"]
    assert second.parts["snapshots"] * 8 == pytest.approx(max(0.0, held))


def test_a_cpus_copies_are_not_hidden():
    plain = step_time(job(snapshot_every=64), at(8, micro=8), option(), 1)
    cpu = step_time(job(snapshot_every=64), at(8, micro=8), option(), 1, replace(DEFAULT, copies_beside=False))
    assert plain.parts["snapshots"] == 0
    assert cpu.parts["snapshots"] * 64 == pytest.approx(12 * 8.03e9 / 8 / 20e9, rel=1e-3)


def test_the_measured_stall_of_snapshots_is_met():
    """One H100: a state of 3.81 GB each step, steps of 0.15 s, 0.38 to 0.41 s of stall (copies at 55 GB/s)."""
    seen = replace(DEFAULT, device_to_host_bytes_per_s=55e9)
    work = job("1B", global_batch_size=1, snapshot_every=1)
    time = step_time(work, at(4), option("a3-highgpu-8g"), 1, seen)
    scale = 3.81e9 / (12 * 1.236e9 / 4)
    assert time.snapshot_s * scale == pytest.approx(0.15 + 0.395, abs=0.1)


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
    every = step_time(job(global_batch_size=8, snapshot_every=1), at(8), option(), 1)
    auto = step_time(job(global_batch_size=8, snapshot_every=None), at(8), option(), 1)
    assert every.parts["snapshots"] > 0.01 * every.seconds, "else there is nothing to choose"
    assert auto.snapshot_every == every.snapshot_every_by_cost > 1
    assert auto.parts["snapshots"] <= 0.01 * auto.seconds
    assert auto.seconds < every.seconds and auto.snapshot_s == every.snapshot_s
    small = step_time(job("1B", snapshot_every=None, lora_rank=4), at(8, micro=8), option(), 1)
    assert small.snapshot_every == 1


def test_interleaved_chunks_wait_less_and_keep_more():
    setting = Setting(layout=Layout(pp=4, dp_shard=2), micro_batch_size=1, activation_checkpointing="none")
    found = {}
    for chunks in (1, 2, 4):
        work = job(pipeline_chunks=chunks)
        found[chunks] = step_time(work, setting, option(), 1).parts["pipeline bubble"]
        assert memory(work, setting).total_bytes > 0
    assert found[1] == pytest.approx(2 * found[2]) == pytest.approx(4 * found[4])
    kept = [memory(job(pipeline_chunks=chunks), setting).items["activations"] for chunks in (1, 2)]
    # 4 micro-batches, and 2 * 3 + 4 + 1 of 11 passes through half of the layers, on the first stage
    assert kept[1] / kept[0] == pytest.approx(5.5 / 4, rel=0.1)


def test_gradients_of_weights_apart_fill_a_part_of_the_bubble():
    setting = Setting(layout=Layout(pp=4), micro_batch_size=1, activation_checkpointing="none")
    plain, apart = (step_time(job(weights_apart=value), setting, option(), 1).parts for value in (False, True))
    share = apart["pipeline bubble"] / plain["pipeline bubble"]
    arithmetic = sum(plain[name] for name in ("matrices", "attention", "memory traffic"))
    assert share == pytest.approx(1 - 2 / 3 * plain["matrices"] / arithmetic)
    tried = layouts(job(weights_apart=True), option(), 1, Pins(axes={"pp": 2}))
    assert {layout.tp for layout in tried} == {1}
    lora = job(weights_apart=True, lora_rank=8)
    assert step_time(lora, setting, option(), 1).parts["pipeline bubble"] == pytest.approx(
        step_time(job(lora_rank=8), setting, option(), 1).parts["pipeline bubble"]
    ), "frozen matrices have no gradients to put off"
    assert memory(job(weights_apart=True), setting).total_bytes >= memory(job(), setting).total_bytes


def test_a_v_waits_half_a_backward_pass_a_stage_and_keeps_what_the_first_stage_of_1f1b_does():
    setting = Setting(layout=Layout(pp=4), micro_batch_size=1, activation_checkpointing="none")
    v = {"pipeline_chunks": 2, "weights_apart": True, "pipeline_v": True}
    plain, in_v = (step_time(job(**given), setting, option(), 1).parts for given in ({}, v))
    arithmetic = sum(plain[name] for name in ("matrices", "attention", "memory traffic"))
    weights = plain["matrices"] / arithmetic / 3
    backward = 1 - 1 / 3 - weights
    share = in_v["pipeline bubble"] / plain["pipeline bubble"]
    assert share == pytest.approx(max(backward / 2, backward - weights)) and share < 0.25
    kept = [memory(job(**given), setting).items["activations"] for given in ({}, {"weights_apart": True}, v)]
    assert kept[1] == pytest.approx(kept[0])
    parts, rounds = job().shape.parts(4, 2), setting.rounds(job())
    in_1f1b = 4 * job().shape.stages(4)[0].layers
    passes = [found / in_1f1b for found in kept_in_v(0, 4, rounds, (len(parts[0]), len(parts[-1])))]
    assert passes[1] * 0.9 < kept[2] / kept[0] < passes[0] * 1.1, "of the first stage, which has both ends"


def test_axes_share_each_others_work_inside_a_layer():
    """Of gathered keys a tp rank has its heads, a stage its layers; tp's sums are of a cp rank's tokens."""
    gpus = {"dp_shard": 2, "tp": 1, "pp": 1, "cp": 2}  # with tp or pp one machine

    def parts(**axes):
        setting = Setting(layout=Layout(**{**gpus, **axes}), micro_batch_size=1, activation_checkpointing="none")
        return step_time(job(global_batch_size=64), setting, option(), 1).parts

    gather = parts()["context parallel"]
    calls = 32 * 32 * 2 * ALLREDUCE_LATENCY_S
    assert parts(tp=2)["context parallel"] - calls == pytest.approx((gather - calls) / 2)
    assert parts(pp=2)["context parallel"] == pytest.approx(gather / 2)
    whole = parts(tp=2, cp=1)["tensor parallel"]
    calls = 32 * 32 * 4 * ALLREDUCE_LATENCY_S
    assert parts(tp=2)["tensor parallel"] - calls == pytest.approx((whole - calls) / 2)


def test_tp_is_proposed_where_adapters_can_be_split_and_for_no_mixture():
    few, more = ({each.key for each in layouts(job(lora_rank=rank), option(), 2, Pins())} for rank in (4, 8))
    assert more - few == {"r1s8t2p1c1e1"} and "r2s4t2p1c1e1" in few
    for work in (job(float8=True), job(shape=replace(job().shape, experts=True))):
        assert all("t1" in layout.key for layout in layouts(work, option(), 2, Pins()))


def test_an_attention_kernel_that_a_chip_lacks_is_refused_and_not_planned_as_matrices():
    work = job(attention="flash3", global_batch_size=8)
    assert step_time(work, at(8), option("a3-megagpu-8g"), 1).parts["attention"] > 0
    with pytest.raises(NoPlanError, match="A100-80GB has no flash3 attention; known: flash2"):
        step_time(work, at(8), option("a2-ultragpu-8g", "on_demand"), 1)


def test_heads_smaller_than_any_that_was_measured_are_planned_as_matrices():
    shape = replace(job().shape, head_dim=16)
    assert step_time(job(shape=shape, attention="flash2"), at(8), option("a3-megagpu-8g"), 1).parts["attention"] > 0


def test_the_first_gather_and_the_last_reduction_hide_behind_nothing():
    """8B on 64 GPUs: embedding, head and a layer of 218M, gathered in 2 bytes and reduced in 4."""
    quick = replace(DEFAULT, overlap=1e6)  # all but the ends is hidden
    work = job("8B", global_batch_size=64)
    sharding = step_time(work, at(64), option(), 8, quick).parts["sharding"]
    whole = 63 / 64 / 187.5e9
    ends = (2 * 525.3e6 + 218.1e6) * (2 + 4) * whole
    taken = (sharding - ends - 2 * ALLREDUCE_LATENCY_S * 32 / 10) / 0.2 / 1e6
    assert taken == pytest.approx(8.03e9 * (2 + 2 + 4) * whole - ends, rel=0.02), "what is hidden takes a part"


def test_small_gradients_are_reduced_once_a_step_in_time_as_in_memory():
    """The trainer's rule: whole gradients in float32 take less than a tenth of a GPU."""
    times = {}
    for size in ("1B", "8B"):
        few, many = (step_time(job(size, global_batch_size=8 * n), at(8), option(), 1) for n in (1, 9))
        times[size] = (many.parts["sharding"] - few.parts["sharding"]) / few.parts["sharding"] / 8
    assert times["8B"] == pytest.approx(1, abs=1e-6)
    assert times["1B"] < 0.7
    assert "whole gradients" not in memory(job("8B", global_batch_size=64), at(8)).items


def test_adapters_read_and_write_beside_their_matrices():
    work = job("8B", lora_rank=16)
    narrow = replace(work, lora_targets=("q_proj",))
    a, b = (step_time(each, at(8), option(), 1).parts["memory traffic"] for each in (work, narrow))
    others = sum(each.inputs + each.outputs for each in work.shape.linears() if each.name != "q_proj")
    assert a - b == pytest.approx(8 * 4096 * 32 * others * 2 * 3 / 3.35e12, rel=1e-6)


def test_more_machines_wait_longer_for_the_slowest():
    shares = []
    for nodes in (1, 8, 64):
        time = step_time(job(global_batch_size=512), at(8, replicas=nodes), option(), nodes)
        shares.append(time.parts["slowest rank"] / (time.seconds - time.parts["slowest rank"]))
    assert shares == pytest.approx([0.0, 0.015, 0.03])
