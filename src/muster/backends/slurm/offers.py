"""What a cluster offers, from ``sinfo``'s rows. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from muster.backends.slurm import parse
from muster.backends.slurm.script import reservation_of
from muster.catalog.devices import accelerator_of
from muster.config.spec import RunSpec
from muster.core.errors import CapacityError, Problem, RunFileError
from muster.core.types import Offer


@dataclass(frozen=True, kw_only=True)
class Kind:
    """Identical nodes of a partition."""

    partition: str
    gpus: parse.Gpus
    about: str
    """Features, cores and memory."""
    nodes: int
    """The most that one job could get."""


def kinds(rows: Iterable[Mapping[str, str]], spec: RunSpec) -> list[Kind]:
    """The nodes that could run a job of this run, now or after others, by partition and kind.

    The run file's partition, accelerator and features are respected.
    """
    nodes_of: dict[tuple[str, str, int, str, str], set[str]] = {}
    reservation = reservation_of(spec) is not None
    for row in rows:
        if row["up"] != "up" or not parse.node_usable(row["state"], reservation=reservation):
            continue
        if spec.resources.queue is not None and row["partition"] != spec.resources.queue:
            continue
        for gpus in parse.gpus(row["gres"]) or [parse.Gpus(type="", count=0)]:
            if _matches(gpus, row, spec):
                about = f"{row['features']} {row['cpus']} cpus {row['memory']} MiB".removeprefix("(null) ")
                key = (row["partition"], gpus.type, gpus.count, about, row["size"])
                nodes_of.setdefault(key, set()).add(row["node"])
    return [
        Kind(
            partition=partition,
            gpus=parse.Gpus(type=kind, count=count),
            about=about,
            nodes=min(len(nodes), _most(size)),
        )
        for (partition, kind, count, about, size), nodes in sorted(nodes_of.items(), key=lambda item: item[0])
    ]


def offers(rows: Iterable[Mapping[str, str]], spec: RunSpec) -> list[Offer]:
    """An offer per kind. The machine type is the run file's where it gives one, since Slurm knows none."""
    return [_offer(kind, spec) for kind in kinds(rows, spec)]


def resolved_spec(spec: RunSpec, rows: Iterable[Mapping[str, str]]) -> RunSpec:
    """Device, ranks per host and GPU type where the run file leaves them open, as the best fitting nodes have them.

    Raises:
        CapacityError: no partition has nodes of the kind and number asked for.
        RunFileError: more ranks per host than GPUs.
    """
    resources = spec.resources
    needed = resources.hosts + resources.spare_hosts
    available = kinds(rows, spec)
    fitting = [kind for kind in available if kind.nodes >= needed and (resources.device != "cuda" or kind.gpus.count)]
    if not fitting:
        largest = ", ".join(sorted({f"{kind.nodes} in {kind.partition}" for kind in available})) or "there is none"
        nodes = f"{needed} nodes" + (" with GPUs" if resources.device == "cuda" or resources.accelerator else "")
        raise CapacityError(
            f"no partition has {nodes} that could take this run: {largest}",
            hint="sinfo -o '%P %D %G %t' shows what there is; resources.queue names a partition",
        )
    best = max(fitting, key=lambda kind: (kind.gpus.count if resources.device != "cpu" else 0, kind.nodes))
    device = resources.device if resources.device != "auto" else ("cuda" if best.gpus.count else "cpu")
    ranks = resources.ranks_per_host or (best.gpus.count if device == "cuda" else 1)
    if device == "cuda" and ranks > best.gpus.count:
        raise RunFileError(
            [Problem(key="resources.ranks_per_host", message=f"{ranks} ranks; a node has {best.gpus.count} GPUs")]
        )
    slurm = spec.slurm
    if device == "cuda" and slurm.gres is None and resources.accelerator is not None and best.gpus.type:
        slurm = slurm.model_copy(update={"gres": f"gpu:{best.gpus.type}:{ranks}"})
    resources = resources.model_copy(update={"device": device, "ranks_per_host": ranks})
    return spec.model_copy(update={"resources": resources, "slurm": slurm})


def _matches(gpus: parse.Gpus, row: Mapping[str, str], spec: RunSpec) -> bool:
    # Google's images give their nodes GPUs without a type: whether it is the one asked for, the run file alone knows.
    if spec.resources.accelerator is not None and not (gpus.count and not gpus.type):
        chip, requested = accelerator_of(gpus.type), accelerator_of(spec.resources.accelerator)
        same = gpus.type.lower() == spec.resources.accelerator.lower()
        if not same and (chip is None or requested is None or chip.name != requested.name):
            return False
    constraint = spec.slurm.constraint or ""
    if re.search(r"[^\w.,&-]", constraint):
        return True  # alternatives and counts are left to Slurm
    return set(re.findall(r"[\w.-]+", constraint)) <= set(row["features"].split(","))


def _offer(kind: Kind, spec: RunSpec) -> Offer:
    gpus = kind.gpus
    named = gpus.type or (spec.resources.accelerator or "" if gpus.count else "")
    chip = accelerator_of(named) if named else None
    return Offer(
        backend="slurm",
        machine=spec.resources.machine or kind.about,
        location=kind.partition,
        accelerator=chip.name if chip else (named or ("gpu" if gpus.count else "cpu")),
        gpus_per_node=gpus.count,
        gpu_memory_bytes=chip.memory_bytes if chip else 0,
        usd_per_node_hour=None,
        peak_flops_per_gpu=chip.peak_flops.get("bf16") if chip else None,
        max_nodes=kind.nodes,
        mode="owned",
    )


def _most(size: str) -> int:
    """``1-infinite`` -> no limit; ``1-64`` -> 64 nodes a job."""
    last = size.rpartition("-")[2]
    return int(last) if last.isdigit() else 1 << 30
