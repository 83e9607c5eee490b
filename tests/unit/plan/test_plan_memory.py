"""The closed form of memory: items that anybody can recompute, and rules that hold for every setting."""

from dataclasses import replace

import pytest
from planning import job

from muster.app.planning.memory_trace import BARE as TRACED_BY
from muster.core.optimizers import ADAMW_8BIT
from muster.core.types import Layout
from muster.plan.memory import CUDA, MIB, DeviceOverhead, memory
from muster.plan.workload import Setting

BARE = DeviceOverhead(context_bytes=0, communicator_bytes=0, fragmentation=0.0)


def at(shards=8, replicas=1, tp=1, micro=1, kind="none"):
    layout = Layout(dp_replicate=replicas, dp_shard=shards, tp=tp)
    return Setting(layout=layout, micro_batch_size=micro, activation_checkpointing=kind)


def test_the_known_state_of_8b():
    """fp32 master and AdamW: 16 bytes a parameter, 128 GB in all; 8-bit moments 14 less 2 x 3; LoRA almost nothing."""
    full = memory(job(global_batch_size=8), at(), BARE).items
    state = full["weights"] + full["optimizer state"]
    assert state == pytest.approx(12 * 8.03e9 / 8, rel=1e-3)
    eight = memory(job(optimizer=ADAMW_8BIT, global_batch_size=8), at(), BARE).items
    assert eight["optimizer state"] == pytest.approx(8.03e9 / 8 * 2.03, rel=1e-2)
    lora = memory(job(lora_rank=16, global_batch_size=8), at(), BARE).items
    assert lora["weights"] == pytest.approx((8.03e9 * 2 + 42e6 * 4) / 8, rel=1e-3)
    assert lora["optimizer state"] == pytest.approx(42e6 / 8 * 8, rel=1e-2)


def test_embedding_and_head_that_lora_trains_are_counted():
    """A chat template's new tokens: two matrices of 128,256 x 4,096 in float32 (16 bytes each with gradients and
    moments, instead of 2), one of them where they are tied; whole gradients and cast copies come on top."""
    plain, whole = job(lora_rank=16, global_batch_size=1), job(lora_rank=16, lora_embeddings=True, global_batch_size=1)
    ends = 2 * 128256 * 4096
    assert whole.trained_parameters - plain.trained_parameters == ends
    before, after = memory(plain, at(1), BARE), memory(whole, at(1), BARE)
    assert after.items["weights"] - before.items["weights"] == ends * 2
    assert after.items["optimizer state"] - before.items["optimizer state"] == ends * 8
    assert 14 * ends <= after.total_bytes - before.total_bytes <= 20 * ends
    tied = replace(whole, shape=replace(whole.shape, tied=True))
    assert tied.trained_parameters - plain.trained_parameters == ends / 2
    assert "LoRA r16 with embeddings" in whole.title


@pytest.mark.parametrize("master_bytes", [2, 4])
@pytest.mark.parametrize("saving", [{"snapshot_every": 1}, {"checkpoint_every": 100}, {}])
@pytest.mark.parametrize("device", [BARE, DeviceOverhead()])
def test_8bit_moments_are_smaller_than_whole_ones_also_while_they_are_saved(master_bytes, saving, device):
    """Less by the moments, but for the slices that are whole for a moment."""
    job_ = job("70B", master_bytes=master_bytes, global_batch_size=64, **saving)
    whole, eight = memory(job_, at(64), device), memory(replace(job_, optimizer=ADAMW_8BIT), at(64), device)
    less = 70.55e9 / 64 * (2 * master_bytes - 2.03)
    assert whole.total_bytes - eight.total_bytes >= less * 0.98 - 50 * 2**20 * 1.04
    assert "whole moments" not in eight.items and eight.items.get("slices of whole moments", 0) <= 48 << 20


def test_bf16_master_halves_the_state():
    assert memory(job(master_bytes=2), at(), BARE).items["optimizer state"] * 2 == pytest.approx(
        memory(job(), at(), BARE).items["optimizer state"], rel=1e-6
    )


def test_activations_of_8b_at_4k():
    """bf16, eager: 16h + 4a + 4k + 8i bytes a token and layer, and 4 bytes a head for the log-sum-exp."""
    found = memory(job(compile=False, global_batch_size=8), at(), BARE)
    per_layer = 16 * 4096 + 4 * 4096 + 4 * 1024 + 8 * 14336 + 4 * 32
    assert found.items["activations"] >= 4096 * 32 * per_layer
    assert found.items["activations"] < 4096 * 32 * per_layer * 1.1


@pytest.mark.parametrize("size", ["8B", "70B"])
def test_less_is_kept_the_more_is_recomputed(size):
    kept = {kind: memory(job(size), at(64, kind=kind), BARE).total_bytes for kind in ("none", "selective", "full")}
    assert kept["full"] < kept["none"]
    eager = {
        kind: memory(job(size, compile=False), at(64, kind=kind), BARE).total_bytes
        for kind in ("none", "selective", "full")
    }
    assert eager["full"] < eager["selective"] < eager["none"]


def test_more_of_anything_costs_more():
    base = memory(job(), at(8), BARE).total_bytes
    assert memory(job(), at(16), BARE).total_bytes < base
    assert memory(job(), at(8, micro=2), BARE).total_bytes > base
    assert memory(job(sequence_length=8192), at(8), BARE).total_bytes > base
    assert memory(job(loss_chunk_tokens=0), at(8), BARE).total_bytes >= base
    assert memory(job(exact=True), at(8), BARE).total_bytes > base
    assert memory(job(reshard_after_forward=False), at(8), BARE).total_bytes > base
    assert memory(job("70B"), at(8), BARE).total_bytes > base


