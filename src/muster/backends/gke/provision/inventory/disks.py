"""How large a node's disks have to be: the image, the weights and what a run writes beside them. Pure.

Where a node has local SSDs, images and temporary files lie on them; elsewhere all of it is on the boot disk.
"""

from __future__ import annotations

from muster.backends.gke.manifests.placement import Placement
from muster.backends.gke.manifests.volumes import BESIDE_WEIGHTS_GIB, SHARE_OF_WEIGHTS
from muster.catalog import rows
from muster.config.spec import RunSpec

LEAST_GB = 200
SUPERVISOR_DISK_GB = 100
"""An image of more than 20 GB, packed and unpacked, and what GKE keeps for itself."""
IMAGE_GIB = 60
"""A CUDA image of 20 GB as it lies on a node: its layers and what they unpack to."""
STEP_GB = 50


def boot_disk_gb(placement: Placement) -> int:
    """The boot disk of a GPU node in GiB (which Google's field calls GB)."""
    if placement.local_ssds:
        return LEAST_GB
    needed = IMAGE_GIB + BESIDE_WEIGHTS_GIB + SHARE_OF_WEIGHTS * weights_on_node_bytes(placement.spec) / 2**30
    size = LEAST_GB
    while left_gib(size) < needed:
        size += STEP_GB
    return size


def left_gib(boot_disk_gib: int) -> float:
    """What GKE leaves of a boot disk: it keeps a tenth against filling up, and a share for the system.

    Source: GKE, "Plan node sizes", local ephemeral storage reservation: min(50 %, 6 GiB + 35 %, 100 GiB), and 10 %.
    """
    system = min(0.5 * boot_disk_gib, 6 + 0.35 * boot_disk_gib, 100)
    return boot_disk_gib - system - 0.1 * boot_disk_gib


def weights_on_node_bytes(spec: RunSpec) -> int:
    """Bytes of weights that every host downloads from the hub; 0 where it reads them elsewhere or they are unknown."""
    if spec.model is None or spec.model.weights != "hub":
        return 0
    return rows.weights_bytes(spec.model.source or "") or 0
