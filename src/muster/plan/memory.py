"""Peak memory of one rank, item by item, in closed form.

The trainer's own rules are followed: parameters cut by FSDP over ``dp_shard`` (and by ``tp`` before), one unit a
decoder layer, one for a large untied embedding, the root (head, last norm, tied or small embedding) whole from
forward to backward; gradients reduced in float32 and kept in the master type; loss in chunks with its gradients.

The peak is the largest over the moments of a step: forward, loss, its backward, the layers' backward, the root's
gradient, the update, a save. Each formula was compared with ``train.memory_trace``, which counts the real tensors.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from muster.core.layout import forwards_ahead, kept_in_v, part_of
from muster.core.types import Layout
from muster.plan.activations import kept_per_token, working_per_token
from muster.plan.workload import Setting, Workload

MIB = 1 << 20
REDUCE_BYTES = 4
#: The trainer cuts a large untied embedding off the root (its ``EMBEDDING_UNIT_NUMEL``).
EMBEDDING_UNIT_NUMEL = 64_000_000
#: The trainer keeps whole gradients, reduced once a step, where they take less than this share of a rank's memory.
LOCAL_GRADIENTS_SHARE = 0.1

#: While the trainer converts a slice of compact moments (its ``SLICE_BYTES``): indices, values, and their product.
SLICES_BYTES = 3 * 16 * MIB


@dataclass(frozen=True, kw_only=True)
class DeviceOverhead:
    """Memory besides the trainer's tensors. The context is from memory, unchecked; ``calibrate`` replaces it."""

    context_bytes: int = 600 * MIB
    communicator_bytes: int = 405 * MIB
    """Buffers of one NCCL communicator. A rank has one for all ranks, and one for each axis of more than one."""
    nccl_bytes: int = 0
    """What the first communicator of a rank takes besides its buffers: NCCL's kernels."""
    standby_bytes: int = 0
    """What the warm standby of each rank holds: a context, cuBLAS, the first kernels."""
    attention_workspace: bool = False
    """Attention's backward pass needs float32 sums and, for grouped heads, whole gradients (flash attention)."""
    fragmentation: float = 0.04
    """Share of the tensors' bytes that the allocator holds and cannot use."""
    expanded_kv: bool = False
    """The attention kernel takes keys and values repeated to the queries' heads (CPU)."""
    stages_here: bool = False
    """A save's staging copy is in the same memory (CPU): the state once more, in addition to the gradients."""
    streams: bool = True
    """Collectives overlap arithmetic (CUDA), so that the next unit's gather buffer and the last one's reduce-scatter
    input are alive too."""
    capacity_bytes: int | None = None


#: Seen on one H100 with NCCL 2.28.9 (benchmarks/RESULTS.md, 2026-11-26): a process's first communicator took 676 MiB,
#: its second 405; a standby 718, before it loaded the compiler too.
CUDA = DeviceOverhead(standby_bytes=750 * MIB, nccl_bytes=271 * MIB, attention_workspace=True)
#: Rows that flash attention's backward pass adds for each document (flash_api.cpp, mha_varlen_bwd: dq_accum).
ROWS_PER_DOCUMENT = 128


@dataclass(frozen=True, kw_only=True)
class MemoryEstimate:
    """Bytes of one rank at its peak, by what they are for. The items add up to ``total_bytes``."""

    items: Mapping[str, int]
    moment: str
    """When the peak is: forward, loss, backward of the loss, backward, end of backward, update, save."""

    @property
    def total_bytes(self) -> int:
        return sum(self.items.values())


def memory(work: Workload, setting: Setting, device: DeviceOverhead = CUDA) -> MemoryEstimate:
    """Peak of one rank (the fullest: uneven shards are rounded up, and of the stages that which needs most)."""
    pp = setting.layout.pp
    chunks = work.pipeline_chunks if pp > 1 else 1
    of_each = [
        _memory_of(
            replace(work, shape=shape),
            setting,
            device,
            under_way=_under_way(place, pp, chunks, setting, work),
            at_the_loss=_under_way(place, pp, chunks, setting, work, at_the_loss=True),
        )
        for place, shape in enumerate(work.shape.stages(pp, chunks, v=work.pipeline_v))
    ]
    return max(of_each, key=lambda estimate: estimate.total_bytes)


