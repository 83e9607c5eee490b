"""HBM of one TPU chip at its peak, by what ``train_jax`` holds: a closed form, compared with compiled programs, and
with no TPU.

State is cut over all chips of the slice (norms and what tp does not divide count so too). Embedding and head are made
whole in the compute type, a layer at a time is too; with tensor parallel, a chip's part of them. Layers are scanned, so
that what one keeps is kept for all (``activations``). Everything counts at once, as if the backward pass began with the
loss's buffers still there.
"""

from __future__ import annotations

from muster.core.layout import chunk_length
from muster.plan.activations import kept_per_token, working_per_token
from muster.plan.memory import MemoryEstimate
from muster.plan.workload import Setting, Workload

#: What libtpu and the compiled programs take; an assumption.
RUNTIME_BYTES = 10**9
#: The gradient's sums and moments, whatever the master type (``train_jax.step``).
FLOAT32 = 4
#: A layer's weights while it computes, and the next one's on their way.
LAYERS_AT_ONCE = 2


def tpu_memory(work: Workload, setting: Setting) -> MemoryEstimate:
    """Peak of one chip."""
    shape, tp, c = work.shape, setting.layout.tp, work.compute_bytes
    chips = setting.layout.shards * tp
    trained = work.trained_parameters / chips
    frozen = 0 if work.trains_all else shape.parameters - work.trained_vocabulary
    tokens = setting.micro_batch_size * work.sequence_length
    part = tp if shape.vocab % tp == 0 else 1
    head = shape.head_parameters / part
    ends = head + (0 if shape.tied else shape.embedding_parameters / part)
    layers = LAYERS_AT_ONCE + (1 if work.trains_all else 0)
    items = {
        "weights": trained * work.master_bytes + frozen * c / chips,
        "optimizer state": 2 * trained * FLOAT32,
        # One more of each while a later micro-batch is added.
        "gradients": trained * FLOAT32 * (2 if setting.rounds(work) > 1 else 1),
        "gathered layers": (layers if chips > 1 else 1) * shape.layer_parameters / tp * c,
        "embedding and head": ends * c + (2 * head * c if work.trains_head else 0),
        "activations": tokens * _activations(work, setting),
        "logits and loss": _logits(work, setting),
        "runtime": RUNTIME_BYTES,
    }
    return MemoryEstimate(items={name: round(value) for name, value in items.items() if value}, moment="backward")


def _activations(work: Workload, setting: Setting) -> float:
    """Bytes a token: what all layers keep, and one layer's backward pass."""

    def kept(kind: str) -> float:
        # The kernel's keys and values are repeated to the queries' heads; what a scan keeps is not computed again.
        return kept_per_token(
            work.shape, kind, compute_bytes=work.compute_bytes, compiled=False, lora_rank=work.lora_rank,
            tp=setting.layout.tp, expanded_kv=True,
        )  # fmt: skip

    held = kept(setting.activation_checkpointing)
    again = max(0.0, kept("none") - held)
    working = working_per_token(work.shape, compute_bytes=work.compute_bytes, tp=setting.layout.tp)
    return work.shape.layers * held + again + working


def _logits(work: Workload, setting: Setting) -> float:
    """Logits of a piece of the rows and their gradient, in the compute type: XLA's programs for TPUs have the softmax's
    float32 inside fusions alone (``benchmarks/tpu_aot.py``, 1B, 8B and 70B)."""
    rows, length = setting.micro_batch_size, work.sequence_length
    tokens = rows * chunk_length(rows, length, work.loss_chunk_tokens)
    hidden = 2 * rows * length * work.shape.hidden * work.compute_bytes
    vocab = work.shape.vocab // (setting.layout.tp if work.shape.vocab % setting.layout.tp == 0 else 1)
    return tokens * vocab * 2 * work.compute_bytes + hidden
