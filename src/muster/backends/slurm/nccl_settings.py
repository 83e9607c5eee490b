"""NCCL's settings on a Slurm node, and what of the node a container needs for them."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from muster.catalog import gke as catalogue
from muster.catalog.slurm import SlurmFabric, slurm_fabric
from muster.config.spec import RunSpec
from muster.core.errors import UsageError

# A constant program: everything variable is an argument, so nothing is ever quoted into it. Google's scripts overwrite
# NCCL_SOCKET_IFNAME and the like, so ours come after; they do not end with a true command, so nothing depends on one.
SOURCE_AND_RUN = (
    'muster_libraries=$1; shift; muster_run=("$@"); set --; source "$0"; set +eu;'
    ' export LD_LIBRARY_PATH="$muster_libraries${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}"; exec env "${muster_run[@]}"'
)
#: Where a loader finds a plugin that no variable leads to.
LIBRARIES = ("/usr/lib/x86_64-linux-gnu", "/usr/lib/aarch64-linux-gnu", "/usr/lib64", "/usr/local/lib")
#: Values that name interfaces (eth0) or folders of GKE's pods: they differ on a machine, so they are not guessed.
_OF_PODS = re.compile(r"\beth[0-9]|^/usr/local/nvidia|^/dev/")


def with_nccl_settings(
    spec: RunSpec, argv: Sequence[str], environ: Mapping[str, str]
) -> tuple[list[str], dict[str, str]]:
    """The agent's argument list and variables with the fabric's settings; unchanged where there are none.

    Google's script on the node where it is, then what Google's own jobs set after it; NCCL's variables in
    ``slurm.environment`` are the last word. ``environ``: the step's.

    Raises:
        UsageError: several hosts, and no plugin for their fabric: NCCL would silently use TCP, at a fraction of it.
    """
    if not _wanted(spec):
        return list(argv), {}
    own = {name: value for name, value in spec.slurm.environment.items() if name.startswith("NCCL_")}
    fabric = slurm_fabric(spec.resources.machine)
    if fabric is None:
        return list(argv), {**settings(spec.resources.machine), **own}
    if fabric.several_hosts and _nodes(spec) == 1:
        return list(argv), {}
    env = {**{name: _of_job(value, environ) for name, value in fabric.env.items()}, **own}
    if fabric.script is not None and Path(fabric.script).is_file():
        values = [f"{name}={value}" for name, value in env.items()]
        program = ["/bin/bash", "-c", SOURCE_AND_RUN, fabric.script, fabric.libraries]
        return [*program, *values, *argv], dict(fabric.before_script)
    given = [folder for folder in environ.get("LD_LIBRARY_PATH", "").split(":") if folder]
    if fabric.script is None and Path(fabric.libraries).is_dir():
        return list(argv), {**env, "LD_LIBRARY_PATH": ":".join([fabric.libraries, *given])}
    if any(list(Path(folder).glob("libnccl-net*.so*")) for folder in (*given, *LIBRARIES)):
        return list(argv), {**settings(spec.resources.machine), **env}  # an image that brings the plugin elsewhere
    if _nodes(spec) == 1:
        return list(argv), {}
    raise _no_plugin(spec, fabric)


def settings(machine: str | None) -> dict[str, str]:
    """The catalogue's NCCL variables for a machine type, without those that are valid in GKE's pods only."""
    try:
        _, machine_type = catalogue.find(machine, None)
    except UsageError:
        return {}  # a machine of the user's own site
    fabric = machine_type.fabric
    values: Mapping[str, str] = {**fabric.env, **fabric.env_when_not_sourced}
    return {name: value for name, value in values.items() if name.startswith("NCCL_") and not _OF_PODS.search(value)}


def fabric_mounts(
    spec: RunSpec, environ: Mapping[str, str], *, exists: Callable[[str], bool] = os.path.exists
) -> list[str]:
    """The node's paths that a container needs for NCCL, of those that there are (a runtime refuses any other)."""
    fabric = slurm_fabric(spec.resources.machine) if _wanted(spec) else None
    if fabric is None or spec.slurm.container is None or not spec.slurm.container.mount_fabric:
        return []
    if fabric.several_hosts and _nodes(spec) == 1:
        return []
    return [path for path in (_of_job(path, environ) for path in fabric.mounts) if exists(path)]


def _wanted(spec: RunSpec) -> bool:
    return spec.slurm.nccl != "none" and spec.resources.device != "cpu" and spec.resources.machine is not None


def _nodes(spec: RunSpec) -> int:
    return spec.resources.hosts + spec.resources.spare_hosts


def _of_job(value: str, environ: Mapping[str, str]) -> str:
    return value.replace("{job}", environ.get("SLURM_JOB_ID", ""))


def _no_plugin(spec: RunSpec, fabric: SlurmFabric) -> UsageError:
    inside = " in the container (slurm.container.mount_fabric, slurm.container.mounts)" if spec.slurm.container else ""
    return UsageError(
        f"no NCCL plugin for {spec.resources.machine}{inside}: neither {fabric.libraries} nor LD_LIBRARY_PATH has one",
        hint="is the node's prolog or image Google's? `slurm.nccl: none` trains over TCP, much slower",
    )
