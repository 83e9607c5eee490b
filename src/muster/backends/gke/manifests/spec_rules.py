"""Rules across several keys of a run file for GKE, each with its reason, checked before anything is sent."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from muster.backends.gke.manifests.placement import SEVEN_DAYS_S, SPOT_POD_GRACE_S, Placement
from muster.catalog import gke as catalogue
from muster.core.errors import Problem, RunFileError

RESERVED = ("reservation", "calendar")


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One thing that will not work (error), or will surprise (warning), and why."""

    rule: str
    key: str
    value: object
    message: str
    reason: str
    hint: str | None = None
    error: bool = True


def findings(placement: Placement) -> list[Finding]:
    """Every rule's findings, errors first."""
    result = [finding for rule in RULES for finding in rule(placement)]
    return sorted(result, key=lambda finding: not finding.error)


def refuse(placement: Placement) -> list[Finding]:
    """Raise for the errors, return the warnings.

    Raises:
        RunFileError: every error at once, each with its reason.
    """
    result = findings(placement)
    if errors := [finding for finding in result if finding.error]:
        raise RunFileError(
            [
                Problem(key=one.key, message=f"{one.message}: {one.reason}", value=one.value, hint=one.hint)
                for one in errors
            ]
        )
    return result


def _mode_is_sold(placement: Placement) -> Iterator[Finding]:
    machine = placement.machine
    if placement.mode != "owned" and placement.mode not in machine.modes:
        yield Finding(
            rule="mode-sold",
            key="resources.provisioning_model",
            value=placement.mode,
            message=f"{machine.name} cannot be had as {placement.mode}",
            reason=f"Google sells it as {', '.join(machine.modes)}",
            hint=f"resources.provisioning_model: {machine.modes[0]}",
        )


def _reservation_is_named(placement: Placement) -> Iterator[Finding]:
    name = placement.spec.resources.reservation
    if placement.mode in RESERVED and not name:
        yield Finding(
            rule="reservation-name",
            key="resources.reservation",
            value=None,
            message=f"mode {placement.mode} needs the reservation's name",
            reason="a specific reservation is consumed by exactly one name; nodes carry it as a label",
        )
    if placement.mode not in RESERVED and name and placement.mode != "owned":
        yield Finding(
            rule="reservation-unused",
            key="resources.reservation",
            value=name,
            message=f"mode {placement.mode} cannot use a reservation",
            reason="Spot and flex-start pools are made with NO_RESERVATION",
            hint="set resources.provisioning_model: reservation, or drop the name",
        )
    if name and not re.fullmatch(r"[a-z]([-a-z0-9]{0,61}[a-z0-9])?", name):
        yield Finding(
            rule="reservation-label",
            key="resources.reservation",
            value=name,
            message="this cannot be a reservation's name",
            reason="it becomes the node label cloud.google.com/reservation-name",
        )


def _image_is_named(placement: Placement) -> Iterator[Finding]:
    image = placement.spec.resources.image
    if not image:
        yield Finding(
            rule="image",
            key="resources.image",
            value=image,
            message="no container image",
            reason="pods start from an image that holds muster, torch and your code",
            hint="resources.image: REGION-docker.pkg.dev/PROJECT/REPOSITORY/NAME:TAG",
        )
    elif re.search(r"\s", image) or image.startswith("-"):
        yield Finding(
            rule="image",
            key="resources.image",
            value=image,
            message="this cannot be an image's name",
            reason="an image reference has no blanks and starts with a letter or digit",
        )


def _run_folder_outlives_a_pod(placement: Placement) -> Iterator[Finding]:
    if not placement.run_dir.startswith("/gcs/") and placement.options.run_claim is None:
        yield Finding(
            rule="run-dir",
            key="run_dir",
            value=placement.run_dir,
            message="the run folder is not in a bucket",
            reason="agents on other nodes find the supervisor through it, and a pod's disk ends with the pod",
            hint="run_dir: gs://BUCKET/runs/NAME",
            error=False,
        )


def _checkpoints_outlive_a_pod(placement: Placement) -> Iterator[Finding]:
    folder = placement.spec.checkpoint.dir
    if folder is None and placement.run_dir.startswith("/gcs/"):
        folder = placement.run_dir
    if folder is None or not folder.startswith(("gs://", "s3://", "/gcs/")):
        yield Finding(
            rule="checkpoint-dir",
            key="checkpoint.dir",
            value=folder,
            message="checkpoints would be written to a pod's own disk",
            reason="it ends with the pod, and other hosts do not see it",
            hint="checkpoint.dir: gs://BUCKET/checkpoints",
            error=placement.hosts > 1 and placement.mode != "owned",
        )
    elif folder.startswith("/gcs/"):
        yield Finding(
            rule="checkpoint-mount",
            key="checkpoint.dir",
            value=folder,
            message="commits through a mounted bucket are not conditional writes",
            reason="GCSFuse has no atomic create across hosts; gs:// writes with a generation precondition",
            hint="checkpoint.dir: " + folder.replace("/gcs/", "gs://", 1),
            error=False,
        )


def _ranks_fit_the_machine(placement: Placement) -> Iterator[Finding]:
    ranks, gpus = placement.spec.resources.ranks_per_host, placement.machine.gpus
    if gpus and ranks and ranks > gpus:
        yield Finding(
            rule="ranks-per-host",
            key="resources.ranks_per_host",
            value=ranks,
            message=f"more ranks than GPUs on {placement.machine.name}",
            reason=f"it has {gpus}",
        )
    if gpus and ranks and ranks < gpus:
        yield Finding(
            rule="idle-gpus",
            key="resources.ranks_per_host",
            value=ranks,
            message=f"{gpus - ranks} of {gpus} GPUs of each host stay idle",
            reason="a host is taken, and paid for, whole",
            error=False,
        )


