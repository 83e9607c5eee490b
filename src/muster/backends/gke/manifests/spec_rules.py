"""Rules across several keys of a run file for GKE, each with its reason, checked before anything is sent."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import NamedTuple

from muster.backends.bucket_paths import as_uri, is_bucket
from muster.backends.gke.manifests.placement import SEVEN_DAYS_S, SPOT_POD_GRACE_S, Options, Placement, place
from muster.backends.google.rules import (
    REGION,
    RESERVATION,
    image_problems,
    machine_problems,
    problems_of,
    slice_problems,
)
from muster.catalog import gke as catalogue
from muster.config.spec import RunSpec
from muster.core.errors import Problem, RunFileError

RESERVED = ("reservation", "calendar")


class Finding(NamedTuple):
    """One thing that will not work (error), or will surprise (warning), and why."""

    error: bool
    problem: Problem


def findings(placement: Placement) -> list[Finding]:
    """Every rule's findings, errors first."""
    result = [finding for rule in RULES for finding in rule(placement)]
    return sorted(result, key=lambda finding: not finding.error)


def refuse(placement: Placement) -> None:
    """Raises RunFileError with every error at once, each with its reason."""
    if errors := [finding.problem for finding in findings(placement) if finding.error]:
        raise RunFileError(errors)


def rules(spec: RunSpec) -> Iterator[Problem]:
    """What ``submit`` refuses of the run file itself.

    A home and an image are asked for at submission: ``up`` and ``image`` do without them, and a claim for run folders
    is an option of the rendering. So is a machine: a plan chooses one of those with the accelerator.
    """

    def errors(placement: Placement) -> Iterator[Problem]:
        yield from (one.problem for one in findings(placement) if one.error)

    for problem in problems_of(spec, lambda: place(spec, run_id="run", run_dir="", options=Options()), (errors,)):
        if problem.key == "resources.reservation" or not (problem.to_submit or problem.key == "resources.accelerator"):
            yield problem


def _error(key: str, value: object, message: str, hint: str | None = None) -> Finding:
    return Finding(True, Problem(key=key, value=value, message=message, hint=hint))


def _warning(key: str, value: object, message: str, hint: str | None = None) -> Finding:
    return Finding(False, Problem(key=key, value=value, message=message, hint=hint))


def _mode_is_sold(placement: Placement) -> Iterator[Finding]:
    machine, mode = placement.machine, placement.mode
    if mode != "owned" and mode not in machine.modes:
        message = f"{machine.name} cannot be had as {mode}: Google sells it as {', '.join(machine.modes)}"
        hint = f"resources.provisioning_model: {machine.modes[0]}"
        yield _error("resources.provisioning_model", mode, message, hint)


def _reservation_is_named(placement: Placement) -> Iterator[Finding]:
    key, name, mode = "resources.reservation", placement.spec.resources.reservation, placement.mode
    if mode in RESERVED and not name:
        reason = "a specific reservation is consumed by exactly one name; nodes carry it as a label"
        message = f"mode {mode} needs the reservation's name: {reason}"
        yield Finding(True, Problem(key=key, message=message, to_submit=True))
    if mode not in RESERVED and name and mode != "owned":
        reason = "Spot and flex-start pools are made with NORESERVATION"
        hint = "set resources.provisioning_model: reservation, or drop the name"
        yield _error(key, name, f"mode {mode} cannot use a reservation: {reason}", hint)
    if name and not re.fullmatch(RESERVATION, name):
        hint = "R, projects/P/reservations/R, and either with /reservationBlocks/B"
        yield _error(key, name, "this cannot be a reservation's name: Compute Engine has none like it", hint)


def _image_is_named(placement: Placement) -> Iterator[Finding]:
    yield from (Finding(True, problem) for problem in image_problems(placement.spec))


def _run_has_a_home(placement: Placement) -> Iterator[Finding]:
    if not placement.in_bucket and placement.options.run_claim is None:
        reason = "agents on other nodes find the supervisor there, and a pod's disk ends with the pod"
        message = f"the run has no place in a bucket: {reason}"
        value, hint = placement.spec.run_dir or placement.home, "run_dir: gs://BUCKET/runs/NAME"
        yield Finding(True, Problem("run_dir", message, value=value, hint=hint, to_submit=True))


def _checkpoints_outlive_a_pod(placement: Placement) -> Iterator[Finding]:
    folder = placement.spec.checkpoint.dir
    if folder is not None and not is_bucket(as_uri(folder)):
        level = _error if placement.hosts > 1 and placement.mode != "owned" else _warning
        reason = "it ends with the pod, and other hosts do not see it"
        message = f"checkpoints would be written to a pod's own disk: {reason}"
        yield level("checkpoint.dir", folder, message, "checkpoint.dir: gs://BUCKET/checkpoints")


def _copies_have_a_bucket(placement: Placement) -> Iterator[Finding]:
    model = placement.spec.model
    if model is not None and model.weights == "bucket" and not placement.home.startswith("gs://"):
        message = "weights can be copied to the bucket that the run lives in, and it lives in none of Google's"
        unnamed, hint = placement.spec.run_dir is None, "run_dir: gs://BUCKET/runs/NAME"
        yield Finding(True, Problem("model.weights", message, value=model.weights, hint=hint, to_submit=unnamed))