def _under_way(
    place: int, stages: int, chunks: int, setting: Setting, work: Workload, *, at_the_loss: bool = False
) -> float:
    """Micro-batches whose activations a stage keeps at most; those of one of its ``chunks`` count as a part.

    1F1B: as many as there are stages from it on (Narayanan et al. 2019). Interleaved: ``2 (stages - place - 1) +
    (chunks - 1) stages + 1`` passes through a chunk (Narayanan et al. 2021, section 2.2). With gradients of weights
    apart as many everywhere as on the first stage of 1F1B (Qi et al. 2023, ZB-H1; in a V mostly of its first chunk);
    all counted whole, though of some only the matrices' inputs and output gradients are left.
    """
    rounds = setting.rounds(work)
    if work.pipeline_v and stages > 1:
        parts = work.shape.parts(stages, chunks)
        layers = len(parts[place]), len(parts[part_of(place, 1, stages, v=True)])
        kept = kept_in_v(place, stages, rounds, layers)
        return (kept[1] if at_the_loss else max(kept)) / sum(layers)
    if work.weights_apart:
        return min(stages, rounds)
    return min(forwards_ahead(place, stages, chunks, rounds) + 1, chunks * rounds) / chunks


def _memory_of(
    work: Workload, setting: Setting, device: DeviceOverhead, *, under_way: float, at_the_loss: float
) -> MemoryEstimate:
    """Peak of a rank of a stage whose part of the model is ``work.shape``. ``under_way``, ``at_the_loss``: see
    ``_under_way``."""
    units = _units(work, setting.layout.tp)
    static = _static(work, setting, device)
    gathered = _gathered(work, units, setting.layout.shards, streams=device.streams)
    tokens = setting.micro_batch_size * work.sequence_length // setting.layout.cp
    waiting = tokens * _kept(work, setting, device) * (under_way - 1)
    kept = tokens * _kept(work, setting, device) + waiting
    before_loss = tokens * _kept(work, setting, device) * at_the_loss
    working = tokens * _working(work, setting, device) + _workspace(work, setting, tokens, device)
    if setting.layout.cp > 1:  # keys and values of whole sequences, gathered and in order; never measured
        heads = work.shape.kv_heads * work.shape.head_dim / setting.layout.tp
        working += 2 * 2 * tokens * setting.layout.cp * heads * work.compute_bytes
    loss = _loss(work, tokens, cuda=device.streams)
    # In the first round no gradient exists yet; later the shards' do, or whole ones; the root's comes last.
    later = setting.rounds(work) > 1
    held = (static["whole gradients"] or static["gradients"]) if later else 0.0
    before_root = static["gradients"] - static["root gradient"]
    before_first = before_root - static["embedding gradient"]
    if later and not static["whole gradients"]:
        before_root = before_first = static["gradients"]
    moments: dict[str, dict[str, float]] = {
        "forward": {"gradients": held, "activations": kept, "gathered parameters": gathered.root + gathered.forward},
        "loss": {"gradients": held, "activations": before_loss, "logits and loss": loss.forward,
                 "gathered parameters": gathered.root + gathered.between},
        "backward of the loss": {"gradients": held, "activations": before_loss, "logits and loss": loss.backward,
                                 "gathered parameters": gathered.root + gathered.between},
        "backward": {"gradients": held + loss.head_gradient, "activations": kept + working,
                     "gathered parameters": gathered.root + gathered.backward},
        "backward of the first layer": {"gradients": before_first + loss.head_gradient,
                                        "activations": waiting + tokens * _kept_of_one(work, setting, device) + working,
                                        "gathered parameters": gathered.root + gathered.embedding + gathered.backward},
        "end of backward": {"gradients": before_root + gathered.root_gradient, "gathered parameters": gathered.root},
        "update": {"gradients": static["gradients"]},
        "save": {"gradients": static["gradients"], "slices of whole moments": static["slices"],
                 "staged copy": static["saved"] if device.stages_here else 0},
    }  # fmt: skip
    base = {"weights": static["weights"], "optimizer state": static["optimizer"]}
    moment = max(moments, key=lambda name: sum(moments[name].values()))
    items = {name: round(value) for name, value in {**base, **moments[moment]}.items() if value}
    tensors = sum(items.values())
    items["allocator"] = round(tensors * device.fragmentation)
    items["context"] = device.context_bytes
    items["standby"] = device.standby_bytes if work.warm_standby else 0
    number = communicators(setting.layout)
    items["communicators"] = number * device.communicator_bytes + (device.nccl_bytes if number else 0)
    return MemoryEstimate(items={name: value for name, value in items.items() if value}, moment=moment)


