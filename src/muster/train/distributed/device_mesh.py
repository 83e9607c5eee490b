"""Device meshes of a run: which ranks share a model, and which read which data.

Ranks are numbered with tp innermost, then dp_shard, pp, and dp_replicate outermost, so that tensor-parallel neighbours
sit on one host. Parameters live on these meshes (what a gradient norm has to cross):

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
    tp: DeviceMesh
    """1-D, axis ``tp``."""
    replicate: dist.ProcessGroup | None
    """Ranks that hold the same shard in other replicas; None where there is one replica, or where the default
    process group spans this replica alone and the replicas are joined by a group of their own."""
    replica: int
    """Index of this rank's replica."""
    context: DeviceMesh | None = None
    """1-D, axis ``cp``: the ranks that share each sequence; None: one has it whole."""
    stages: DeviceMesh | None = None
    """1-D, axis ``pp``: the ranks that a micro-batch passes through; None: one stage."""
    always_cut: bool = False
    """Use FSDP even where one rank holds the whole model: a warm-up for ranks that will share theirs."""

    @property
    def data_rank(self) -> int:
        """This rank's place among those that read different micro-batches; equal on all of its stages, tp and cp
        ranks."""
        return self.replica * self.layout.dp_shard + self.shard.get_local_rank() // self.layout.cp


def make_meshes(layout: Layout, device_type: str, *, replica: int | None = None) -> Meshes:
    """Meshes over the default process group, which spans either all ranks or (with ``replica``) one replica.

    Collective: every rank of the default group must call it.

    Raises:
        UsageError: the layout does not have as many ranks as there are.
    """
    world = dist.get_world_size()
    layout_run = Layout(
        dp_replicate=layout.dp_replicate, dp_shard=layout.dp_shard, tp=layout.tp, pp=layout.pp, cp=layout.cp
    )
    if layout != layout_run or (layout.pp > 1 and layout.cp > 1):
        hint = "set every axis but dp_replicate, dp_shard, tp and one of pp and cp to 1"
        raise UsageError(f"layout {layout.key} has an axis that this trainer does not run", hint=hint)
    alone = replica is not None and world == layout.ranks_per_replica
    if not alone and world != layout.world_size:
        raise UsageError(
            f"dp_replicate {layout.dp_replicate} x pp {layout.pp} x dp_shard {layout.dp_shard} x tp {layout.tp} "
            f"x cp {layout.cp} "
            f"needs {layout.world_size} ranks, there are {world}",
            hint="set parallelism.dp_shard: -1 to use all ranks that remain",
        )
    context = None
    if layout.cp > 1:
        sizes = (world // (layout.cp * layout.tp), layout.cp, layout.tp)
        context = init_device_mesh(device_type, sizes, mesh_dim_names=("around", "cp", "inside"))["cp"]
    axes = {"dp_shard": layout.shards, "tp": layout.tp}
    if layout.pp > 1:
        axes = {"pp": layout.pp, **axes}
    if not alone:
        axes = {"dp_replicate": layout.dp_replicate, **axes}
    mesh = init_device_mesh(device_type, tuple(axes.values()), mesh_dim_names=tuple(axes))
    over_replicas = not alone and layout.dp_replicate > 1
    return Meshes(
        layout=layout,
        shard=mesh["dp_shard"],
        tp=mesh["tp"],
        replicate=mesh.get_group("dp_replicate") if over_replicas else None,
        replica=replica if replica is not None and alone else mesh.get_local_rank("dp_replicate"),
        context=context,
        stages=mesh["pp"] if layout.pp > 1 else None,
    )
