"""Checks of a run file for Compute Engine. Pure: nothing asks Google.

Sources: the API's description (compute.v1, revision 20261106), Google's pages on bulk creation, flex-start, Spot and
reservations, and its Cluster Toolkit (2026-06-25).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator

from muster.backends.gce.placement import LONGEST_S, SEVEN_DAYS_S, Placement, place, region_of
from muster.backends.google.rules import RESERVATION as RESERVATION_NAME
from muster.backends.google.rules import (
    ZONE,
    home_problems,
    machine_problems,
    problems_of,
    project_problems,
    slice_problems,
)
from muster.catalog import gce
from muster.catalog.gce import CALENDAR, FLEX_START, RESERVATION, SPOT
from muster.config.spec import RunSpec
from muster.core.errors import Problem

#: Settings that another back end has.
ELSEWHERE = {
    "cluster": "machines have no cluster",
    "queue": "machines have no queue of yours",
    "image": "hosts are machines, not containers: gce.image is what they boot, gce.bundle their software",
    "authorized_networks": "there is no control plane of yours",
    "network": "gce.subnetwork says where hosts are",
    "node_service_account": "gce.service_account is the account of hosts",
    "build_service_account": "nothing is built for it here",
    "storage": "no bucket is made for it",
    "image_streaming": "there are no containers",
    "local_ssd": "a machine has those that it brings",
}


def rules(spec: RunSpec) -> Iterator[Problem]:
    """What cannot hold on Compute Engine, each with its reason."""
    yield from problems_of(spec, lambda: place(spec, run_id="run", run_dir=None), RULES)


def unused_settings(spec: RunSpec) -> Iterator[tuple[str, str]]:
    """(key, reason) of settings without effect."""
    for name, reason in ELSEWHERE.items():
        yield f"resources.{name}", f"backend is gce: {reason}"
    yield "model.weights", "backend is gce: weights are read from the hub"
    yield "metrics.port", "backend is gce: nothing outside can connect to a host"
    if spec.resources.provisioning_model not in (None, FLEX_START):
        yield "gce.max_wait_hours", "only flex_start waits for machines"


def warnings(placement: Placement) -> Iterator[Problem]:
    """What will surprise, and cannot be seen from here."""
    spec, machine = placement.spec, placement.machine
    lacks = gce.missing(machine)
    if placement.hosts > 1 and lacks is not None and spec.gce.image is None:
        yield Problem("gce.image", f"{machine.name}: {lacks}", hint="gce.image: projects/P/global/images/NAME")
    if machine.chips:
        yield Problem("resources.machine", "rendered, never sent: submit refuses it")
        if spec.gce.image is None:
            message = "Google's image for TPUs has Python 3.10, and Muster needs 3.11"
            yield Problem("gce.image", message, hint="gce.image: projects/P/global/images/NAME")
    if placement.least_hosts < placement.hosts:
        message = f"a zone that has {placement.least_hosts} of {placement.hosts} machines is taken, and they are billed"
        yield Problem("resources.min_hosts", message)
    if placement.mode == SPOT and "grace_s" in spec.recovery.model_fields_set and spec.recovery.grace_s > 120:
        yield Problem("recovery.grace_s", "Spot's notice is 120 s at most, and then 30 s to the end")
    if spec.resources.private:
        yield Problem(
            "resources.private",
            "hosts reach Google's services through Private Google Access, and pypi.org and huggingface.co only where "
            "the network has Cloud NAT",
        )
    bucket = placement.home.split("/")[2]
    regions = sorted({region_of(zone) for zone in placement.zones})
    yield Problem("run_dir", f"the bucket {bucket} should be in {' and '.join(regions)}: other traffic is billed")


def _sold(placement: Placement) -> Iterator[Problem]:
    key, mode, machine = "resources.provisioning_model", placement.mode, placement.machine
    if (reason := gce.refusal(placement.family)) is not None:
        yield Problem("resources.machine", f"{machine.name} is not for backend gce: {reason}", hint="backend: gke")
    elif mode not in gce.MODES:
        reasons = {"owned": "nothing there is owned", "flex_start_queued": "that is Kueue's form of it"}
        hint = f"{key}: {FLEX_START if mode == 'flex_start_queued' else ' or '.join(gce.modes(machine))}"
        yield Problem(key, f"Compute Engine does not have {mode}: {reasons[mode]}", value=mode, hint=hint)
    elif mode not in gce.modes(machine):
        sold = " or ".join(gce.modes(machine))
        yield Problem(key, f"{machine.name} is not sold as {mode}", value=mode, hint=f"{key}: {sold}")


def _time(placement: Placement) -> Iterator[Problem]:
    hours, mode = placement.spec.limits.max_hours, placement.mode
    longest = SEVEN_DAYS_S if mode == FLEX_START else LONGEST_S
    if hours is not None and hours * 3600 > longest:
        message = f"a machine may live {longest // 86_400} days with {mode}, and nothing asks for the rest by itself"
        yield Problem("limits.max_hours", message, value=hours, hint=f"limits.max_hours: {longest // 3600}")


def _reservation(placement: Placement) -> Iterator[Problem]:
    key, name, mode = "resources.reservation", placement.spec.resources.reservation, placement.mode
    reserved = mode in (RESERVATION, CALENDAR)
    if reserved and not name:
        hint = "R, or projects/OWNER/reservations/R"
        yield Problem(key, f"{mode} needs the reservation's name", hint=hint, to_submit=True)
    if name and not reserved:
        message = f"{mode} cannot use a reservation: its requests say NO_RESERVATION, so that they use up none"
        yield Problem(key, message, value=name, hint=f"resources.provisioning_model: {RESERVATION}, or drop the name")
    if name and not re.fullmatch(RESERVATION_NAME, name):
        hint = "R, or projects/OWNER/reservations/R, and either with /reservationBlocks/B"
        yield Problem(key, "this cannot be a reservation's name", value=name, hint=hint)


def _places(placement: Placement) -> Iterator[Problem]:
    key, subnetwork = "resources.locations", placement.spec.gce.subnetwork
    if not placement.zones:
        yield Problem(key, "names no zone", hint=f"{key}: [us-central1-b]", to_submit=True)
    for zone in placement.zones:
        if not re.fullmatch(ZONE, zone):
            message = f"{zone!r} is not a zone, and machines are in zones"
            yield Problem(key, message, value=zone, hint=f"{key}: [us-central1-b, us-central1-c]")
    region = subnetwork.split("/")[3] if subnetwork else None
    outside = [zone for zone in placement.zones if region and region_of(zone) != region]
    if outside:
        message = f"is in {region}, and resources.locations has {', '.join(outside)}"
        yield Problem("gce.subnetwork", message, value=subnetwork, hint=f"{key}: zones of {region}")


def _named(placement: Placement) -> Iterator[Problem]:
    """Project, accounts and software."""
    yield from project_problems(placement.spec)
    asked, at = placement.spec.gce, "NAME@PROJECT.iam.gserviceaccount.com"
    if asked.service_account is None:
        reason = "without one hosts get no token for the bucket and the secrets"
        hint = f"gce.service_account: {at}"
        yield Problem("gce.service_account", f"names no account: {reason}", hint=hint, to_submit=True)
    if asked.supervisor_service_account is None:
        reason = "the supervisor's machine replaces hosts, which hosts themselves may not"
        hint = f"gce.supervisor_service_account: {at}"
        yield Problem("gce.supervisor_service_account", f"names no account: {reason}", hint=hint, to_submit=True)
    elif asked.supervisor_service_account == asked.service_account:
        message = "is the hosts' account, too: every program on a host could make and remove machines"
        yield Problem("gce.supervisor_service_account", message, value=asked.service_account, hint="one of its own")
    if asked.bundle is None:
        message = "no software: hosts boot Google's image and install what the bundle holds"
        hint = "gce.bundle: gs://BUCKET/bundles/SHA256.tar.gz (docs/how-to/gce.md)"
        yield Problem("gce.bundle", message, hint=hint, to_submit=True)


def _home(placement: Placement) -> Iterator[Problem]:
    yield from home_problems(placement.spec)


def _inputs(placement: Placement) -> Iterator[Problem]:
    """A machine has no mount of a bucket."""
    model, data = placement.spec.model, placement.spec.data
    named = {"model.source": model.source if model is not None else None}
    for number, source in enumerate(data.sources if data is not None else ()):
        named |= {f"data.sources.{number}.{key}": path for key, path in source.files.items()}
    for key, path in named.items():
        if path is not None and path.startswith(("gs://", "/gcs/")):
            message = "is read below a mount of the bucket, and hosts here have none"
            yield Problem(key, message, value=path, hint="a name on the Hugging Face hub, or backend: gke or vertex")


def _ranks_and_device(placement: Placement) -> Iterator[Problem]:
    spec, machine = placement.spec, placement.machine
    yield from machine_problems(spec, machine)
    if machine.chips:
        yield from slice_problems(spec, machine.name, machine.chips)


def _reducers(placement: Placement) -> Iterator[Problem]:
    if asked := placement.spec.vertex.reduction_servers:
        message = "Reduction Server is not for plain machines: its image may be pulled by Vertex AI's jobs alone"
        yield Problem("vertex.reduction_servers", message, value=asked, hint="vertex.reduction_servers: 0")


RULES: tuple[Callable[[Placement], Iterator[Problem]], ...] = (
    _sold,
    _time,
    _reservation,
    _places,
    _named,
    _home,
    _inputs,
    _ranks_and_device,
    _reducers,
)