def communicators(layout: Layout) -> int:
    """NCCL communicators of one rank: that of its replica, one for each axis inside it, one across replicas."""
    inside = layout.ranks_per_replica > 1
    axes = (layout.tp > 1) + (layout.pp > 1) + (layout.cp > 1 and layout.dp_shard > 1) + (layout.dp_replicate > 1)
    return inside + (inside and layout.shards > 1) + axes


def _workspace(work: Workload, setting: Setting, tokens: int, device: DeviceOverhead) -> float:
    """Bytes of one layer's attention while its gradients are computed, beyond what ``activations`` counts."""
    if not device.attention_workspace:
        return 0.0
    shape, tp = work.shape, setting.layout.tp
    documents = tokens / min(work.document_length or work.sequence_length, work.sequence_length)
    width = shape.attention_width / tp
    whole = 2 * tokens * width * work.compute_bytes if shape.kv_heads * shape.head_dim < shape.attention_width else 0.0
    return (tokens + ROWS_PER_DOCUMENT * documents) * width * 4 + whole


def reduced_once(work: Workload, rounds: int, capacity_bytes: int | None) -> bool:
    """Whether whole gradients are kept over the micro-batches and reduced with the last (the trainer's rule)."""
    if rounds == 1 or work.exact or capacity_bytes is None:
        return False
    return work.trained_parameters * REDUCE_BYTES < LOCAL_GRADIENTS_SHARE * capacity_bytes


def held_parameters(work: Workload, layout: Layout) -> float:
    """Parameters (without adapters) of ``work.shape`` on one rank: layers are cut by tp and dp_shard, the rest by
    dp_shard alone."""
    shape = work.shape
    matrices = shape.layers * shape.layer_matmul_parameters
    return (matrices / layout.tp + shape.parameters - matrices) / layout.shards


@dataclass(frozen=True, kw_only=True)
class Units:
    """Parameters of the FSDP units on one tensor-parallel rank."""

    layer: float
    layers: int
    root: float
    """Head, last norm, and the embedding where it is tied or small."""
    embedding: float
    """A unit of its own; 0: in the root."""
    adapters_per_layer: float


def _units(work: Workload, tp: int) -> Units:
    shape = work.shape
    adapters = work.adapter_parameters / shape.layers
    norms = shape.layer_parameters - shape.layer_matmul_parameters
    layer = shape.layer_matmul_parameters / tp + norms + adapters
    root = float(shape.head_parameters + shape.hidden)  # the trainer cuts layers alone over tp
    embedding = float(shape.embedding_parameters)
    if shape.embedding_parameters < EMBEDDING_UNIT_NUMEL:
        root, embedding = root + embedding, 0.0
    if shape.parameters < work.whole_below:
        root, layer = root + layer * shape.layers + embedding, 0.0
        embedding = 0.0
    return Units(layer=layer, layers=shape.layers, root=root, embedding=embedding, adapters_per_layer=adapters)


