"""What a Cluster Toolkit blueprint needs to know of each machine, as typed values of ``toolkit.yaml``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache

from muster.catalog import rows


@dataclass(frozen=True, kw_only=True)
class Family:
    """One machine type that has a blueprint."""

    name: str
    partition: str
    fabric: str
    """tcpxo or roce."""
    mtu: int
    build_machine: str
    disk_type: str
    node_conf: Mapping[str, int]
    modes: tuple[str, ...]
    prolog: str | None = None


@dataclass(frozen=True, kw_only=True)
class Toolkit:
    """Releases, and families by machine type."""

    toolkit: str
    slurm_gcp: str
    base_image: Mapping[str, str]
    python: str
    """Of the base image."""
    cuda_repository: str
    """NVIDIA's packages for the base image."""
    nccl: Mapping[str, str]
    families: Mapping[str, Family]


@cache
def toolkit() -> Toolkit:
    """The table."""
    table = rows.table("toolkit.yaml", ".")
    families = {name: {"name": name, **row} for name, row in table["families"].items()}
    return rows.typed(Toolkit, {"toolkit": {**table, "families": families}})["toolkit"]
