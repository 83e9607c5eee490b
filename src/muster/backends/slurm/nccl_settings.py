"""NCCL settings on a Slurm node, from the catalogue that GKE uses too."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from muster.catalog import gke as catalogue
from muster.config.spec import RunSpec
from muster.core.errors import UsageError

# A constant program: everything variable is passed as "$0" and "$@", so nothing is ever quoted into it.
SOURCE_AND_RUN = 'source "$0" && exec "$@"'
#: Other paths of the script that sets NCCL's environment, in Google's images for Slurm.
ELSEWHERE = {"/usr/local/nvidia/lib64/nccl-env-profile.sh": ("/var/lib/tcpxo/lib64/nccl-env-profile.sh",)}
#: Values that name interfaces (eth0) or folders of GKE's pods: they differ on a machine, so they are not guessed.
_OF_PODS = re.compile(r"\beth[0-9]|^/usr/local/nvidia|^/dev/")


def with_nccl_settings(spec: RunSpec, argv: Sequence[str]) -> tuple[list[str], dict[str, str]]:
    """The agent's argument list and variables with the fabric's settings; unchanged where there are none.

    Google's script on the node decides where it exists; else the catalogue's values that are valid on any machine.
    """
    if spec.slurm.nccl == "none" or spec.resources.device == "cpu" or spec.resources.machine is None:
        return list(argv), {}
    try:
        _, machine = catalogue.find(spec.resources.machine, None)
    except UsageError:
        return list(argv), {}  # a machine of the user's own site
    source = machine.fabric.source
    for path in (source, *ELSEWHERE.get(source, ())) if source else ():
        if Path(path).is_file():
            folder = {"NCCL_LIB_DIR": str(Path(path).parent)} if path.endswith("nccl-env-profile.sh") else {}
            return ["/bin/bash", "-c", SOURCE_AND_RUN, path, *argv], folder
    return list(argv), settings(spec.resources.machine)


def settings(machine: str) -> dict[str, str]:
    """The catalogue's NCCL variables for a machine type, without those that are valid in GKE's pods only."""
    _, machine_type = catalogue.find(machine, None)
    fabric = machine_type.fabric
    values: Mapping[str, str] = {**fabric.env, **fabric.env_when_not_sourced}
    return {name: value for name, value in values.items() if name.startswith("NCCL_") and not _OF_PODS.search(value)}
