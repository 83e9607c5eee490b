"""NCCL's settings on a Slurm node, and what of the node a container needs for them."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from muster.catalog.slurm import SlurmFabric, slurm_fabric
from muster.config.spec import RunSpec
from muster.core.errors import UsageError

# A constant program: everything variable is an argument, so nothing is ever quoted into it. Google's scripts overwrite
# NCCL_SOCKET_IFNAME and the like, so ours come after; the exit code of their last command is ignored.
SOURCE_AND_RUN = (
    'muster_libraries=$1; shift; muster_run=("$@"); set --; source "$0"; set +eu;'
    ' export LD_LIBRARY_PATH="$muster_libraries${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}"; exec env "${muster_run[@]}"'
)


def with_nccl_settings(
    spec: RunSpec, argv: Sequence[str], environ: Mapping[str, str]
) -> tuple[list[str], dict[str, str]]:
    """The agent's argument list and variables with the fabric's settings; unchanged where there are none.

    Google's script on the node where it has one, then what Google's own jobs set after it; NCCL's variables in
    ``slurm.environment`` are the last word. ``environ``: the step's.

    Raises:
        UsageError: several hosts, and no plugin for their fabric: NCCL would silently use TCP, at a fraction of it.
    """
    fabric = _fabric(spec)
    if fabric is None:
        return list(argv), {}
    given = [folder for folder in environ.get("LD_LIBRARY_PATH", "").split(":") if folder]
    folder = next((one for one in (fabric.libraries, *given) if _is_there(fabric, one)), None)
    if folder is None:
        if _nodes(spec) == 1:
            return list(argv), {}
        raise _no_plugin(spec, fabric)
    own = {name: value for name, value in spec.slurm.environment.items() if name.startswith("NCCL_")}
    env = {**{name: _of_job(value, environ) for name, value in fabric.env.items()}, **own}
    if (script := _script(fabric, folder)) is None:
        return list(argv), {**env, "LD_LIBRARY_PATH": ":".join(dict.fromkeys([folder, *given]))}
    values = [f"{name}={value}" for name, value in env.items()]
    before = {name: value.replace(fabric.libraries, folder) for name, value in fabric.before_script.items()}
    return ["/bin/bash", "-c", SOURCE_AND_RUN, script, folder, *values, *argv], before


def fabric_mounts(
    spec: RunSpec, environ: Mapping[str, str], *, exists: Callable[[str], bool] = os.path.exists
) -> list[str]:
    """The node's paths that a container needs for NCCL, of those that there are (a runtime refuses any other)."""
    fabric = _fabric(spec)
    if fabric is None or spec.slurm.container is None or not spec.slurm.container.mount_fabric:
        return []
    return [path for path in (_of_job(path, environ) for path in fabric.mounts) if exists(path)]


def _fabric(spec: RunSpec) -> SlurmFabric | None:
    """The run's, if NCCL is to use it: a node is prepared for TCPX and TCPXO by jobs of several nodes alone."""
    if spec.slurm.nccl == "none" or spec.resources.device == "cpu":
        return None
    fabric = slurm_fabric(spec.resources.machine)
    return None if fabric is not None and fabric.several_hosts and _nodes(spec) == 1 else fabric


def _is_there(fabric: SlurmFabric, folder: str) -> bool:
    """Whether a folder holds the fabric's plugin: others have one of the same file name, Google's script none."""
    script = _script(fabric, folder)
    return Path(script).is_file() if script is not None else bool(list(Path(folder).glob("libnccl-net*.so*")))


def _script(fabric: SlurmFabric, folder: str) -> str | None:
    """Google's script for the libraries in ``folder``: at the same relative path as on Google's images."""
    if fabric.script is None:
        return None
    return os.path.normpath(os.path.join(folder, os.path.relpath(fabric.script, fabric.libraries)))


def _nodes(spec: RunSpec) -> int:
    return spec.resources.hosts + spec.resources.spare_hosts


def _of_job(value: str, environ: Mapping[str, str]) -> str:
    return value.replace("{job}", environ.get("SLURM_JOB_ID", ""))


def _no_plugin(spec: RunSpec, fabric: SlurmFabric) -> UsageError:
    inside = " in the container (slurm.container.mount_fabric, slurm.container.mounts)" if spec.slurm.container else ""
    return UsageError(
        f"no NCCL plugin for {spec.resources.machine}{inside}: neither {fabric.libraries} nor LD_LIBRARY_PATH has one",
        hint="is the image or its prolog Google's? `slurm.nccl: none` leaves NCCL to slurm.environment, or to TCP",
    )