def test_replicas_share_nothing():
    work = job(global_batch_size=16)
    assert (
        memory(work, at(8, replicas=2), BARE).total_bytes == memory(job(global_batch_size=8), at(8), BARE).total_bytes
    )


def test_tensor_parallel_leaves_head_and_embedding_whole():
    alone = memory(job("70B"), at(8, tp=1), BARE).items["weights"]
    cut = memory(job("70B"), at(8, tp=8), BARE).items["weights"]
    outside = 2 * 128256 * 8192 + 8192 + 80 * 2 * 8192
    assert cut * 8 == pytest.approx((70.55e9 - outside) / 8 * 4 + outside * 4, rel=1e-2)
    assert cut < alone


def test_items_add_up_and_overheads_are_named():
    found = memory(job(), at(8))
    assert sum(found.items.values()) == found.total_bytes
    assert found.items["context"] > 0 and found.items["communicators"] > 0
    assert "communicators" not in memory(job(), at(1)).items


def test_big_logits_are_seen_where_they_are_not_chunked():
    """1B at 8 x 4k without chunks: float32 logits alone are 16.8 GB (bf16 copies come on top)."""
    whole = memory(job("1B", loss_chunk_tokens=0), at(1, micro=8, kind="full"), BARE)
    assert whole.moment == "loss"
    assert whole.items["logits and loss"] > 8 * 4096 * 128256 * 4
    assert memory(job("1B"), at(1, micro=8, kind="full"), BARE).total_bytes < whole.total_bytes - 10 * 2**30


#: GiB of one rank's tensors at the peak, by ``benchmarks/plan_trace.py`` (the real model and FSDP2 on fake tensors).
TRACED = {
    ("8B", 8, "none"): 42.23, ("8B", 8, "full"): 19.73, ("8B", 32, "none"): 33.82, ("8B", 32, "full"): 8.95,
    ("8B", 128, "none"): 31.72, ("8B", 128, "full"): 6.70, ("70B", 8, "none"): 238.93, ("70B", 8, "full"): 143.38,
    ("70B", 32, "none"): 165.01, ("70B", 32, "full"): 45.85, ("70B", 128, "none"): 146.53, ("70B", 128, "full"): 24.04,
}  # fmt: skip


@pytest.mark.parametrize(("size", "shards", "kind"), TRACED)
def test_the_closed_form_agrees_with_what_was_traced(size, shards, kind):
    found = memory(job(size, global_batch_size=shards, compile=False), at(shards=shards, kind=kind), TRACED_BY)
    assert found.total_bytes / 2**30 == pytest.approx(TRACED[size, shards, kind], rel=0.03)


def test_a_large_product_for_the_heads_gradient_is_wider_on_cuda():
    """There it is summed in float32 beside the float32 total; on a CPU in the compute type."""
    work = job("8B", global_batch_size=128, compile=False)
    cpu, cuda = (memory(work, at(shards=128, kind="full"), replace(TRACED_BY, streams=on)) for on in (False, True))
    assert cpu.moment == "loss"
    assert cuda.total_bytes > cpu.total_bytes


def test_a_standbys_context_is_counted_where_one_waits_on_a_gpu():
    held = memory(job(), at(8))
    without = memory(job(warm_standby=False), at(8))
    assert held.items["standby"] == held.total_bytes - without.total_bytes == CUDA.standby_bytes > 0
    assert "standby" not in memory(job(), at(8), BARE).items


@pytest.mark.parametrize(("shards", "replicas", "number"), [(1, 1, 0), (8, 1, 2), (1, 2, 1), (8, 2, 3)])
def test_each_group_of_ranks_has_a_communicator(shards, replicas, number):
    items = memory(job(global_batch_size=64), at(shards, replicas=replicas)).items
    assert items.get("communicators", 0) == number * CUDA.communicator_bytes + bool(number) * CUDA.nccl_bytes


def test_the_first_communicator_of_a_rank_takes_what_it_took_on_an_h100():
    first, second = (
        memory(job(global_batch_size=64), at(shards, replicas=2)).items["communicators"] for shards in (1, 8)
    )
    assert first == 676 * MIB and second == first + 2 * 405 * MIB


def test_attentions_backward_pass_needs_room_for_many_short_documents():
    bare = replace(CUDA, attention_workspace=False)

    def more(**changes):
        work = job("8B", loss_chunk_tokens=64, lora_rank=8, **changes)
        with_it, without = (memory(work, at(8, kind="none", micro=4), device) for device in (CUDA, bare))
        assert with_it.moment == without.moment == "backward"
        return with_it.total_bytes - without.total_bytes

    # Four times 4,096 tokens, 32 heads of 128: float32 sums of each row and of 128 rows a document; whole gradients of
    # k and v.
    whole = 4 * ((4096 + 128) * 4096 * 4 + 2 * 4096 * 4096 * 2)
    assert more() == pytest.approx(whole * (1 + CUDA.fragmentation), rel=1e-6)
    assert more(document_length=64) - more() == pytest.approx(
        4 * 63 * 128 * 4096 * 4 * (1 + CUDA.fragmentation), rel=1e-6
    )