def _device_fits_the_machine(placement: Placement) -> Iterator[Finding]:
    device = placement.spec.resources.device
    if (device == "cpu" and placement.machine.gpus) or (device == "cuda" and not placement.machine.gpus):
        yield Finding(
            rule="device",
            key="resources.device",
            value=device,
            message=f"{placement.machine.name} has {placement.machine.gpus} GPUs",
            reason="the device and the machine contradict each other",
        )


def _grace_that_spot_gives(placement: Placement) -> Iterator[Finding]:
    requested = placement.spec.recovery.grace_s
    if placement.mode == "spot" and requested > SPOT_POD_GRACE_S:
        yield Finding(
            rule="spot-grace",
            key="recovery.grace_s",
            value=requested,
            message=f"Spot leaves pods {SPOT_POD_GRACE_S} s, not {requested:g} s",
            reason="of the 30 s notice the last 15 s belong to system pods; more is not honoured by default",
            hint="recovery.grace_s: 15, or checkpoint.replicate_snapshots: true",
            error=False,
        )


def _at_most_seven_days(placement: Placement) -> Iterator[Finding]:
    hours = placement.spec.limits.max_hours
    if placement.mode.startswith("flex_start") and hours is not None and hours * 3600 > SEVEN_DAYS_S:
        yield Finding(
            rule="seven-days",
            key="limits.max_hours",
            value=hours,
            message="longer than one flex-start allocation",
            reason="it ends after 7 days; the run has to continue in another one from its checkpoint",
            error=False,
        )


def _queued_nodes_are_not_replaced(placement: Placement) -> Iterator[Finding]:
    resources = placement.spec.resources
    lowest = resources.min_hosts or resources.hosts
    if placement.mode == catalogue.QUEUED and resources.spare_hosts == 0 and lowest == resources.hosts > 1:
        yield Finding(
            rule="queued-spares",
            key="resources.spare_hosts",
            value=0,
            message="a lost node ends the run until a new request is granted",
            reason="a queued pool is all or nothing: it does not replace a node that dies",
            hint="resources.spare_hosts: 1, or resources.min_hosts below resources.hosts",
            error=False,
        )


def _locations_are_places(placement: Placement) -> Iterator[Finding]:
    one_zone = placement.family.network_profile or placement.mode in (catalogue.QUEUED, *RESERVED)
    for location in placement.spec.resources.locations:
        if not re.fullmatch(r"[a-z]+-[a-z]+[0-9]+(-[a-z])?", location):
            yield Finding(
                rule="location",
                key="resources.locations",
                value=location,
                message=f"{location!r} is not a region or zone",
                reason="expected us-central1 or us-central1-b",
            )
        elif one_zone and not re.search(r"-[a-z]$", location):
            yield Finding(
                rule="one-zone",
                key="resources.locations",
                value=location,
                message=f"{location} is a region, and a zone is needed",
                reason="a RoCE network, a reservation and a queued request are each tied to one zone",
                hint=f"resources.locations: [{location}-b]",
                error=False,
            )


def _claims_exist(placement: Placement) -> Iterator[Finding]:
    fabric = placement.machine.fabric
    if placement.options.network == "claims" and fabric.claim_class is None and placement.machine.gpus:
        yield Finding(
            rule="claims",
            key="network",
            value="claims",
            message=f"{placement.machine.name} has no RDMA device class",
            reason="resource claims (DRANET) serve the RDMA families",
        )
    if placement.options.network == "annotations" and fabric.dra_only:
        yield Finding(
            rule="claims",
            key="network",
            value="annotations",
            message=f"{placement.machine.name} takes its NICs by resource claims alone",
            reason="its network has no GKENetworkParamSet",
        )


def _image_runs_on_arm(placement: Placement) -> Iterator[Finding]:
    if placement.family.arch == "arm64":
        yield Finding(
            rule="arm64",
            key="resources.image",
            value=placement.spec.resources.image,
            message=f"{placement.machine.name} runs arm64 images alone",
            reason="its CPUs are arm64",
            error=False,
        )


def _names_are_labels(placement: Placement) -> Iterator[Finding]:
    named = {
        "resources.queue": placement.spec.resources.queue,
        "namespace": placement.options.namespace,
        "service_account": placement.options.service_account,
        "run_claim": placement.options.run_claim,
    }
    for key, value in named.items():
        if value is not None and not re.fullmatch(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?", value):
            yield Finding(
                rule="dns-label",
                key=key,
                value=value,
                message=f"{value!r} is not a Kubernetes name",
                reason="at most 63 of a-z, 0-9 and -, starting and ending with a letter or digit",
            )
    if not re.fullmatch(r"[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?", placement.run_id):
        yield Finding(
            rule="dns-label",
            key="run_id",
            value=placement.run_id,
            message=f"{placement.run_id!r} cannot be a label",
            reason="every object carries it as app.kubernetes.io/instance, at most 63 characters",
        )


RULES: tuple[Callable[[Placement], Iterator[Finding]], ...] = (
    _mode_is_sold,
    _reservation_is_named,
    _image_is_named,
    _run_folder_outlives_a_pod,
    _checkpoints_outlive_a_pod,
    _ranks_fit_the_machine,
    _device_fits_the_machine,
    _grace_that_spot_gives,
    _at_most_seven_days,
    _queued_nodes_are_not_replaced,
    _locations_are_places,
    _claims_exist,
    _image_runs_on_arm,
    _names_are_labels,
)
