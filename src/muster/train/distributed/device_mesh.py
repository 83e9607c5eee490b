"""Device meshes of one replica: which of its ranks share what.

A replica's ranks are numbered with tp innermost, then cp, dp_shard and pp outermost, so that tensor-parallel neighbours
sit on one host. Groups exist for axes of more than one rank only. Parameters live on these meshes (what a gradient norm
has to cross):

* one that tensor parallelism leaves whole: ``DTensor`` on ``shard`` (axis ``dp_shard``), equal on all tp ranks;
* one that it splits: ``DTensor`` on (``dp_shard``, ``tp``).

Replicas and pipeline stages are never part of a parameter's mesh: ``reduce.ReduceGroups`` sums over them.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from muster.core.errors import UsageError
from muster.core.types import Layout


@dataclass(frozen=True)
class Meshes:
    """The meshes that this rank belongs to."""

    layout: Layout
    shard: DeviceMesh
    """1-D, axis ``dp_shard``: handed to ``fully_shard``. Of ``dp_shard`` x ``cp`` ranks, ``cp`` innermost."""
    replica: int
    """Index of this rank's replica."""
    tp: DeviceMesh | None = None
    """1-D, axis ``tp``: the ranks that share matrices; None: one has them whole."""
    context: DeviceMesh | None = None
    """1-D: the ranks that share each sequence; None: one has it whole."""
    stages: DeviceMesh | None = None
    """1-D, axis ``pp``: the ranks that a micro-batch passes through; None: one stage."""
    always_cut: bool = False
    """Use FSDP even where one rank holds the whole model: a warm-up for ranks that will share theirs."""

    @property
    def data_rank(self) -> int:
        """This rank's place among those that read different micro-batches; equal on all of its stages, tp and cp
        ranks."""
        return self.replica * self.layout.dp_shard + self.shard.get_local_rank() // self.layout.cp

    @property
    def is_first_of_data(self) -> bool:
        """Whether this rank is the first of those that read the same micro-batches."""
        return all(mesh is None or mesh.get_local_rank() == 0 for mesh in (self.tp, self.context, self.stages))


def make_meshes(layout: Layout, device_type: str, *, replica: int = 0) -> Meshes:
    """Meshes over the default process group, which spans one replica.

    Collective: every rank of the default group must call it.

    Raises:
        UsageError: a replica of this layout does not have as many ranks as there are.
    """
    world = dist.get_world_size()
    if world != layout.ranks_per_replica:
        raise UsageError(
            f"pp {layout.pp} x dp_shard {layout.dp_shard} x cp {layout.cp} x tp {layout.tp} "
            f"needs {layout.ranks_per_replica} ranks, there are {world}",
            hint="set parallelism.dp_shard: -1 to use all ranks that remain",
        )
    # FSDP wants a mesh even of one rank (to cast), over which it makes no collective: no group is made for it.
    axes = {"pp": layout.pp, "dp_shard": layout.shards, "tp": layout.tp}
    axes = {axis: size for axis, size in axes.items() if size > 1 or axis == "dp_shard"}
    mesh = _mesh(device_type, axes)
    context = None
    if layout.cp > 1 and layout.dp_shard == 1:
        context = mesh["dp_shard"]
    elif layout.cp > 1:
        around = world // (layout.cp * layout.tp)
        context = _mesh(device_type, {"around": around, "cp": layout.cp, "inside": layout.tp}, only="cp")["cp"]
    return Meshes(
        layout=layout,
        shard=mesh["dp_shard"],
        replica=replica,
        tp=mesh["tp"] if layout.tp > 1 else None,
        context=context,
        stages=mesh["pp"] if layout.pp > 1 else None,
    )


def _mesh(device_type: str, axes: dict[str, int], *, only: str | None = None) -> DeviceMesh:
    """A mesh of the default group's ranks. ``only``: the one axis whose groups are used; none is made for others, nor
    for an axis of one rank if there are others."""
    unused = {axis for axis, size in axes.items() if len(axes) > 1 and (size == 1 or (only or axis) != axis)}
    if unused:
        import torch.testing._internal.distributed.fake_pg  # noqa: F401 (registers the backend of no collectives)
    return init_device_mesh(
        device_type,
        tuple(axes.values()),
        mesh_dim_names=tuple(axes),
        backend_override=dict.fromkeys(unused, "fake") or None,
    )
