"""Flex attention's masks of packed documents: made once a batch, for all layers.

Without them transformers makes its own from new functions in each forward pass, which torch takes for new code: after
eight compilations (three batches of Gemma 2) attention runs uncompiled.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeAlias

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

    from muster.train.data_feed.batch import Batch

Masks: TypeAlias = BlockMask | dict[str, BlockMask]
#: Kinds of layers, as transformers calls them, whose masks are known here.
KINDS = ("full_attention", "sliding_attention")


def block_masks(batch: Batch, config: PreTrainedConfig) -> Masks | None:
    """One mask, or one for each kind of layer that the model has; None: transformers makes them.

    The host waits for nothing. While a mask is made there is one byte for each pair of positions of a sequence.
    """
    window = getattr(config, "sliding_window", None)
    kinds = set(getattr(config, "layer_types", None) or ())
    if not kinds:
        return _mask(batch, None) if window is None else None
    if not kinds <= set(KINDS):
        return None
    return {kind: _mask(batch, window if kind == "sliding_attention" else None) for kind in sorted(kinds)}


def _mask(batch: Batch, window: int | None) -> BlockMask:
    """``window``: positions that each one sees, itself included."""
    sequences, length = batch.input_ids.shape
    at = torch.arange(sequences * length, dtype=batch.cu_seqlens.dtype, device=batch.cu_seqlens.device)
    document_BS = torch.searchsorted(batch.cu_seqlens[1:].contiguous(), at, right=True).view(sequences, length)

    def seen(sequence: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        same = (query >= key) & (document_BS[sequence, query] == document_BS[sequence, key])
        return same if window is None else same & (query - key < window)

    return create_block_mask(seen, sequences, None, length, length, device=str(at.device))
