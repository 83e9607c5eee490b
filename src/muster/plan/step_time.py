"""Seconds of one step: arithmetic at a measured ceiling, memory traffic, communication with overlap, stalls.

Model FLOP utilisation is an outcome, never an input. What is modelled:

* matrices: their FLOPs at ``ceiling x efficiency`` (fp8, mxfp8: the layers' linear parts at that ceiling);
* attention: its causal FLOPs at what its kernel was seen to reach on the chip with heads of that size
  (``accelerators.yaml``), less for short documents; where that is unknown, and on a CPU, as matrices;
* the rest of a layer is memory traffic: passes over its activations, fewer where compiled;
* FSDP: each round gathers every unit for the forward pass, again for the backward pass (if resharded), and
  reduce-scatters float32 gradients; the share ``overlap`` of arithmetic can hide it, the rest is exposed;
  what is hidden takes processors and bandwidth from it. Each round's first gather and last reduction hide behind
  nothing. Gradients are reduced once a step where the trainer does (``memory.reduced_once``), else in each round;
* tensor parallel: four all-reduces of the stream a layer and round, not hidden; one more where layers run again, since
  torch stops there before the last one's (on TPUs two more, where they run again in full);
* replicas: one all-reduce of float32 gradient shards in the last round, which the same share of its backward pass hides
  (the trainer begins a unit's when its gradient is final);
* with each doubling of the machines a little more: a step waits for its slowest rank.

TPUs: useful operations at the planned MFU of the chip (``accelerators.yaml``), which includes recomputation and
memory traffic too; what sharding exposes, the update and snapshots are added as above.

A collective of S bytes over n ranks takes S (n-1)/n / bus bandwidth (all-gather, reduce-scatter), twice that as
all-reduce; ranks of several groups on one machine share its data network.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from muster.catalog.offers import Fabric, Option
from muster.core import intervals
from muster.core.errors import NoPlanError
from muster.core.flops import Convention
from muster.plan.activations import recomputed_share
from muster.plan.constants import (
    ATTENTION_HALF_TOKENS,
    COLLECTIVE_SHARE,
    CONTEXT_SHARE,
    DEFAULT,
    FLOAT32_PASSES,
    FP8_CAST_BYTES,
    FP8_SHARE,
    LAYER_NORM_TRAFFIC,
    TRAFFIC,
    WAITING_SHARE,
    Constants,
)
from muster.plan.memory import held_parameters, reduced_once
from muster.plan.workload import Setting, Workload

REDUCE_BYTES = 4
_DAY_S = 86400.0
ALLREDUCE_LATENCY_S = 30e-6
"""A collective's latency inside a machine and across a few; from memory, unchecked."""


@dataclass(frozen=True, kw_only=True)
class StepTime:
    """Seconds of one step by what they go to; ``seconds`` is their sum."""

    parts: Mapping[str, float]
    useful_flops: float
    """By the CAUSAL convention, padding and recompute left out."""
    gpus: int
    peak_flops_per_gpu: float | None
    snapshot_every: int
    """Steps between in-memory snapshots: the run file's, or by cost; 0: none."""
    snapshot_every_by_cost: int
    """What ``auto`` would take."""
    snapshot_s: float
    """Of one snapshot, until it counts; ``parts`` has what of it a step waits for."""

    @property
    def seconds(self) -> float:
        return sum(self.parts.values())

    @property
    def mfu(self) -> float | None:
        """An outcome: useful operations over what the chips' bf16 peak allows."""
        if not self.peak_flops_per_gpu:
            return None
        return self.useful_flops / (self.seconds * self.gpus * self.peak_flops_per_gpu)


