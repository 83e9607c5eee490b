"""How large a node's disks have to be: the image, the weights and what a run writes besides. Pure.

Where a node has local SSDs, images and temporary files lie on them; elsewhere all of it is on the boot disk.
"""

from __future__ import annotations

import itertools

from muster.backends.gke.manifests.placement import Placement
from muster.backends.gke.manifests.volumes import BESIDE_WEIGHTS_GIB, SHARE_OF_WEIGHTS
from muster.catalog import rows
from muster.config.spec import RunSpec
from muster.core.errors import UsageError

LEAST_GB = 200
SUPERVISOR_DISK_GB = 100
"""An image of more than 20 GB, packed and unpacked, and what GKE keeps for itself."""
IMAGE_GIB = 60
"""A CUDA image of 20 GB as it lies on a node: its layers and what they unpack to."""
STEP_GB = 50
SSD_GIB = 375
"""Of each local SSD as GKE counts them."""


def boot_disk_gb(placement: Placement) -> int:
    """The boot disk of a GPU node in GiB (which Google's field calls GB)."""
    if placement.local_ssds:
        return LEAST_GB
    needed, size = _needed_gib(placement.spec), LEAST_GB
    while left_gib(size) < needed:
        size += STEP_GB
    return size


def refuse_what_does_not_fit(placement: Placement) -> None:
    """A boot disk is made as large as it has to be; local SSDs are as many as the run file or the machine has.

    Raises:
        UsageError: no node would ever have room for the run's pods.
    """
    ssds, needed = placement.local_ssds, _needed_gib(placement.spec)
    if not ssds or needed <= left_of_ssds_gib(ssds):
        return
    # Machines that let one choose take 1, 2, 4 or 8.
    enough = next(count for count in (2**power for power in itertools.count()) if needed <= left_of_ssds_gib(count))
    more = "" if placement.spec.resources.local_ssd is None else f", or resources.local_ssd: {enough}"
    raise UsageError(
        f"a host needs {needed:.0f} GiB of its node for the image and the weights that it downloads; GKE leaves "
        f"{left_of_ssds_gib(ssds):.0f} GiB of {ssds} local SSDs",
        hint=f"model.weights: bucket{more}",
    )


def left_of_ssds_gib(ssds: int) -> float:
    """What GKE leaves of local SSDs for images and temporary files: it keeps a share for the system, and a tenth
    against filling up.

    Source: GKE, "Plan node sizes", local ephemeral storage backed by SSDs: 50, 75, 100 GiB of 1, 2, 3 and more.
    """
    return 0.9 * ssds * SSD_GIB - {1: 50, 2: 75}.get(ssds, 100)


def _needed_gib(spec: RunSpec) -> float:
    return IMAGE_GIB + BESIDE_WEIGHTS_GIB + SHARE_OF_WEIGHTS * weights_on_node_bytes(spec) / 2**30


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
