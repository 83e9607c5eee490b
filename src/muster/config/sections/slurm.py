"""Parts of the run file that belong to one kind of site: what its clusters need and no other place has."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from muster.config.sections.section import Positive, Section

#: ``30``, ``30:00``, ``12:00:00``, ``2-00``, ``2-12:00:00``: what sbatch takes as a time.
TIME = r"^([0-9]+-[0-9]{1,2}(:[0-9]{1,2}){0,2}|[0-9]+(:[0-9]{1,2}){0,2})$"
#: One line without control characters: it becomes one argument of a #SBATCH line.
LINE = r"^[^\x00-\x1f\x7f]+$"
VARIABLE = r"^[A-Za-z_][A-Za-z0-9_]*$"

Line = Annotated[str, Field(pattern=LINE)]


class Container(Section):
    """The image that hosts run in, and what brings it up."""

    image: Line
    """For pyxis an enroot image (``nvcr.io#nvidia/pytorch:25.03-py3``) or a ``.sqsh`` file; for apptainer a ``.sif``
    file or a URI (``docker://nvcr.io/nvidia/pytorch:25.03-py3``). Files by their whole path."""
    runtime: Literal["pyxis", "apptainer"] = "pyxis"
    mounts: list[Line] = Field([])
    """``SOURCE:TARGET[:OPTIONS]`` in addition to the run's folder, ``scratch`` and every folder that the run file
    names, which are mounted at their own paths."""
    python: Line = "python"
    """Python inside the image; Muster must be installed there."""
    mount_fabric: bool = True
    """Mount the host's network libraries (gIB, TCPXO) that the catalogue names for ``resources.machine``."""


class Slurm(Section):
    """How a Slurm cluster is asked, and what a node needs before it can start (``backend: slurm``)."""

    account: Line | None = None
    qos: Line | None = None
    constraint: Line | None = None
    """Features that the nodes must have: ``a3mega&ib4``."""
    exclude: Line | None = None
    """Nodes that are not to be used: ``node[3,7]``."""
    time_limit: Annotated[str, Field(pattern=TIME)] | None = None
    """As sbatch takes it (``12:00:00``, ``2-00:00:00``); default: ``limits.max_hours``, else the partition's."""
    default_time_limit: Annotated[str, Field(pattern=TIME)] | None = None
    """The time limit where neither ``time_limit`` nor ``limits.max_hours`` says one: for sites that demand one."""
    gres: Line | None = None
    """Generic resources of a node (``gpu:h100:8``); default ``gpu:N`` for ``resources.ranks_per_host``."""
    memory: Line = "0"
    """Memory of a node; 0: all of it."""
    exclusive: bool = True
    """Whole nodes, not shared."""
    cpus_per_host: Positive | None = None
    """Default: all that the node has, where it is ours alone."""
    signal_before_timeout_s: Annotated[int, Field(ge=0, le=65535)] = 180
    """Save and exit this long before the time limit; 0: no notice."""
    resubmit: Literal["new_job", "requeue", "no"] = "new_job"
    """After the notice: a further job, the same one put into the queue again, or nothing."""
    max_jobs: Positive = 100
    """So many jobs at most, one after another, for one run."""
    requeue: bool = True
    """Slurm may put the job back into the queue (preemption, a lost controller's job, ``scontrol requeue``)."""
    interface: Line | None = None
    """Network interface whose address hosts use; default: the one that leads to the other nodes."""
    modules: list[Line] = Field([])
    """``module load`` before anything starts."""
    venv: Line | None = None
    """Virtual environment on the nodes; default: the Python that submitted."""
    environment: dict[Annotated[str, Field(pattern=VARIABLE)], str] = Field({})
    """Variables for every process of the run. No secrets: the script shows them."""
    container: Container | None = None
    scratch: Line | None = None
    """Node-local folder (``/scratch``) for temporary files, and for snapshots in place of ``/dev/shm``."""
    nccl: Literal["auto", "none"] = "auto"
    """auto: the catalogue's NCCL settings for ``resources.machine``."""
    options: list[Annotated[str, Field(pattern=r"^--[a-z][a-z0-9-]*(=[^\x00-\x1f\x7f]*)?$")]] = Field([])
    """Further sbatch options, as they are: ``--mail-type=END``."""
