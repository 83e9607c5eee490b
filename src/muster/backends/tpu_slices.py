"""Ranks, devices and slices of TPUs that a run file asks for, held against a machine, wherever that is. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from muster.catalog import gke, rows, vertex
from muster.config.spec import RunSpec
from muster.core.errors import Problem


@dataclass(frozen=True, kw_only=True)
class Slices:
    """All slices of a run; each is one unit, its hosts wired to each other."""

    count: int
    hosts: int
    """Of one slice."""
    topology: str | None
    """Of one slice: the one with as many hosts; None: none is sold."""


def slices_of(spec: RunSpec, machine: str) -> Slices:
    """Those of ``spec`` on hosts of ``machine``: one, or as many as there are replicas."""
    count, resources = spec.parallelism.dp_replicate, spec.resources
    hosts = max(1, (resources.hosts + resources.spare_hosts) // count)
    sold = rows.machines()[machine].topologies or {}
    return Slices(count=count, hosts=hosts, topology=next((name for name, has in sold.items() if has == hosts), None))


def device_problems(spec: RunSpec, machine: str, chips: int) -> Iterator[Problem]:
    """A run of TPUs on hosts without, or another on theirs (``chips`` each)."""
    device = spec.resources.device
    if (device == "tpu") != bool(chips):
        has = f"has {chips} TPU chips" if chips else "has no TPU"
        hint = "resources.device: tpu" if chips else "resources.accelerator: TPU-v5e, TPU-v5p or TPU-v6e"
        message = f"{machine} {has}, and a run is of GPUs or of TPUs"
        yield Problem("resources.device", message, value=device, hint=hint)


def machine_problems(spec: RunSpec, machine: gke.Machine | vertex.Machine) -> Iterator[Problem]:
    """More ranks than ``machine`` has GPUs, or a device that it is not for."""
    ranks, device = spec.resources.ranks_per_host, spec.resources.device
    if machine.gpus and ranks and ranks > machine.gpus:
        message = f"more ranks than GPUs on {machine.name}: it has {machine.gpus}"
        yield Problem("resources.ranks_per_host", message, value=ranks)
    if wrong := next(device_problems(spec, machine.name, machine.chips), None):
        yield wrong
    elif (device == "cpu" and machine.gpus) or (device == "cuda" and not machine.gpus):
        yield Problem("resources.device", f"{machine.name} has {machine.gpus} GPUs", value=device)


def slice_problems(spec: RunSpec, machine: str, chips: int) -> Iterator[Problem]:
    """Why hosts of ``machine`` (``chips`` each) make no slices as ``spec`` has them; at most one reason."""
    resources, slices, tp = spec.resources, slices_of(spec, machine), spec.parallelism.tp
    if resources.spare_hosts or resources.min_hosts not in (None, resources.hosts):
        key = "resources.spare_hosts" if resources.spare_hosts else "resources.min_hosts"
        value = resources.spare_hosts or resources.min_hosts
        reason = "its hosts are wired to each other, and are lost and replaced together"
        message = f"a slice of TPUs has neither spare hosts nor fewer: {reason}"
        yield Problem(key, message, value=value, hint="leave it out")
    elif slices.topology is None or resources.hosts % slices.count:
        sold = ", ".join(f"{hosts} ({name})" for name, hosts in (rows.machines()[machine].topologies or {}).items())
        of = f" in {slices.count} slices" if slices.count > 1 else ""
        message = f"{resources.hosts} hosts of {machine}{of} are no slices: one has {sold} hosts"
        yield Problem("resources.hosts", message, value=resources.hosts)
    elif chips % tp:
        message = f"does not divide the {chips} chips of a host ({machine})"
        yield Problem("parallelism.tp", message, value=tp, hint="tp is within a host")
