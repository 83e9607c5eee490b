"""What every back end of Google's checks in a run file: names, ranks, devices, slices of TPUs, the home. Pure."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import TypeVar

from muster.backends.bucket_paths import as_uri, home_of
from muster.catalog import gke, rows, vertex
from muster.config.spec import RunSpec
from muster.core.errors import Problem, UsageError

PROJECT = r"([a-z][a-z0-9.-]*:)?[a-z][-a-z0-9]{4,28}[a-z0-9]"
NAME = r"[a-z]([-a-z0-9]{0,61}[a-z0-9])?"
REGION = r"[a-z]+-[a-z]+[0-9]+"
ZONE = rf"{REGION}-[a-z]"
#: The project's own by its name, a shared one with its owner's project; a block below it. Vertex AI has another form.
RESERVATION = rf"(projects/{PROJECT}/reservations/)?{NAME}(/reservationBlocks/{NAME})?"
Placement = TypeVar("Placement")


def problems_of(
    spec: RunSpec, place: Callable[[], Placement], rules: Iterable[Callable[[Placement], Iterator[Problem]]]
) -> Iterator[Problem]:
    """Every rule's problems, or the one that there is no such machine."""
    try:
        placement = place()
    except UsageError as error:
        asked = spec.resources
        key = "resources.machine" if asked.machine or not asked.accelerator else "resources.accelerator"
        yield Problem(key, str(error), hint=error.hint, to_submit=not (asked.machine or asked.accelerator))
        return
    for rule in rules:
        yield from rule(placement)


def project_problems(spec: RunSpec, *, or_number: bool = False) -> Iterator[Problem]:
    """``or_number``: the service takes a project's number, too."""
    project = spec.resources.project
    if not project or not re.fullmatch(rf"{PROJECT}|[0-9]+" if or_number else PROJECT, project):
        message = f"{project!r} is no project's id" if project else "names no project"
        hint = "resources.project: its id" + (" or number" if or_number else "")
        yield Problem("resources.project", message, value=project, hint=hint, to_submit=not project)


def image_problems(spec: RunSpec) -> Iterator[Problem]:
    """Where hosts are containers."""
    image = spec.resources.image
    if not image:
        message = "no container image: hosts start from an image that holds muster, torch and your code"
        hint = "resources.image: REGION-docker.pkg.dev/PROJECT/REPOSITORY/NAME:TAG"
        yield Problem("resources.image", message, hint=hint, to_submit=True)
    elif re.search(r"\s", image) or image.startswith("-"):
        yield Problem("resources.image", "this cannot be an image's name: it has a blank or starts with -", value=image)


def home_problems(spec: RunSpec) -> Iterator[Problem]:
    """A run whose home or checkpoints are in no bucket of Google's."""
    if not home_of(spec, "run", None):
        message = "the run has no place in a bucket of Google's: a host's disk ends with the host"
        hint = "run_dir: gs://BUCKET/runs/NAME"
        yield Problem("run_dir", message, value=spec.run_dir, hint=hint, to_submit=spec.run_dir is None)
    folder = spec.checkpoint.dir
    if folder is not None and not as_uri(folder).startswith("gs://"):
        message = "checkpoints would be written where only one host sees them"
        yield Problem("checkpoint.dir", message, value=folder, hint="checkpoint.dir: gs://BUCKET/checkpoints")


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
        message = f"{machine.name} has {machine.gpus} GPUs: the device and the machine contradict each other"
        yield Problem("resources.device", message, value=device)


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