def step_time(
    work: Workload, setting: Setting, option: Option, num_nodes: int, constants: Constants = DEFAULT
) -> StepTime:
    """One step of ``work`` on ``num_nodes`` machines.

    Raises:
        NoPlanError: a number that is needed is unknown (peak, fabric).
    """
    ceiling = option.ceiling_flops
    if not ceiling:
        raise NoPlanError(f"the bf16 peak of {option.accelerator.name} is unknown")
    layout, rounds = setting.layout, setting.rounds(work)
    tokens = setting.micro_batch_size * work.sequence_length * rounds // layout.cp
    matrices = _matrices(work, setting, option, tokens, ceiling, constants) / layout.pp
    attention = _attention(work, setting, option, tokens, ceiling, constants) / layout.pp
    traffic = _traffic(work, setting, option, tokens, constants) / layout.pp
    host = rounds * work.shape.layers * constants.host_s_per_layer * (0.5 if work.compile else 1.0)
    if option.is_tpu:
        matrices, attention, traffic, host = _by_mfu(work, option, tokens / layout.tp, ceiling), 0.0, 0.0, 0.0
    arithmetic = max(matrices + attention + traffic, host)
    forward_share = 1.0 / (3.0 if work.trains_all else 2.0)
    again = recomputed_share(setting.activation_checkpointing)
    forward_share *= 1.0 / (1.0 + again * forward_share)
    weights = matrices / arithmetic / (3.0 + again) if work.trains_all else 0.0  # the head counts along: it is small
    links = Links(option.fabric, option.offer.gpus_per_node, num_nodes, layout.tp, layout.shards)
    exposed = _sharding(work, setting, option, links, rounds, arithmetic, forward_share, constants)
    tensor = _tensor(work, setting, option, links, rounds, constants) * (1 - work.hidden_tensor_parallel)
    useful = work.useful_flops_per_token() * work.tokens_per_step * work.fill
    padding = setting.padding(work)
    parts = {
        "matrices": matrices * (1 - padding),
        "attention": attention * (1 - padding),
        "memory traffic": (arithmetic - matrices - attention) * (1 - padding),
        "padding": arithmetic * padding,
        "sharding": exposed,
        "tensor parallel": tensor,
        "context parallel": _context(work, setting, links, rounds),
        "pipeline bubble": (arithmetic + tensor) * bubble(work, layout.pp, rounds, weights, forward_share),
        "replicas": _replicas(work, setting, links, arithmetic / rounds * (1 - forward_share) * constants.overlap),
        "optimizer": _optimizer(work, setting, option),
    }
    if not option.is_tpu:
        parts["slowest rank"] = WAITING_SHARE * math.log2(num_nodes) * sum(parts.values())
    snapshots = _snapshots(work, setting, option, num_nodes, parts, constants)
    return StepTime(
        parts={**parts, "snapshots": snapshots.stall_s / snapshots.every if snapshots.every else 0.0},
        snapshot_every=snapshots.every,
        snapshot_every_by_cost=snapshots.automatic,
        snapshot_s=snapshots.takes_s,
        useful_flops=useful,
        gpus=layout.world_size,
        peak_flops_per_gpu=option.offer.peak_flops_per_gpu,
    )


def bubble(work: Workload, stages: int, rounds: int, weights: float, forward: float) -> float:
    """The time in which a stage waits, as a share of its work. ``weights`` and ``forward``: the shares of the matrices'
    gradients and of forward passes in it.

    1F1B: ``(stages - 1) / rounds`` (Narayanan et al. 2019); with several chunks of a stage interleaved a part of that
    (Narayanan et al. 2021, section 2.2). With gradients of weights apart ``(stages - 1)(F + B - W)`` in place of
    ``(stages - 1)(F + B + W)`` (Qi et al. 2023, ZB-H1), for forward pass, backward pass without them, and
    them; in a V of two chunks a stage (ZB-V) ``(stages - 1) max(B / 2, B - W)``, where neither F nor W takes longer
    than B. Stages are taken as equals, and the micro-batches as many as the stages at least, in a V ``2 stages - 1``.
    """
    if work.pipeline_v:
        backward = 1 - forward - weights
        return (stages - 1) / rounds * max(backward / 2, backward - weights)
    return (stages - 1) / (rounds * work.pipeline_chunks) * (1 - 2 * weights if work.weights_apart else 1.0)


