"""What each fabric needs on a node of Google's Slurm images, as typed values of ``fabrics.yaml``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache

from muster.catalog import gke, rows
from muster.core.errors import UsageError


@dataclass(frozen=True, kw_only=True)
class SlurmFabric:
    """One fabric. ``{job}`` in a value is the job's id."""

    name: str
    libraries: str
    """Folder of NCCL's plugin."""
    env: Mapping[str, str]
    """Set after the script, which would overwrite them; all of NCCL's settings where there is none."""
    mounts: tuple[str, ...]
    """Paths of the node that a container needs at the same place."""
    script: str | None = None
    """Google's own, which sets NCCL's environment."""
    before_script: Mapping[str, str] = field(default_factory=dict)
    several_hosts: bool = False
    """The nodes are prepared for jobs of more than one node alone."""


@cache
def slurm_fabrics() -> Mapping[str, SlurmFabric]:
    """Every fabric that Google's Slurm images know, by name."""
    return rows.typed(SlurmFabric, rows.table("fabrics.yaml", "slurm")["fabrics"])


def slurm_fabric(machine: str | None) -> SlurmFabric | None:
    """The fabric of a machine type; None: no data network, or a machine of the user's own site."""
    if machine is None:
        return None
    try:
        _, found = gke.find(machine, None)
    except UsageError:
        return None
    return slurm_fabrics().get(found.fabric.name)
