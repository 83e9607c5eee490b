"""HBM of one TPU chip at its peak, by what ``train_jax`` holds: a closed form, compared with what XLA's compiler
allocates for compiled programs, and with no TPU.

State is cut over all chips of the slice (norms and what tp does not divide count so too). What XLA's buffer assignments
have besides (``benchmarks/tpu_aot.py``), with tensor parallel a chip's part of each table of the vocabulary:

* from the forward pass to the end of layers' backward pass what the layers' scan keeps, and the chip's part of the
  layers' weights in the compute type, which is made once and not a layer at a time;
* to the end of the backward pass the head, whole, its gradient, whole, and the chip's part of layers' gradients, which
  are cut a matrix at a time. The embedding is freed when it has been looked up in;
* and the largest of three: at the loss, the head in the other order of dimensions and the logits of a piece; in a
  layer's backward pass, its matrices and activations; after it, the gradients of the vocabulary;
* with several micro-batches, from the first to the last, their sum, the embedding, and the head in both orders.

What is freed at the end of the layers is one hole in the heap: a table that is larger lies above it. Not counted is
what else lies unused between buffers: mostly below 8 % of the whole, once 15 %.
"""

from __future__ import annotations

from muster.core.layout import chunk_length
from muster.plan.memory import MemoryEstimate
from muster.plan.workload import Setting, Workload

#: What libtpu and the compiled programs take; an assumption.
RUNTIME_BYTES = 10**9
#: The gradient's sums and moments, for any master type (``train_jax.step``).
FLOAT32 = 4
#: The last dimension of an array in HBM is padded to a multiple of this where it lies along the lanes.
LANES = 128
#: Chips of a slice up to which XLA cut the vocabulary's gradients while it summed them (fused reduce-scatters).
CUT_AT_ONCE = 8


def tpu_memory(work: Workload, setting: Setting) -> MemoryEstimate:
    """Peak of one chip."""
    shape, tp, c = work.shape, setting.layout.tp, work.compute_bytes
    chips = setting.layout.shards * tp
    trained = work.trained_parameters / chips
    frozen = 0 if work.trains_all else shape.parameters - work.trained_vocabulary
    layers = shape.layers * shape.layer_parameters if work.trains_all else work.adapter_parameters
    tokens = setting.micro_batch_size * work.sequence_length
    table = shape.head_parameters / (tp if shape.vocab % tp == 0 else 1) * c
    kept = tokens * shape.layers * _kept(work, setting)
    # The head's gradient is summed over the pieces of a row; of one piece it is cut at once.
    summed = work.trains_head and _piece(work, setting) < work.sequence_length
    several = setting.rounds(work) > 1
    held = (1 if shape.tied else 2) + 1 if several else 1
    copied = layers / chips * c if work.master_bytes != c else 0.0
    moments: dict[str, dict[str, float]] = {
        "loss": {
            "embedding and head": table * ((work.trains_head and not summed) + (not several)),
            "logits and loss": _logits(work, setting),
        },
        "backward": {
            "gradients": layers / chips * FLOAT32,
            "gathered layers": _matrices(work, setting) if chips > 1 else 0.0,
            "activations": tokens * _working(work, setting),
        },
        "end of backward": {
            "gradients": layers / chips * FLOAT32,
            "embedding and head": _vocabulary(work, setting, table, hole=kept + copied),
        },
    }
    moment = max(moments, key=lambda name: sum(moments[name].values()))
    items = {
        "weights": trained * work.master_bytes + frozen * c / chips + copied,
        "optimizer state": 2 * trained * FLOAT32,
        # The sum of those before, while a later micro-batch is added.
        "gradients": trained * FLOAT32 if several else 0.0,
        "embedding and head": table * (held + summed),
        "activations": kept,
        "runtime": RUNTIME_BYTES,
    }
    for name, value in moments[moment].items():
        items[name] = items.get(name, 0.0) + value
    return MemoryEstimate(items={name: round(value) for name, value in items.items() if value}, moment=moment)