@dataclass(frozen=True)
class Links:
    """Bus bandwidths of the groups of one layout."""

    fabric: Fabric
    gpus_per_node: int
    num_nodes: int
    tp: int
    shards: int

    def shard(self) -> float:
        """Of one sharded group: inside a machine, or its part of the data network."""
        inside = self.gpus_per_node // self.tp
        if self.shards <= inside:
            return self.tensor()
        return min(self._inter() * min(1.0, inside / self.gpus_per_node), self.tensor())

    def replicate(self) -> float:
        """Of one group of replicas: every GPU of a machine has its own, and they share the data network."""
        return self.tensor() if self.num_nodes == 1 else self._inter() / self.gpus_per_node

    def tensor(self) -> float:
        """Inside a machine."""
        if self.gpus_per_node == 1:
            return self._inter()
        if self.fabric.intra is None:
            raise NoPlanError("the link between its GPUs is unknown")
        return self.fabric.intra

    def _inter(self) -> float:
        if self.fabric.inter is None:
            raise NoPlanError("its data network is unknown")
        return self.fabric.inter


def _matrices(
    work: Workload, setting: Setting, option: Option, tokens: float, ceiling: float, constants: Constants
) -> float:
    """Seconds of one rank's matrix products, attention's aside."""
    shape, tp = work.shape, setting.layout.tp
    again = recomputed_share(setting.activation_checkpointing) / 3.0
    share = 1.0 if work.trains_all else 2.0 / 3.0  # frozen matrices need no weight gradient
    linear = 6.0 * shape.layers * shape.layer_active_parameters * (share + again)
    if not work.trains_all:
        linear += 6.0 * work.active_adapters
    head_work = 6.0 * shape.head_parameters * (1.0 if work.trains_head else share)
    rate = ceiling
    if constants.precision != "bf16":
        chip, precision = option.accelerator, constants.precision
        fast, peak = chip.matmul_flops.get(precision), chip.peak_flops.get(precision)
        if fast is None and peak is None:
            raise NoPlanError(f"the {precision} peak of {chip.name} is unknown, or it has none")
        rate = fast or (peak or 0.0) * ceiling / (chip.peak_flops["bf16"] or 1.0)
        rate *= FP8_SHARE
    # The head is not cut: every tp rank does it whole.
    return tokens * (linear / rate / tp + head_work / ceiling) / constants.efficiency


def _attention(
    work: Workload, setting: Setting, option: Option, tokens: float, ceiling: float, constants: Constants
) -> float:
    """Seconds of one rank's attention."""
    shape = work.shape
    again = recomputed_share(setting.activation_checkpointing) / 3.0
    flops = tokens * work.attention_flops_per_token() * (1 + again) / setting.layout.tp
    chip = option.accelerator
    kernel = chip.attention_rate(work.attention, shape.head_dim)
    if kernel is None:
        if work.attention and chip.attention_flops and work.attention not in chip.attention_flops:
            raise NoPlanError(
                f"{chip.name} has no {work.attention} attention; known: {', '.join(chip.attention_flops)}"
            )
        return flops / (ceiling * constants.efficiency)
    kernel *= CONTEXT_SHARE if setting.layout.cp > 1 else 1.0
    length = min(work.document_length or work.sequence_length, work.sequence_length)
    return flops / (kernel * length / (length + ATTENTION_HALF_TOKENS) * constants.attention_efficiency)


def _by_mfu(work: Workload, option: Option, tokens: float, peak: float) -> float:
    """Seconds of one TPU chip's arithmetic."""
    mfu = option.accelerator.mfu
    if mfu is None:
        raise NoPlanError(f"the MFU to plan {option.accelerator.name} with is unknown")
    passes = 1 if work.compute_bytes == 2 else FLOAT32_PASSES
    return tokens * work.useful_flops_per_token() * passes / (peak * mfu)


