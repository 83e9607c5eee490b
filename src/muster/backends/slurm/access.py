"""What stands in a run's way on a cluster, asked of Slurm without submitting anything."""

from __future__ import annotations

import re
from collections.abc import Iterator

from muster.backends.rehearsal import small
from muster.backends.slurm.commands import Slurm
from muster.backends.slurm.offers import kinds
from muster.backends.slurm.script import SCRIPT
from muster.config.spec import RunSpec
from muster.core.errors import CapacityError
from muster.core.types import JobRequest

PREFLIGHT_LIMIT = "30"
"""Minutes, as sbatch takes them."""
_STARTS = re.compile(r"to start at (\S+) using .* on nodes (\S+)(?: in partition (\S+))?")


def look(spec: RunSpec, request: JobRequest, slurm: Slurm | None = None) -> list[str]:
    """What Slurm says of the run's own script: partitions, limits, and when and where its job would start.

    Raises:
        UsageError, AccessError, CapacityError, BackendError: Slurm's refusal (an account, a partition's limit...).
    """
    slurm = slurm or Slurm()
    found = list(_partitions(spec, slurm))
    said = slurm.test(request.files[SCRIPT])
    starts = _STARTS.search(said)
    if starts is None:
        return [*found, f"sbatch --test-only: {said}"]
    where = f" of {starts[3]}" if starts[3] else ""
    return [*found, f"the job would start at {starts[1]} on {starts[2]}{where} (sbatch --test-only)"]


def _partitions(spec: RunSpec, slurm: Slurm) -> Iterator[str]:
    there = [kind for kind in kinds(slurm.nodes(), spec) if kind.gpus.count or spec.resources.device != "cuda"]
    names = dict.fromkeys(kind.partition for kind in there)
    if not names:
        where = f"partition {spec.resources.queue}" if spec.resources.queue else "any partition that is up"
        raise CapacityError(f"no usable node in {where}", hint="sinfo -o '%P %a %D %G %t' shows what there is")
    for name in names:
        limits = slurm.partition(name)
        nodes = sum(kind.nodes for kind in there if kind.partition == name)
        at_most = (
            f"jobs of {limits.get('MaxNodes', 'UNLIMITED')} nodes and {limits.get('MaxTime', 'UNLIMITED')} at most"
        )
        yield f"partition {name}: {nodes} usable nodes of the kind, {at_most}"


def rehearse(spec: RunSpec, *, machine: str | None = None, mode: str | None = None) -> RunSpec:
    """The run file of a preflight: one rank without a GPU on one node; ``machine``: of that partition."""
    found = small(spec, {"device": "cpu", "queue": machine or spec.resources.queue, "usd_per_host_hour": None})
    changes: dict[str, object] = {
        "gres": None, "exclusive": False, "cpus_per_host": None, "time_limit": PREFLIGHT_LIMIT, "resubmit": "no",
    }  # fmt: skip
    return found.model_copy(update={"slurm": found.slurm.model_copy(update=changes)})
