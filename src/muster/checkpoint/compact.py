"""Tensors that are kept smaller than they are saved: 8-bit moments, read and written as float32 a slice at a time.

Snapshots, saves and hashes hold whole float32 values, because the codes of a block mean nothing in another layout. A
whole conversion of all moments would take eight bytes a parameter on the device, as much as AdamW's own moments; a
slice takes ``SLICE_BYTES`` and about twice as much while it is computed.

Such a tensor is torchao's ``OptimState8bit``: ``codes`` in the tensor's shape, a ``scale`` for each block of the
flattened codes, ``dequantize()``, and ``copy_`` from float32. Plain tensors are one slice.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from muster.checkpoint import pinned

#: Float32 bytes of a slice.
SLICE_BYTES = 16 << 20


def is_compact(tensor: Tensor) -> bool:
    """Whether its values must be computed to be read."""
    return hasattr(tensor, "codes") and hasattr(tensor, "scale")


def stored(tensor: Any) -> tuple[Tensor, ...]:
    """The plain tensors that hold it."""
    return (tensor.codes, tensor.scale) if is_compact(tensor) else (tensor,)


def slices(tensor: Tensor) -> Iterator[tuple[int, Tensor]]:
    """(first row, the values of rows from there on) of a local tensor; a plain one is itself, whole."""
    if not is_compact(tensor):
        yield 0, tensor
        return
    width = tensor.numel() // tensor.shape[0]
    rows = max(1, SLICE_BYTES // (4 * width))
    for first in range(0, tensor.shape[0], rows):
        count = min(rows, tensor.shape[0] - first)
        yield first, _values(tensor, first * width, (first + count) * width).view(count, *tensor.shape[1:])


@torch.no_grad()
def copy(to: Tensor, source: Tensor) -> None:
    """``to.copy_(source, non_blocking=True)``, with at most a slice of ``source`` converted at a time."""
    for first, values in slices(source):
        into = to if values is source else to[first : first + values.shape[0]]
        pinned.copy(into, values)


@torch.no_grad()
def write(to: Tensor, values: Tensor) -> None:
    """``to.copy_(values)``, block for block the same codes, with at most a slice converted at a time."""
    if not is_compact(to) or is_compact(values):
        to.copy_(values)
        return
    flat, block = values.reshape(-1), _block(to)
    count = max(1, SLICE_BYTES // 4 // block) * block
    for begin in range(0, to.numel(), count):
        end = min(begin + count, to.numel())
        _part(to, begin, end).copy_(flat[begin:end].to(to.device))


def _values(tensor: Tensor, begin: int, end: int) -> Tensor:
    """Elements ``begin`` to ``end`` of the flattened tensor, as float32: whole blocks are converted, and cut."""
    block = _block(tensor)
    first, last = begin // block * block, -(-end // block) * block
    values: Tensor = _part(tensor, first, last).dequantize()
    return values[begin - first : end - first]


def _part(tensor: Any, begin: int, end: int) -> Any:
    """The same kind of tensor over whole blocks of it, sharing its memory."""
    block = _block(tensor)
    scale = tensor.scale[begin // block : end // block]
    return type(tensor)(tensor.codes.view(-1)[begin:end], scale, tensor.qmap, tensor.signed)


def _block(tensor: Any) -> int:
    size: int = tensor.codes.numel() // tensor.scale.numel()
    return size