def _traffic(work: Workload, setting: Setting, option: Option, tokens: float, constants: Constants) -> float:
    """Seconds of everything but matrix products: bound by memory, not by arithmetic."""
    bandwidth = option.accelerator.memory_bytes_per_s
    if bandwidth is None:
        raise NoPlanError(f"the memory bandwidth of {option.accelerator.name} is unknown")
    shape, tp = work.shape, setting.layout.tp
    by_hidden, by_attention, by_mlp = (
        LAYER_NORM_TRAFFIC if shape.layer_norm and not work.compile else TRAFFIC[work.compile]
    )
    kv = shape.kv_heads * shape.head_dim
    elements = (
        by_hidden * shape.hidden + (by_attention * (shape.attention_width + kv) + by_mlp * shape.intermediate) / tp
    )
    if work.lora_rank:  # an adapter reads its matrix's input again, and adds to its output
        adapted = [
            each for each in shape.linears() if work.lora_targets == "all-linear" or each.name in work.lora_targets
        ]
        elements += sum(each.inputs + each.outputs for each in adapted) / tp
    passes = 3.0 + recomputed_share(setting.activation_checkpointing)
    if setting.activation_checkpointing == "selective":
        passes += 1.0
    layers = shape.layers * elements * work.compute_bytes * passes
    if constants.precision != "bf16":  # inputs, weights' gradients' inputs and outgoing gradients are scaled and cast
        cast = 4 * shape.hidden + (2 * shape.attention_width + 2 * kv + 3 * shape.intermediate) / tp
        layers += FP8_CAST_BYTES * shape.layers * cast
    logits = 20.0 * shape.vocab * work.supervised
    chunk = work.loss_chunk_tokens or setting.micro_batch_size * work.sequence_length
    head = 12.0 * shape.head_parameters / max(1, chunk) * work.supervised if work.trains_head else 0.0
    return tokens * (layers + logits + head) / bandwidth


def _sharding(
    work: Workload, setting: Setting, option: Option, links: Links, rounds: int, arithmetic: float,
    forward_share: float, constants: Constants,
) -> float:  # fmt: skip
    """Seconds of FSDP's collectives that arithmetic does not hide, and what the hidden ones take of it."""
    shards = setting.layout.shards
    if shards == 1:
        return 0.0
    cut = (shards - 1) / shards / links.shard()
    shape, layout = work.shape, setting.layout
    held = held_parameters(work, layout) * shards / layout.pp
    trained = held if work.trains_all else work.trained_parameters
    gather = held * work.compute_bytes * cut
    reduce = trained * REDUCE_BYTES * (2 if work.exact else 1) * cut
    # Nothing hides the first gather (embedding, head, one layer) and the last reduction (the same).
    ends = shape.head_parameters + shape.embedding_parameters + shape.layer_matmul_parameters / layout.tp
    ends = 1 / shape.layers if option.is_tpu else min(1.0, ends / held)
    again = gather if work.reshard_after_forward else 0.0
    hidden = constants.overlap * arithmetic / rounds
    forward_s, backward_s = hidden * forward_share, hidden * (1 - forward_share)

    def exposed(end: float, rest: float, hidden_s: float) -> float:
        return end + max(0.0, rest - hidden_s)

    latency = 2 * ALLREDUCE_LATENCY_S * max(1, shape.layers) / 10
    if work.once_a_step:
        total = gather + reduce
        waits = exposed(ends * total, (1 - ends) * total, hidden) + latency
    else:
        reductions = 1 if reduced_once(work, rounds, option.offer.gpu_memory_bytes) and not option.is_tpu else rounds
        total = rounds * (gather + again) + reductions * reduce
        waits = rounds * (exposed(ends * gather, (1 - ends) * gather, forward_s) + latency)
        waits += reductions * exposed(ends * reduce, again + (1 - ends) * reduce, backward_s)
        waits += (rounds - reductions) * exposed(0.0, again, backward_s)
    taken = 0.0 if option.is_tpu else COLLECTIVE_SHARE * constants.overlap  # a TPU's links need none of its cores
    return waits + taken * max(0.0, total - waits)


def _tensor(work: Workload, setting: Setting, option: Option, links: Links, rounds: int, constants: Constants) -> float:
    """Seconds of the all-reduces inside layers, and of what a rank on a CPU spends around each matrix."""
    tp, shape = setting.layout.tp, work.shape
    if tp == 1:
        return 0.0
    tokens = setting.micro_batch_size * work.sequence_length // setting.layout.cp
    stream = tokens * shape.hidden * work.compute_bytes
    kind = setting.activation_checkpointing
    again = 2 * (kind == "full") if option.is_tpu else int(kind != "none")
    call_s = 2 * (tp - 1) / tp * stream / links.tensor() + ALLREDUCE_LATENCY_S
    layer_s = (4 + again) * call_s + len(shape.linears()) * constants.split_matrix_s
    return rounds * shape.layers / setting.layout.pp * layer_s


