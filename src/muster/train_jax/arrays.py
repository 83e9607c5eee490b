"""Host tensors to device arrays and back.

The host's tensors are the training state that snapshots and checkpoints see (``train.state.TrainingState``); the arrays
are what the steps change. A host holds one box of each parameter (``layout``); its chips hold parts of that box.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import torch
from jax import Array
from jax.sharding import Mesh, NamedSharding
from torch import Tensor

from muster.train.distributed.reduce import local
from muster.train.state.snapshot import offsets_of
from muster.train_jax.layout import FSDP, TP, sharding, slot_of, split_dimensions
from muster.train_jax.model import Parameters

_DTYPES = {torch.float32: np.dtype(np.float32), torch.bfloat16: np.dtype(jnp.bfloat16)}


@dataclass(frozen=True)
class Leaf:
    """One array: a parameter, or all layers' parameters of one name."""

    key: str
    """Its name in ``Parameters``."""
    names: tuple[str, ...]
    """Of the parameters in it; several: layer by layer."""
    stacked: bool
    shape: tuple[int, ...]
    """Of the array; with the leading axis where it is stacked."""
    dtype: np.dtype
    sharding: NamedSharding


def leaves_of(named: Mapping[str, Tensor], mesh: Mesh) -> list[Leaf]:
    """The arrays that ``named`` (transformers' name -> host tensor, perhaps a DTensor) become on ``mesh``."""
    groups: dict[tuple[str, bool], list[tuple[int, str]]] = defaultdict(list)
    for name in named:
        slot = slot_of(name)
        groups[slot.name, slot.layer is not None].append((slot.layer or 0, name))
    leaves = []
    for (key, stacked), members in groups.items():
        names = tuple(name for _, name in sorted(members))
        first = named[names[0]]
        split = split_dimensions(names[0], first.shape, mesh.shape[FSDP], mesh.shape[TP])
        shape = tuple(first.shape)
        if stacked:
            shape = (len(names), *shape)
        dimensions = (None if at is None else at + stacked for at in split)
        leaves.append(Leaf(key, names, stacked, shape, _DTYPES[first.dtype], sharding(mesh, len(shape), *dimensions)))
    return leaves


def to_device(leaves: Sequence[Leaf], tensors: Mapping[str, Tensor]) -> Parameters:
    """Arrays with the values of ``tensors``; every process hands over its own boxes.

    Always copies: an array that shared a tensor's memory would change with it.
    """
    result = Parameters({}, {})
    for leaf in leaves:
        boxes = [(_numpy(tensors[name]), offsets_of(tensors[name])) for name in leaf.names]

        array = jax.make_array_from_callback(leaf.shape, leaf.sharding, partial(_copied, leaf, boxes))
        (result.layers if leaf.stacked else result.top)[leaf.key] = array
    return result


def to_host(leaves: Sequence[Leaf], arrays: Parameters, tensors: Mapping[str, Tensor]) -> None:
    """Copy this process's parts of ``arrays`` into its boxes of ``tensors``."""
    found = [(leaf, _own_parts((arrays.layers if leaf.stacked else arrays.top)[leaf.key])) for leaf in leaves]
    for _, parts in found:
        for data in parts.values():
            data.copy_to_host_async()  # all at once, before the first is waited for
    for leaf, parts in found:
        for index, data in parts.items():
            inner = tuple(slice(*bounds) for bounds in (index[1:] if leaf.stacked else index))
            values = np.asarray(data)
            for number, name in enumerate(leaf.names):
                target, offsets = _numpy(tensors[name]), offsets_of(tensors[name])
                target[_within(inner, offsets, leaf)] = values[number] if leaf.stacked else values


def zeros_like(arrays: Parameters) -> Parameters:
    """float32 arrays of zeros, laid out as ``arrays``; made on the devices."""

    def zeros(arrays: Parameters) -> Parameters:
        made: Parameters = jax.tree.map(lambda array: jnp.zeros(array.shape, jnp.float32), arrays)
        return made

    layouts = jax.tree.map(lambda array: array.sharding, arrays)
    result: Parameters = jax.jit(zeros, out_shardings=layouts)(arrays)
    return result


def _copied(leaf: Leaf, boxes: Sequence[tuple[np.ndarray, list[int]]], index: tuple[slice, ...]) -> np.ndarray:
    """The values at ``index`` of the array, from the boxes of its parameters."""
    inner = index[1:] if leaf.stacked else index
    values = [np.array(box[_within(inner, offsets, leaf)]) for box, offsets in boxes]
    return np.stack(values[index[0]]) if leaf.stacked else values[0]


def _own_parts(array: Array) -> dict[tuple[tuple[int | None, int | None, int | None], ...], Array]:
    """Index -> data, one of the copies that this process's devices hold."""
    return {
        tuple((part.start, part.stop, part.step) for part in shard.index): shard.data
        for shard in array.addressable_shards
    }


def _within(index: Sequence[slice], offsets: Sequence[int], leaf: Leaf) -> tuple[slice, ...]:
    """Global slices as slices of a box that begins at ``offsets``."""
    shape = leaf.shape[1:] if leaf.stacked else leaf.shape
    bounds = [part.indices(size)[:2] for part, size in zip(index, shape, strict=True)]
    return tuple(slice(start - offset, stop - offset) for (start, stop), offset in zip(bounds, offsets, strict=True))


def _numpy(tensor: Tensor) -> np.ndarray:
    """This process's part, as an array that shares its memory."""
    part = local(tensor.detach())
    if part.dtype == torch.bfloat16:  # numpy has none of its own
        return part.view(torch.int16).numpy().view(jnp.bfloat16)
    result: np.ndarray = part.numpy()
    return result