def _static(work: Workload, setting: Setting, device: DeviceOverhead) -> dict[str, float]:
    """What lives from step to step: weights, gradients (until the update), optimizer state."""
    layout = setting.layout
    held = held_parameters(work, layout)
    trained = held if work.trains_all else work.trained_parameters / layout.shards
    base_bytes = work.master_bytes if work.trains_all else work.compute_bytes
    vocabulary = work.trained_vocabulary / layout.shards
    weights = held * base_bytes + (0 if work.trains_all else trained * work.master_bytes - vocabulary * base_bytes)
    gradients = trained * work.master_bytes
    units = _units(work, layout.tp)
    share = work.master_bytes / layout.shards if work.trains_head else 0.0
    whole = 0.0
    if reduced_once(work, setting.rounds(work), device.capacity_bytes):
        whole = trained * layout.shards * REDUCE_BYTES  # kept whole until the last round
    if work.exact:
        gradients += trained * 8  # the fixed-point totals
    state = trained * work.optimizer.device_bytes(work.master_bytes)
    saved_state = trained * work.optimizer.saved_bytes(work.master_bytes)
    if work.local_steps:  # the outer parameters and their momentum
        state, saved_state = state + 2 * trained * work.master_bytes, saved_state + 2 * trained * work.master_bytes
    compact = work.optimizer.saved_state_bytes is not None
    saves = work.snapshot_every != 0 or work.checkpoint_every != 0
    return {
        "weights": weights,
        "gradients": gradients,
        "root gradient": units.root * share,
        "embedding gradient": units.embedding * share,
        "whole gradients": whole,
        "optimizer": state,
        "slices": min(saved_state, SLICES_BYTES) if compact and saves else 0.0,
        "saved": (trained * work.master_bytes + saved_state) / layout.dp_replicate,  # replicas share it
    }


@dataclass(frozen=True, kw_only=True)
class Gathered:
    """Bytes of whole (unsharded) parameters and of the buffers that move them, at different moments."""

    root: float
    forward: float
    between: float
    """Between forward and backward: FSDP2 keeps the last gather's output until the next one, or all layers stay."""
    backward: float
    embedding: float
    """Gathered ahead of its backward, which needs none of it, in place of one more layer."""
    root_gradient: float
    """The root's gradient on its way into shards: whole, as float32 input, and what comes out."""


def _gathered(work: Workload, units: Units, shards: int, *, streams: bool) -> Gathered:
    """FSDP2's buffers: whole parameters in the compute type, the gather of the next unit, reduce-scatter inputs.

    One shard needs no collective: then only cast copies exist. Where nothing is cast either there is no FSDP at all.
    """
    c = work.compute_bytes
    base_bytes = work.master_bytes if work.trains_all else c
    if shards == 1 and work.master_bytes == c and not work.exact:
        added = work.shape.head_parameters * c if work.shape.tied and work.trains_head else 0.0
        return Gathered(root=0.0, forward=0.0, between=0.0, backward=0.0, embedding=0.0, root_gradient=added)
    whole = c if shards > 1 or base_bytes != c else 0
    whole_ends = c if shards > 1 or (work.master_bytes if work.trains_head else base_bytes) != c else 0
    trained = units.layer if work.trains_all else units.adapters_per_layer
    layer = whole * units.layer
    # This layer's and the next one's gather; in the forward pass torch keeps this one's buffer until the next copy too.
    copies = 1 if shards == 1 else 2
    forward = layer * (copies + (shards > 1 and streams))
    between = layer if shards > 1 else 0.0
    if not work.reshard_after_forward and shards > 1:
        forward = between = layer * (units.layers + 1)
    if shards == 1:
        reduce = trained * _reducing(c, shards)
    else:  # the layer before is still being reduced while this one's own gradients come
        reduce = trained * (REDUCE_BYTES + (c if streams else 0))
    root_gradient = max(units.root, units.embedding) * _reducing(c, shards) if work.trains_head else 0.0
    if work.shape.tied and work.trains_head:  # the embedding's gradient is separate from the head's and is added to it
        root_gradient += work.shape.head_parameters * c
    return Gathered(
        root=whole_ends * units.root,
        forward=forward,
        between=between,
        backward=max(between, layer * copies) + reduce,
        embedding=max(0.0, whole_ends * units.embedding - layer) if shards > 1 else 0.0,
        root_gradient=root_gradient,
    )