def _context(work: Workload, setting: Setting, links: Links, rounds: int) -> float:
    """Seconds of gathering keys and values in each layer, of summing their gradients, and of gathering them again where
    the layer is computed again. Not hidden."""
    layout, shape = setting.layout, work.shape
    if layout.cp == 1:
        return 0.0
    width = 2 * shape.kv_heads * shape.head_dim / layout.tp
    whole = setting.micro_batch_size * work.sequence_length * width * work.compute_bytes
    gather = whole * (layout.cp - 1) / layout.cp / links.shard()
    calls = 2 + (1 if setting.activation_checkpointing == "full" else 0)
    return rounds * shape.layers / layout.pp * calls * (gather + ALLREDUCE_LATENCY_S)


def _replicas(work: Workload, setting: Setting, links: Links, hidden_s: float) -> float:
    """Seconds of the sum over replicas. It begins within the last backward pass, of which ``hidden_s`` hide it; what
    is left at least is the last unit's. Never measured on a GPU."""
    layout = setting.layout
    if layout.dp_replicate == 1:
        return 0.0
    shard = trained_here(work, setting) * work.master_bytes * (2 if work.exact else 1) / max(1, work.local_steps)
    whole = 2 * (layout.dp_replicate - 1) / layout.dp_replicate * shard / links.replicate()
    exposed = whole if work.local_steps else max(whole - hidden_s, whole / max(1, work.shape.layers))
    return exposed + ALLREDUCE_LATENCY_S


def _optimizer(work: Workload, setting: Setting, option: Option) -> float:
    """Seconds of the norm and the update: each rank reads and writes its part of weights, gradients and moments."""
    bandwidth = option.accelerator.memory_bytes_per_s
    assert bandwidth is not None
    trained = trained_here(work, setting)
    return trained * (4 * work.master_bytes + 2 * work.optimizer.device_bytes(work.master_bytes)) / bandwidth


@dataclass(frozen=True)
class _Snapshots:
    every: int
    automatic: int
    takes_s: float
    stall_s: float
    """Of each."""


def _snapshots(
    work: Workload, setting: Setting, option: Option, num_nodes: int, parts: Mapping[str, float], constants: Constants
) -> _Snapshots:
    """What snapshots cost. A copy overlaps with the next step until its update, which waits for what is left of it;
    then a thread computes the checksum, for which the next snapshot waits."""
    size, step_s = local_state_bytes(work, setting), sum(parts.values())
    copy_s = size / constants.device_to_host_bytes_per_s
    takes_s = copy_s + size / constants.checksum_bytes_per_s
    overlaps = constants.copies_beside and not option.is_tpu
    held_s = max(0.0, copy_s - step_s + parts["optimizer"]) if overlaps else copy_s
    failures_per_s = option.mode.failures_per_node_day * num_nodes / _DAY_S
    mtbf_s = 1 / failures_per_s if failures_per_s else math.inf
    automatic = intervals.snapshot_steps(held_s, step_s, bytes_=size, takes_s=takes_s, mtbf_s=mtbf_s)
    every = automatic if work.snapshot_every is None else work.snapshot_every
    return _Snapshots(every, automatic, takes_s, held_s + max(0.0, takes_s - held_s - every * step_s))


def local_state_bytes(work: Workload, setting: Setting) -> float:
    """What a rank must save: its weights (trained ones) and moments; 8-bit ones as float32, as the trainer does."""
    return trained_here(work, setting) * (work.master_bytes + work.optimizer.saved_bytes(work.master_bytes))


def trained_here(work: Workload, setting: Setting) -> float:
    """Trained parameters on one rank; stages of a pipeline count as equal."""
    layout = setting.layout
    if work.trains_all:
        return held_parameters(work, layout) / layout.pp
    return work.trained_parameters / (layout.shards * layout.pp)


def tokens_per_second_per_gpu(work: Workload, time: StepTime) -> float:
    """Positions a second and GPU, as most published figures count (padding is work)."""
    return work.tokens_per_step / time.seconds / time.gpus


def achieved_tflops(work: Workload, time: StepTime, convention: Convention = Convention.CAUSAL) -> float:
    """TFLOP/s a GPU by a convention, to compare with what others print."""
    flops = work.useful_flops_per_token(convention) * work.tokens_per_step
    return flops / time.seconds / time.gpus / 1e12
