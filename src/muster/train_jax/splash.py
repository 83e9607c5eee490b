"""Attention by the TPU's own kernel (splash attention), which skips what no query of a block sees.

Never run on a TPU; `benchmarks/tpu_aot.py` compiles it for one.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import Array
from jax.sharding import Mesh, PartitionSpec

from muster.train_jax.architecture import Architecture
from muster.train_jax.layout import ROWS, TP

#: Queries and keys of a block; MaxText's default for training.
BLOCK = 512


def splash(architecture: Architecture, documents_BS: Array, mesh: Mesh) -> Callable[[Array, Array, Array], Array]:
    """``attend(q_BSHD, k_BSKD, v_BSKD)`` -> [B, S, H * D], causal and within a document, for ``model.layer``.

    A kernel is not divided among devices by the compiler: each device calls it for its own rows and heads.
    """
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as kernels
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks

    length, window = documents_BS.shape[1], architecture.window
    mask: masks.Mask = masks.CausalMask((length, length))
    if window is not None:
        mask = masks.LocalMask((length, length), (window - 1, 0), 0)
    block = min(BLOCK, length)
    kernel = kernels.make_splash_mha_single_device(
        masks.MultiHeadMask([mask] * (architecture.heads // mesh.shape[TP])),
        block_sizes=kernels.BlockSizes(
            block_q=block, block_kv=block, block_kv_compute=block, block_q_dkv=block, block_kv_dkv=block,
            block_kv_dkv_compute=block, block_q_dq=block, block_kv_dq=block,
        ),
    )  # fmt: skip

    def on_device(query: Array, key: Array, value: Array, documents: Array) -> Array:
        def row(query: Array, key: Array, value: Array, documents: Array) -> Array:
            mixed: Array = kernel(query, key, value, segment_ids=kernels.SegmentIds(documents, documents))
            return mixed

        return jax.vmap(row)(query, key, value, documents)

    states = PartitionSpec(ROWS, TP, None, None)
    mapped = jax.shard_map(
        on_device,
        mesh=mesh,
        in_specs=(states, states, states, PartitionSpec(ROWS, None)),
        out_specs=states,
        check_vma=False,
    )

    def attend(query: Array, key: Array, value: Array) -> Array:
        rows, length, heads, size = query.shape
        repeats = heads // key.shape[2]
        by_head = [jnp.swapaxes(states, 1, 2) for states in (query * size**-0.5, key, value)]
        query, key, value = by_head[0], *(jnp.repeat(states, repeats, axis=1) for states in by_head[1:])
        mixed = mapped(query, key, value, documents_BS)
        return jnp.swapaxes(mixed, 1, 2).reshape(rows, length, heads * size)

    return attend
