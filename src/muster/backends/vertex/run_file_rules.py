"""Checks of a run file for Vertex AI. Pure: nothing asks Google.

Sources: the API's description (aiplatform.v1, revision 20261106), and Google's pages on custom training: the training
service, flex-start, Spot, reservations, compute resources, distributed training, Cloud Storage as a file system.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator

from muster.backends.google.rules import (
    NAME,
    PROJECT,
    REGION,
    home_problems,
    image_problems,
    machine_problems,
    problems_of,
    project_problems,
    slice_problems,
)
from muster.backends.vertex import reducers
from muster.backends.vertex.placement import SEVEN_DAYS_S, Placement, place
from muster.catalog import rows, vertex
from muster.catalog.vertex import FLEX_START, MODES, RESERVATION, SPOT
from muster.config.spec import RunSpec
from muster.core.errors import Problem

_BLOCK = rf"(/reservationBlocks/{NAME}(/reservationSubBlocks/{NAME})?)?"
#: With its zone: unlike anywhere else, a job has none of its own.
RESERVATION_NAME = rf"projects/({PROJECT}|[0-9]+)/zones/({REGION})-[a-z]/reservations/{NAME}{_BLOCK}"
#: Settings that another back end has.
ELSEWHERE = {
    "cluster": "a custom job has no cluster",
    "queue": "a custom job has no queue of yours",
    "private": "vertex.network and vertex.network_attachment say how hosts are reached",
    "authorized_networks": "there is no control plane of yours",
    "network": "vertex.network names a network to peer with",
    "node_service_account": "vertex.service_account is the account of hosts",
    "build_service_account": "nothing is built for it here",
    "storage": "no bucket is made for it",
    "image_streaming": "a custom job has no such setting",
    "local_ssd": "a custom job has no local SSDs",
}
NOTICE_S = 15.0
"""Between a signal and the end nothing is promised; this is what may be hoped for."""


def rules(spec: RunSpec) -> Iterator[Problem]:
    """What cannot hold on Vertex AI, each with its reason."""
    yield from problems_of(spec, lambda: place(spec, run_id="run", run_dir=None), RULES)


def unused_settings(spec: RunSpec) -> Iterator[tuple[str, str]]:
    """(key, reason) of settings without effect."""
    for name, reason in ELSEWHERE.items():
        yield f"resources.{name}", f"backend is vertex: {reason}"
    yield "model.weights", "backend is vertex: weights are read from the hub, or below /gcs"
    yield "metrics.port", "backend is vertex: nothing outside can connect to a host"


def warnings(placement: Placement) -> Iterator[Problem]:
    """What will surprise, and cannot be seen from here."""
    machine, spec = placement.machine, placement.spec
    gpus = machine.gpus * placement.hosts
    if (chip := machine.accelerator) is not None:
        known = {None: "a new project's limit is not known", 0: "a new project has 0"}
        limit = known.get(chip.default_quota, f"a new project has {chip.default_quota} in some regions")
        for region in placement.regions:
            yield Problem(
                "resources.hosts", f"needs {gpus} of the quota {chip.metric(placement.mode)} in {region}: {limit}"
            )
            if chip.regions is not None and region not in chip.regions:
                message = f"{chip.name} was not offered in {region} when the table was made ({vertex.table_date()})"
                yield Problem("resources.locations", message, hint=", ".join(chip.regions))
        if chip.network == "unknown" and placement.hosts > 1:
            message = f"whether Vertex sets up GPUDirect on {machine.name} is not documented: it may be plain TCP"
            yield Problem("resources.machine", message)
    if machine.chips:
        message = "rendered, never sent: submit refuses it, and which quota it counts against is not known"
        yield Problem("resources.machine", message)
    if spec.vertex.reduction_servers == reducers.AUTO:
        yield Problem("vertex.reduction_servers", reducers.sentence(placement))
    if placement.mode == SPOT:
        yield Problem("resources.provisioning_model", "a preempted host restarts the whole job, at most six times")
    if spec.recovery.grace_s > NOTICE_S and "grace_s" in spec.recovery.model_fields_set:
        yield Problem("recovery.grace_s", "Vertex documents no time between a notice and the end")
    model = spec.model
    weights = rows.weights_bytes(model.source) if model is not None and model.source else None
    if weights is not None and spec.vertex.boot_disk_gb and spec.vertex.boot_disk_gb < weights / 1e9 + 60:
        yield Problem(
            "vertex.boot_disk_gb", f"{spec.vertex.boot_disk_gb} GB for an image and {weights / 1e9:.0f} GB of weights"
        )
    bucket = placement.home.split("/")[2]
    yield Problem("run_dir", f"the bucket {bucket} has to be in one region: training reads no multi-region bucket")


def _mode(placement: Placement) -> Iterator[Problem]:
    key, mode, machine = "resources.provisioning_model", placement.mode, placement.machine
    if mode not in MODES:
        reasons = {
            "owned": "nothing there is owned",
            "calendar": "a calendar's machines are a reservation there",
            "flex_start_queued": "its flex-start has one form",
        }
        hint = {"calendar": RESERVATION, "flex_start_queued": FLEX_START}.get(mode, " or ".join(machine.modes))
        yield Problem(key, f"Vertex AI does not have {mode}: {reasons[mode]}", value=mode, hint=f"{key}: {hint}")
    elif mode not in machine.modes:
        message = f"Vertex AI has no flex-start for {machine.name}"
        yield Problem(key, message, value=mode, hint=f"{key}: {' or '.join(machine.modes)}")


def _flex_start(placement: Placement) -> Iterator[Problem]:
    hours = placement.spec.limits.max_hours
    if placement.mode == FLEX_START and hours is not None and hours * 3600 > SEVEN_DAYS_S:
        message = "flex-start ends after 7 days, and nothing asks for the rest by itself"
        yield Problem("limits.max_hours", message, value=hours, hint="limits.max_hours: 168")


def _reservation(placement: Placement) -> Iterator[Problem]:
    key, name, mode = "resources.reservation", placement.spec.resources.reservation, placement.mode
    if mode == RESERVATION and not name:
        yield Problem(key, "names none", hint="projects/P/zones/Z/reservations/R")
    if name and mode in (FLEX_START, SPOT):
        message = f"{mode} cannot use a reservation on Vertex AI"
        yield Problem(key, message, value=name, hint="resources.provisioning_model: reservation, or drop the name")
    match = re.fullmatch(RESERVATION_NAME, name) if name else None
    if name and match is None:
        message = "has to be named with its project and zone: a job has no zone of its own"
        yield Problem(key, message, value=name, hint="projects/P/zones/Z/reservations/R")
    if match is not None:
        region = re.search(rf"/zones/({REGION})-", match[0])
        yield from _bound(placement, key, region[1] if region else "")


def _regions(placement: Placement) -> Iterator[Problem]:
    key = "resources.locations"
    if not placement.regions:
        yield Problem(key, "names no region", hint=f"{key}: [us-central1]", to_submit=True)
    for location in placement.regions:
        if re.fullmatch(rf"{REGION}-[a-z]", location):
            region = location.rpartition("-")[0]
            message = f"{location} is a zone, and a custom job has none: Vertex chooses it"
            yield Problem(key, message, value=location, hint=f"{key}: [{region}]")
        elif not re.fullmatch(REGION, location):
            yield Problem(key, f"{location!r} is not a region: expected us-central1", value=location)


def _named(placement: Placement) -> Iterator[Problem]:
    """Project, image and account."""
    yield from project_problems(placement.spec, or_number=True)
    yield from image_problems(placement.spec)
    if placement.spec.vertex.service_account is None:
        reason = "without one a job may read buckets and no secret, so hosts could not know each other"
        hint = "vertex.service_account: NAME@PROJECT.iam.gserviceaccount.com"
        yield Problem("vertex.service_account", f"names no account: {reason}", hint=hint, to_submit=True)


def _home(placement: Placement) -> Iterator[Problem]:
    yield from home_problems(placement.spec)


def _ranks_and_device(placement: Placement) -> Iterator[Problem]:
    yield from machine_problems(placement.spec, placement.machine)


def _slice(placement: Placement) -> Iterator[Problem]:
    spec, machine = placement.spec, placement.machine
    if machine.chips:
        yield from slice_problems(spec, machine.name, machine.chips)
        if (slices := spec.parallelism.dp_replicate) > 1:
            message = "a custom job has one slice of TPUs: how several find each other there is documented nowhere"
            yield Problem("parallelism.dp_replicate", message, value=slices, hint="dp_replicate: 1, or backend: gke")


def _network(placement: Placement) -> Iterator[Problem]:
    vertex_ = placement.spec.vertex
    if vertex_.network and vertex_.network_attachment:
        yield Problem("vertex.network_attachment", "cannot be combined with vertex.network", hint="remove one")
    for key, name in (("network_attachment", vertex_.network_attachment), ("tensorboard", vertex_.tensorboard)):
        if name:
            yield from _bound(placement, f"vertex.{key}", name.split("/")[3])


def _reducers(placement: Placement) -> Iterator[Problem]:
    """Why Reduction Server cannot help here."""
    key, asked = "vertex.reduction_servers", placement.spec.vertex.reduction_servers
    reason = reducers.impossible(placement) if asked and asked != reducers.AUTO else None
    if reason:
        yield Problem(key, f"Reduction Server is not for this run: {reason}", value=asked, hint=f"{key}: 0")


def _bound(placement: Placement, key: str, region: str) -> Iterator[Problem]:
    """What exists in one region serves requests there alone."""
    others = [one for one in placement.regions if one != region]
    if others:
        message = f"is in {region}, and resources.locations has {', '.join(others)}"
        yield Problem(key, message, hint=f"resources.locations: [{region}]")


RULES: tuple[Callable[[Placement], Iterator[Problem]], ...] = (
    _mode,
    _flex_start,
    _reservation,
    _regions,
    _named,
    _home,
    _ranks_and_device,
    _slice,
    _network,
    _reducers,
)
