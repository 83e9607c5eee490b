"""Where arrays lie: a mesh of slices, which are replicas, by their chips, host by host.

Every slice holds all parameters. Each is split along one dimension that the number of a slice's chips divides (fully
sharded, as ZeRO-3); rows of a batch are split over all chips of all slices. A host's chips are neighbours on the axis,
so what a host holds of a parameter is one box, as of a rank of the torch trainer: snapshots and checkpoints are made of
these boxes.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

DATA, FSDP = "data", "fsdp"
#: What rows of a batch are split over.
ROWS = (DATA, FSDP)
#: Products of these reduce over rows of the batch into the first dimension: they are split along the second.
_BY_ROWS = re.compile(r"(o_proj|down_proj|lora_A)\b")
_LAYER = re.compile(r"^(.*\bmodel\.layers|model\.layers)\.(\d+)\.(.+)$")


@dataclass(frozen=True)
class Slot:
    """Where a parameter lives: in ``layers`` at ``layer`` under its name within a layer, or in ``top``."""

    name: str
    layer: int | None


def slot_of(name: str) -> Slot:
    """The slot of a parameter by transformers' (or peft's) name."""
    found = _LAYER.match(name)
    return Slot(name, None) if found is None else Slot(found[3], int(found[2]))


def split_dimension(name: str, shape: Sequence[int], parts: int) -> int | None:
    """The dimension along which a parameter is split among ``parts`` chips; None: it is whole on each.

    The preferred one (rows of the output for products that end a block, else of the input), else one that can be.
    """
    preferred = 0 if _BY_ROWS.search(name) or len(shape) == 1 else len(shape) - 1
    order = [preferred, *(dimension for dimension in range(len(shape)) if dimension != preferred)]
    return next((dimension for dimension in order if shape[dimension] % parts == 0), None)


def mesh_of(devices: Sequence[jax.Device] | None = None, *, slices: int = 1) -> Mesh:
    """All chips, host by host, of ``slices`` parts one after another; each host's in the order of their ids."""
    chosen = list(jax.devices() if devices is None else devices)
    chosen.sort(key=lambda device: (device.process_index, device.id))
    return Mesh(np.array(chosen).reshape(slices, -1), (DATA, FSDP))


def sharding(mesh: Mesh, ndim: int, dimension: int | None) -> NamedSharding:
    """Of an array of ``ndim`` dimensions that is split along ``dimension`` (None: whole everywhere)."""
    axes: list[str | None] = [None] * ndim
    if dimension is not None:
        axes[dimension] = FSDP
    return NamedSharding(mesh, PartitionSpec(*axes))
