"""Where arrays lie: a mesh of slices, which are replicas, by groups of chips, by a group's chips (tensor parallel).

Every slice holds all parameters. Each is split along one dimension that the number of a slice's groups divides (fully
sharded, as ZeRO-3), and what is of heads, of the inside of an MLP or of the vocabulary along another one over the chips
of a group, as Megatron-LM does; rows of a batch are split over all groups of all slices. A group is within a host, and
a host's are neighbours on the axis, so what a host holds of a parameter is one box, as of a rank of the torch trainer:
snapshots and checkpoints are made of these boxes.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from muster.core.errors import UsageError

DATA, FSDP, TP = "data", "fsdp", "tp"
#: What rows of a batch are split over.
ROWS = (DATA, FSDP)
#: Products of these reduce over rows of the batch into the first dimension: they are split along the second.
_BY_ROWS = re.compile(r"(o_proj|down_proj|lora_A)\b")
#: Which dimension is of heads, of an MLP's inside or of the vocabulary: the output's of products that begin a block, of
#: their second adapter and of embedding and head; the input's of products that end a block and of their first adapter.
_OUTPUT = re.compile(r"\b((q|k|v|gate|up)_proj\.((base_layer|lora_B\.default)\.)?|(embed_tokens|lm_head)\.)weight$")
_INPUT = re.compile(r"\b(o|down)_proj\.((base_layer|lora_A\.default)\.)?weight$")
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


def split_dimensions(name: str, shape: Sequence[int], parts: int, tp: int = 1) -> tuple[int | None, int | None]:
    """The dimensions along which a parameter is split among ``parts`` groups of chips, and among the ``tp`` chips of
    one; None: it is whole on each.

    Of groups: the preferred one (rows of the output for products that end a block, else of the input), else one that
    can be; both may be the same one, then groups first.
    """
    inside = 0 if _OUTPUT.search(name) else 1 if _INPUT.search(name) else None
    if tp == 1 or inside is None or shape[inside] % tp:
        inside = None
    preferred = 0 if _BY_ROWS.search(name) or len(shape) == 1 else len(shape) - 1
    order = sorted(range(len(shape)), key=lambda dimension: (dimension == inside, dimension != preferred))
    sizes = {dimension: parts * (tp if dimension == inside else 1) for dimension in order}
    return next((dimension for dimension in order if shape[dimension] % sizes[dimension] == 0), None), inside


def mesh_of(devices: Sequence[jax.Device] | None = None, *, slices: int = 1, tp: int = 1) -> Mesh:
    """All chips, host by host, of ``slices`` parts one after another, in groups of ``tp``; each host's in the order of
    their ids.

    Raises:
        UsageError: a host's chips do not divide into groups of ``tp``.
    """
    chosen = list(jax.devices() if devices is None else devices)
    chosen.sort(key=lambda device: (device.process_index, device.id))
    chips = sum(device.process_index == chosen[0].process_index for device in chosen)
    if chips % tp or len(chosen) % (slices * tp):
        raise UsageError(f"parallelism.tp {tp} does not divide the {chips} chips of a host", hint="tp is within a host")
    return Mesh(np.array(chosen).reshape(slices, -1, tp), (DATA, FSDP, TP))


def sharding(mesh: Mesh, ndim: int, dimension: int | None, inside: int | None = None) -> NamedSharding:
    """Of an array of ``ndim`` dimensions that is split along ``dimension`` over groups of chips, and along ``inside``
    over the chips of a group (None: whole)."""
    axes: list[tuple[str, ...] | None] = [None] * ndim
    for at, axis in ((dimension, FSDP), (inside, TP)):
        if at is not None:
            axes[at] = (*(axes[at] or ()), axis)
    return NamedSharding(mesh, PartitionSpec(*axes))