def _reducing(compute_bytes: int, shards: int) -> float:
    """Bytes a parameter while its unit's gradient is reduced: whole, as float32 input, and what comes out of it.

    What comes out is found, not derived: with one shard 5.6 bytes in measured ranks (8 in the trace). With more it is a
    shard, and nothing of it was seen at the peaks of two and four ranks.
    """
    return compute_bytes + REDUCE_BYTES + (5.6 if shards == 1 else 0.0)


@dataclass(frozen=True, kw_only=True)
class Loss:
    """Bytes of the loss."""

    forward: float
    backward: float
    head_gradient: float
    """The head's gradient, whole until the root is reduced."""


def _loss(work: Workload, tokens: float, *, cuda: bool) -> Loss:
    """Chunked cross-entropy, which computes its gradients in the forward pass.

    First a chunk's logits are there as the product, in float32 with one temporary, and as the gradient of the chunk
    before: 12 bytes a logit in either type. Then, in bfloat16, its own gradient and the product that is added to the
    head's gradient: the logits in float32 are gone by then. That sum is in float32, and so is the product on CUDA.
    Compiled for CUDA, one kernel reads the product and writes the gradient: no logits in float32. In the backward pass
    the head's gradient is multiplied by the incoming one, which takes a second copy.
    """
    c, vocab = work.compute_bytes, work.shape.vocab
    targets = tokens * work.supervised if work.shape.has_head else 0.0
    chunk = min(work.loss_chunk_tokens or targets, targets)
    again = 1 if chunk < targets else 0
    wide = 0 if cuda and work.compile else 8
    logits = chunk * vocab * ((wide or c) + again * c + (c if c < 4 else 0))
    added = chunk * vocab * 2 * c
    hidden = targets * work.shape.hidden * c * 2
    head = work.shape.head_parameters if work.trains_head else 0
    return Loss(
        forward=hidden + head * 4 + (max(logits, added + head * (4 if cuda else c)) if c < 4 else logits),
        backward=hidden * 1.5 + 2 * head * c,
        head_gradient=head * c,
    )


def _kept_by_layer(work: Workload, setting: Setting, device: DeviceOverhead, kind: str) -> float:
    """Bytes a token that one layer keeps with activation checkpointing ``kind``."""
    return kept_per_token(
        work.shape, kind, compute_bytes=work.compute_bytes, compiled=work.compile, lora_rank=work.lora_rank,
        tp=setting.layout.tp, expanded_kv=device.expanded_kv,
    )  # fmt: skip


def _kept(work: Workload, setting: Setting, device: DeviceOverhead) -> float:
    """Bytes a token that all layers, the embedding and the last norm keep for the backward pass."""
    layer = _kept_by_layer(work, setting, device, setting.activation_checkpointing)
    c = work.compute_bytes
    last_norm = (4 + 2 * c) if c < 4 else 3 * c
    return work.shape.layers * layer + (last_norm + c) * work.shape.hidden


def _kept_of_one(work: Workload, setting: Setting, device: DeviceOverhead) -> float:
    """Of it, what is left for the first layer's backward pass: its own, and the embedding's result."""
    rest = work.compute_bytes * work.shape.hidden
    return (_kept(work, setting, device) - rest) / work.shape.layers + rest


def _working(work: Workload, setting: Setting, device: DeviceOverhead) -> float:
    """Bytes a token at the peak of one layer's backward pass beyond what the layers keep."""
    whole, kept = (_kept_by_layer(work, setting, device, kind) for kind in ("none", setting.activation_checkpointing))
    working = working_per_token(work.shape, compute_bytes=work.compute_bytes, tp=setting.layout.tp)
    return max(0.0, whole - kept) + working