def _vocabulary(work: Workload, setting: Setting, table: float, *, hole: float) -> float:
    """What comes to the tables that are held: the gradients of embedding and head, summed whole, in the place of the
    head's own and, with several rounds, of the head in the other order; or one of them, and the loss as it is computed
    for its value: XLA leaves that for the end. One is in the hole, if that is large enough. Where rows are split into
    less than the lanes, parameters and moments are laid along them for the update."""
    if not work.trains_head:
        return 0.0
    shape, tp, several = work.shape, setting.layout.tp, setting.rounds(work) > 1
    whole = setting.layout.shards * tp > CUT_AT_ONCE
    tables = (2 if whole or not shape.tied else 1) - several - (table <= hole)
    result = max(0, tables) * table
    if whole:
        logits = setting.micro_batch_size * _piece(work, setting) * shape.vocab / tp
        result = max(result, max(0, tables - 1) * table + logits * (work.compute_bytes + FLOAT32))
    row = shape.hidden / setting.layout.shards
    if row < LANES and not several:
        result += 3 * (1 if shape.tied else 2) * shape.vocab / tp * LANES * FLOAT32
    return result


def _matrices(work: Workload, setting: Setting) -> float:
    """Of a layer, while its MLP's backward pass is under way: the MLP's whole, of which one is a gradient or on its
    way, and attention's last one, which comes next."""
    a, _, i = _widths(work, setting)
    return (3 * i + a) * work.shape.hidden * work.compute_bytes


def _kept(work: Workload, setting: Setting) -> float:
    """Bytes a token that one layer's scan keeps: its input; with ``selective`` the results of products that the
    backward pass reads, too; with ``none`` six values of the MLP's width, queries, keys and values at the queries'
    heads and attention's result, five of the residual stream, two of them in float32, too."""
    shape, c = work.shape, work.compute_bytes
    a, k, i = _widths(work, setting)
    adapters = c * work.lora_rank * len(shape.linears())
    return {
        "full": c * shape.hidden,
        "selective": c * (2 * shape.hidden + a + 2 * k + 2 * i) + adapters,
        "none": c * (6 * i + 4 * a + 5 * shape.hidden) + 2 * FLOAT32 * shape.hidden + adapters,
    }[setting.activation_checkpointing]


def _working(work: Workload, setting: Setting) -> float:
    """Bytes a token of one layer's backward pass: gradients, and what is computed again: the MLP's and the residual
    stream's, queries, keys and values at the queries' heads, attention's result and, along the lanes, its log-sum-exp.
    """
    shape, c = work.shape, work.compute_bytes
    a, _, i = _widths(work, setting)
    gradients = c * (2 * i + 2 * shape.hidden)
    again = c * (2 * i + 4 * a + 4 * shape.hidden) + shape.heads / setting.layout.tp * LANES * FLOAT32
    return gradients + max(0.0, again - (_kept(work, setting) - c * shape.hidden))


def _widths(work: Workload, setting: Setting) -> tuple[float, float, float]:
    """Of the queries, of the keys and of the MLP's inside, on one chip."""
    shape, tp = work.shape, setting.layout.tp
    return shape.attention_width / tp, shape.kv_heads * shape.head_dim / tp, shape.intermediate / tp


def _piece(work: Workload, setting: Setting) -> int:
    return chunk_length(setting.micro_batch_size, work.sequence_length, work.loss_chunk_tokens)


def _logits(work: Workload, setting: Setting) -> float:
    """Logits of a piece of the rows and their gradient, in the compute type: XLA's programs for TPUs have the softmax's
    float32 inside fusions alone."""
    rows, shape, tp = setting.micro_batch_size, work.shape, setting.layout.tp
    vocab = shape.vocab // (tp if shape.vocab % tp == 0 else 1)
    logits = rows * _piece(work, setting) * vocab
    return (2 * logits + 2 * rows * work.sequence_length * shape.hidden) * work.compute_bytes