def _ranks_and_device_fit_the_machine(placement: Placement) -> Iterator[Finding]:
    ranks, gpus = placement.spec.resources.ranks_per_host, placement.machine.gpus
    yield from (Finding(True, problem) for problem in machine_problems(placement.spec, placement.machine))
    if gpus and ranks and ranks < gpus:
        message = f"{gpus - ranks} of {gpus} GPUs of each host stay idle: a host is taken, and paid for, whole"
        yield _warning("resources.ranks_per_host", ranks, message)


def _slices_are_whole(placement: Placement) -> Iterator[Finding]:
    slices, machine = placement.slices, placement.machine
    if not slices:
        return
    if wrong := next(slice_problems(placement.spec, machine.name, machine.chips), None):
        yield Finding(True, wrong)
    elif slices > 1 and placement.hosts_of_job == 1:
        message = "GKE joins slices of several hosts alone (multislice)"
        yield _error("parallelism.dp_replicate", slices, message, "dp_replicate: 1, or larger slices")


def _grace_that_spot_gives(placement: Placement) -> Iterator[Finding]:
    requested = placement.spec.recovery.grace_s
    if placement.mode == "spot" and requested > SPOT_POD_GRACE_S:
        reason = "of the 30 s notice the last 15 s belong to system pods; more is not honoured by default"
        message = f"Spot leaves pods {SPOT_POD_GRACE_S} s, not {requested:g} s: {reason}"
        hint = "recovery.grace_s: 15, or checkpoint.replicate_snapshots: true"
        yield _warning("recovery.grace_s", requested, message, hint)


def _at_most_seven_days(placement: Placement) -> Iterator[Finding]:
    hours = placement.spec.limits.max_hours
    if placement.mode.startswith("flex_start") and hours is not None and hours * 3600 > SEVEN_DAYS_S:
        reason = "it ends after 7 days; the run has to continue in another one from its checkpoint"
        yield _warning("limits.max_hours", hours, f"longer than one flex-start allocation: {reason}")


def _queued_nodes_are_not_replaced(placement: Placement) -> Iterator[Finding]:
    resources = placement.spec.resources
    lowest = resources.min_hosts or resources.hosts
    if placement.mode == catalogue.QUEUED and resources.spare_hosts == 0 and lowest == resources.hosts > 1:
        reason = "a queued pool is all or nothing: it does not replace a node that dies"
        message = f"a lost node ends the run until a new request is granted: {reason}"
        hint = "resources.spare_hosts: 1, or resources.min_hosts below resources.hosts"
        yield _warning("resources.spare_hosts", 0, message, hint)


def _locations_are_places(placement: Placement) -> Iterator[Finding]:
    one_zone = placement.family.network_profile or placement.mode in (catalogue.QUEUED, *RESERVED)
    key = "resources.locations"
    for location in placement.spec.resources.locations:
        if not re.fullmatch(rf"{REGION}(-[a-z])?", location):
            message = f"{location!r} is not a region or zone: expected us-central1 or us-central1-b"
            yield _error(key, location, message)
        elif one_zone and not re.search(r"-[a-z]$", location):
            reason = "a RoCE network, a reservation and a queued request are each tied to one zone"
            message = f"{location} is a region, and a zone is needed: {reason}"
            yield _warning(key, location, message, f"resources.locations: [{location}-b]")


def _claims_exist(placement: Placement) -> Iterator[Finding]:
    machine, network = placement.machine, placement.options.network
    if network == "claims" and machine.fabric.claim_class is None and machine.gpus:
        reason = "resource claims (DRANET) serve the RDMA families"
        yield _error("network", network, f"{machine.name} has no RDMA device class: {reason}")
    if network == "annotations" and machine.fabric.dra_only:
        reason = "its network has no GKENetworkParamSet"
        yield _error("network", network, f"{machine.name} takes its NICs by resource claims alone: {reason}")


def _arm_is_supported(placement: Placement) -> Iterator[Finding]:
    if placement.family.arch == "arm64":
        missing = (
            "its hosts are arm64 and the supervisor's node is not, so one image cannot start on both; NVLink between "
            "hosts needs a ComputeDomain, NVIDIA's DRA driver and a placement policy (1x72), which nothing here makes"
        )
        message = f"{placement.machine.name} is not supported yet: {missing}"
        yield _error("resources.machine", placement.machine.name, message, "resources.machine: a4-highgpu-8g")


def _names_are_labels(placement: Placement) -> Iterator[Finding]:
    named = {
        "resources.queue": placement.spec.resources.queue,
        "namespace": placement.options.namespace,
        "service_account": placement.options.service_account,
        "run_claim": placement.options.run_claim,
    }
    for key, value in named.items():
        if value is not None and not re.fullmatch(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?", value):
            reason = "at most 63 of a-z, 0-9 and -, starting and ending with a letter or digit"
            yield _error(key, value, f"{value!r} is not a Kubernetes name: {reason}")
    if not re.fullmatch(r"[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?", placement.run_id):
        reason = "every object carries it as app.kubernetes.io/instance, at most 63 characters"
        yield _error("run_id", placement.run_id, f"{placement.run_id!r} cannot be a label: {reason}")


RULES: tuple[Callable[[Placement], Iterator[Finding]], ...] = (
    _mode_is_sold,
    _reservation_is_named,
    _image_is_named,
    _run_has_a_home,
    _checkpoints_outlive_a_pod,
    _copies_have_a_bucket,
    _ranks_and_device_fit_the_machine,
    _slices_are_whole,
    _grace_that_spot_gives,
    _at_most_seven_days,
    _queued_nodes_are_not_replaced,
    _locations_are_places,
    _claims_exist,
    _arm_is_supported,
    _names_are_labels,
)
