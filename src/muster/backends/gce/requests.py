"""What is sent to Compute Engine, exactly: pure functions from a run file to requests.

The supervisor's machine first; hosts are asked for zone by zone: all at once by bulk insertion, or with flex-start by a
managed group whose resize request waits in the zone's queue. Everybody who may look at a machine reads its metadata, as
does every program on it: it names secrets and holds none.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from importlib import resources

from muster.backends import run_folder
from muster.backends.backend import RenderedFiles
from muster.backends.gce import placement as names
from muster.backends.gce.placement import PREFIX, Placement, place, region_of, request_id, resolved
from muster.backends.gce.run_file_rules import rules, warnings
from muster.backends.google.rules import slices_of
from muster.backends.run_folder import RunFiles
from muster.catalog import gce as catalogue
from muster.catalog.gce import CALENDAR, FLEX_START, ON_DEMAND, RESERVATION, SPOT
from muster.config.spec import RunSpec
from muster.core.errors import RunFileError
from muster.core.typed_json import Json, JsonObject

Body = dict[str, Json]

API = "https://compute.googleapis.com/compute/v1/projects"
SCOPE = "https://www.googleapis.com/auth/cloud-platform"
NOTICE_S = 120
"""Of a preemption, in the metadata server, before the machine is shut down: 0 or this (API). Not asked for, it
comes with the shutdown."""
HOST_ERROR_S = 90
"""After so long a silent host counts as dead for Google: its least; what it takes else is 330 s."""
SUPERVISOR_DISK_GB = 30
ROLE = "musterSupervisor"
PERMISSIONS = (
    "compute.disks.create", "compute.disks.delete", "compute.disks.list", "compute.disks.setLabels",
    "compute.images.useReadOnly", "compute.instanceGroupManagers.create", "compute.instanceGroupManagers.delete",
    "compute.instanceGroupManagers.get", "compute.instanceGroupManagers.list", "compute.instanceGroupManagers.update",
    "compute.instanceTemplates.create", "compute.instanceTemplates.delete", "compute.instanceTemplates.get",
    "compute.instanceTemplates.list", "compute.instanceTemplates.useReadOnly", "compute.instances.create",
    "compute.instances.delete", "compute.instances.get", "compute.instances.list", "compute.instances.setLabels",
    "compute.instances.setMetadata", "compute.instances.setServiceAccount", "compute.instances.setTags",
    "compute.reservations.get", "compute.reservations.list", "compute.resourcePolicies.create",
    "compute.resourcePolicies.delete", "compute.resourcePolicies.get", "compute.resourcePolicies.list",
    "compute.resourcePolicies.use",
    "compute.subnetworks.use", "compute.subnetworks.useExternalIp", "compute.zoneOperations.get",
    "compute.zoneOperations.list", "compute.regionOperations.get", "compute.globalOperations.get",
)  # fmt: skip
"""What the supervisor does with machines. It also needs ``roles/iam.serviceAccountUser`` on the hosts' account, and
the bucket and the secret as hosts have them."""


@dataclass(frozen=True, kw_only=True)
class Request:
    """One request that creates something; the same one twice creates it once."""

    what: str
    """As a person calls it."""
    url: str
    body: JsonObject

    def to_json(self) -> JsonObject:
        return {"method": "POST", "url": self.url, "body": self.body}


def rendered(spec: RunSpec, *, run_id: str, run_dir: str | None) -> RenderedFiles:
    """A file for the supervisor and its role, and one for each zone, in the order in which they are tried.

    Raises:
        RunFileError: rules across keys are broken, each with its reason.
    """
    if problems := list(rules(spec)):
        raise RunFileError(problems)
    placement = place(spec, run_id=run_id, run_dir=run_dir)
    return RenderedFiles(
        files={name: text(rows) for name, rows in files(placement).items()},
        warnings=tuple(warnings(placement)),
    )


def files(placement: Placement) -> dict[str, list[Request]]:
    """Requests by the name of the file that shows them; in a file they are sent from top to bottom."""
    found = {"supervisor.json": [role(placement), supervisor(placement, placement.zones[0])]}
    for request_number, zone in enumerate(placement.zones, start=1):
        found[f"hosts.{request_number}.{zone}.json"] = hosts(placement, zone, request_number=request_number)
    return found


def text(requests: Sequence[Request]) -> str:
    return json.dumps([one.to_json() for one in requests], indent=1) + "\n"


def role(placement: Placement) -> Request:
    """The role that the supervisor's account needs in the project."""
    body: JsonObject = {
        "roleId": ROLE,
        "role": {"title": "Muster supervisor", "stage": "GA", "includedPermissions": [*PERMISSIONS]},
    }
    url = f"https://iam.googleapis.com/v1/projects/{placement.project}/roles"
    return Request(what=f"roles/{ROLE}", url=url, body=body)


def supervisor(placement: Placement, zone: str, attempt: int = 0) -> Request:
    """The small machine that outlives hosts; it ends by itself long after the run had to. ``attempt`` makes another
    request of it: one that was carried out is not carried out again, though its machine be gone."""
    asked, name = placement.spec.gce, placement.supervisor
    small = asked.supervisor_machine
    image = catalogue.supervisor_image().name
    disk = _boot_disk(placement, image, SUPERVISOR_DISK_GB, f"zones/{zone}/diskTypes/pd-balanced")
    body: Body = {
        "name": name,
        "machineType": f"zones/{zone}/machineTypes/{small}",
        "labels": {**placement.labels},
        "disks": [disk],
        "networkInterfaces": [_first_interface(placement, zone)],
        "scheduling": {
            "provisioningModel": "STANDARD", "automaticRestart": True, "onHostMaintenance": "MIGRATE",
            "maxRunDuration": _duration(placement.supervisor_s), "instanceTerminationAction": "DELETE",
        },
        "serviceAccounts": [{"email": asked.supervisor_service_account, "scopes": [SCOPE]}],
        "metadata": _metadata(placement, "supervisor"),
        "reservationAffinity": {"consumeReservationType": "NO_RESERVATION"},
    }  # fmt: skip
    own = request_id(placement, f"{name}/{zone}/{placement.submission}/{attempt}")
    url = f"{API}/{placement.project}/zones/{zone}/instances?requestId={own}"
    return Request(what=f"instances/{name}", url=url, body=body)


def hosts(placement: Placement, zone: str, *, request_number: int, count: int | None = None) -> list[Request]:
    """What asks ``zone`` for hosts, as the run's ``request_number``; ``count`` replaces hosts that were lost
    (None: all of the run's)."""
    number = placement.hosts if count is None else count
    least = placement.least_hosts if count is None else 1
    if placement.machine.chips:
        return _slices(placement, zone, request_number)
    before = [policy] if (policy := _policy(placement, zone, request_number, number)) is not None else []
    if placement.mode == FLEX_START:
        return [*before, *_queued(placement, zone, request_number, number, policy)]
    body: JsonObject = {
        "count": str(number),
        "minCount": str(least),
        "perInstanceProperties": {name: {} for name in names.host_names(placement, request_number, number)},
        "instanceProperties": _properties(placement, zone, policy),
    }
    name = f"{placement.stem}-{request_number}"
    url = f"{API}/{placement.project}/zones/{zone}/instances/bulkInsert?requestId={request_id(placement, name)}"
    return [*before, Request(what=f"{number} x {placement.machine.name} in {zone}", url=url, body=body)]


def _queued(placement: Placement, zone: str, request_number: int, number: int, policy: Request | None) -> list[Request]:
    """A template, a group that heals nothing, and the request for machines, which come together or not at all."""
    name, project = f"{placement.stem}-{request_number}", placement.project
    template: JsonObject = {"name": name, "properties": _properties(placement, zone, None)}
    group: Body = {
        "name": name,
        "instanceTemplate": f"projects/{project}/global/instanceTemplates/{name}",
        "baseInstanceName": name,
        "targetSize": 0,
        "instanceLifecyclePolicy": {"defaultActionOnFailure": "DO_NOTHING", "onFailedHealthCheck": "DO_NOTHING"},
    }
    if policy is not None:
        group["resourcePolicies"] = {
            "workloadPolicy": f"projects/{project}/regions/{region_of(zone)}/resourcePolicies/{name}"
        }
    resize: JsonObject = {
        "name": name,
        "resizeBy": number,
        "requestedRunDuration": _duration(placement.run_s or names.SEVEN_DAYS_S),
    }
    groups = f"{API}/{project}/zones/{zone}/instanceGroupManagers"

    def at(url: str, what: str) -> str:
        return f"{url}?requestId={request_id(placement, f'{name}/{what}')}"

    templates = f"{API}/{project}/global/instanceTemplates"
    return [
        Request(what=f"instanceTemplates/{name}", url=at(templates, "template"), body=template),
        Request(what=f"instanceGroupManagers/{name}", url=at(groups, "group"), body=group),
        Request(
            what=f"{number} x {placement.machine.name} in {zone}, when there are some",
            url=at(f"{groups}/{name}/resizeRequests", "resize"),
            body=resize,
        ),
    ]


def _slices(placement: Placement, zone: str, request_number: int) -> list[Request]:
    """A template, and for each slice of TPUs a group of as many machines; of several hosts with a policy that wires
    them. A slice is replaced as a whole, so that a group heals nothing."""
    name, project = f"{placement.stem}-{request_number}", placement.project
    slices = slices_of(placement.spec, placement.machine.name)
    template: JsonObject = {"name": name, "properties": _properties(placement, zone, None)}

    def request(what: str, base: str, body: JsonObject) -> Request:
        own = request_id(placement, f"{name}/{what}")
        return Request(what=what, url=f"{API}/{project}/{base}?requestId={own}", body=body)

    found = [request(f"instanceTemplates/{name}", "global/instanceTemplates", template)]
    for number in range(slices.count):
        one = name if slices.count == 1 else f"{name}s{number}"  # no other run's name, and found by ``teardown``
        group: Body = {
            "name": one,
            "instanceTemplate": f"projects/{project}/global/instanceTemplates/{name}",
            "baseInstanceName": one,
            "targetSize": slices.hosts,
            "instanceLifecyclePolicy": {"defaultActionOnFailure": "DO_NOTHING", "onFailedHealthCheck": "DO_NOTHING"},
        }
        if placement.mode in (FLEX_START, RESERVATION):  # no other mode may wait until there are all
            group["targetSizePolicy"] = {"mode": "BULK"}
        if slices.hosts > 1:
            wired: JsonObject = {"type": "HIGH_THROUGHPUT", "acceleratorTopology": slices.topology}
            policies = f"regions/{region_of(zone)}/resourcePolicies"
            found.append(request(f"resourcePolicies/{one}", policies, {"name": one, "workloadPolicy": wired}))
            group["resourcePolicies"] = {"workloadPolicy": f"projects/{project}/{policies}/{one}"}
        found.append(request(f"instanceGroupManagers/{one}", f"zones/{zone}/instanceGroupManagers", group))
    return found


def _policy(placement: Placement, zone: str, request_number: int, number: int) -> Request | None:
    """How machines are placed together; None: the mode does it, or has no such thing. A reservation has its own."""
    if number == 1 or placement.mode not in (ON_DEMAND, FLEX_START):
        return None
    name, region = f"{placement.stem}-{request_number}", region_of(zone)
    body: Body = {"name": name}
    if placement.mode == ON_DEMAND and placement.family.compact:
        body["groupPlacementPolicy"] = {"collocation": "COLLOCATED"}
    elif placement.mode == FLEX_START and placement.family.topology:
        body["workloadPolicy"] = {"type": "HIGH_THROUGHPUT"}
    else:
        return None
    url = f"{API}/{placement.project}/regions/{region}/resourcePolicies?requestId={request_id(placement, name)}"
    return Request(what=f"resourcePolicies/{name}", url=url, body=body)


def _properties(placement: Placement, zone: str, policy: Request | None) -> JsonObject:
    """What hosts have in common, which is everything but their names."""
    asked, machine = placement.spec.gce, placement.machine
    disk_type = asked.boot_disk_type or placement.family.boot_disk
    properties: Body = {
        "machineType": machine.name,
        "labels": {**placement.labels},
        "disks": [_boot_disk(placement, placement.image, placement.boot_disk_gb, disk_type), *_local_ssds(placement)],
        "networkInterfaces": [_first_interface(placement, zone), *_data_interfaces(placement, zone)],
        "scheduling": _scheduling(placement),
        "serviceAccounts": [{"email": asked.service_account, "scopes": [SCOPE]}],
        "metadata": _metadata(placement, "host"),
        "reservationAffinity": _affinity(placement),
    }
    if placement.family.accelerator:  # the driver's modules are not signed for it, unless an image says so
        properties["shieldedInstanceConfig"] = {"enableSecureBoot": False}
    if policy is not None:
        properties["resourcePolicies"] = [policy.body["name"]]
    return properties


def _boot_disk(placement: Placement, image: str, size_gb: int, disk_type: str) -> JsonObject:
    """Disks do not inherit their machine's labels, and outlive it unless ``autoDelete`` is set."""
    initial: JsonObject = {
        "sourceImage": image,
        "diskSizeGb": str(size_gb),
        "diskType": disk_type,
        "labels": {**placement.labels},
    }
    return {"boot": True, "autoDelete": True, "initializeParams": initial}


def _local_ssds(placement: Placement) -> list[JsonObject]:
    """Machines that have some bring them; where they are reserved they have to be named as the reservation has them."""
    if placement.mode not in (RESERVATION, CALENDAR):
        return []
    initial: JsonObject = {"diskType": "local-ssd"}
    disk: JsonObject = {"type": "SCRATCH", "autoDelete": True, "interface": "NVME", "initializeParams": initial}
    return [disk] * (placement.machine.local_ssd or 0)


def _first_interface(placement: Placement, zone: str) -> JsonObject:
    """What agents, supervisor and Google's services are reached by."""
    ours = f"projects/{placement.project}/regions/{region_of(zone)}/subnetworks/{PREFIX}-sub"
    interface: Body = {"subnetwork": placement.spec.gce.subnetwork or ours, "nicType": "GVNIC"}
    if not placement.spec.resources.private:
        interface["accessConfigs"] = [{"type": "ONE_TO_ONE_NAT", "name": "external"}]
    return interface


def _data_interfaces(placement: Placement, zone: str) -> list[JsonObject]:
    """The family's data network, by the same table as GKE's; names are those of its networks."""
    subnets = f"projects/{placement.project}/regions/{region_of(zone)}/subnetworks"
    return [
        {
            "subnetwork": f"{subnets}/{PREFIX}-{data.subnet}",
            "nicType": "MRDMA" if data.mode == "RDMA" else "GVNIC",
        }
        for data in placement.machine.fabric.networks
    ]


def _scheduling(placement: Placement) -> JsonObject:
    """Each way of buying, with the end of a machine's life: deleted, never stopped, as what is stopped is still billed
    for its disks and keeps its name."""
    mode, family = placement.mode, placement.family
    scheduling: Body = {"onHostMaintenance": "TERMINATE" if family.accelerator or mode == SPOT else "MIGRATE"}
    dense = family.topology or placement.machine.chips
    bound = mode == CALENDAR or (mode == RESERVATION and dense)  # a calendar's, and densely placed ones
    scheduling["provisioningModel"] = {SPOT: "SPOT", FLEX_START: "FLEX_START"}.get(
        mode, "RESERVATION_BOUND" if bound else "STANDARD"
    )
    if mode == SPOT:
        scheduling |= {"automaticRestart": False, "preemptionNoticeDuration": _duration(NOTICE_S)}
    elif mode != FLEX_START:
        # Google brings the same name back on another host sooner than anybody finds a machine in a full zone.
        scheduling |= {"automaticRestart": True, "hostErrorTimeoutSeconds": HOST_ERROR_S}
    if placement.machine.local_ssd:  # else it waits an hour for disks whose content is not needed
        scheduling["localSsdRecoveryTimeout"] = _duration(0)
    if placement.run_s is not None and not bound:
        scheduling["maxRunDuration"] = _duration(placement.run_s)
    if mode in (SPOT, FLEX_START) or bound or "maxRunDuration" in scheduling:
        scheduling["instanceTerminationAction"] = "DELETE"
    return scheduling


def _affinity(placement: Placement) -> JsonObject:
    """Without an affinity a machine uses up any reservation that fits, even another team's."""
    name = placement.spec.resources.reservation
    if placement.mode not in (RESERVATION, CALENDAR) or not name:
        return {"consumeReservationType": "NO_RESERVATION"}
    key = "compute.googleapis.com/reservation-name"
    return {"consumeReservationType": "SPECIFIC_RESERVATION", "key": key, "values": [name]}


def _metadata(placement: Placement, role_of_it: str) -> JsonObject:
    """What the start-up script and the programs after it read; ``startup.sh`` says what each is for."""
    asked = placement.spec.gce
    values = {
        "startup-script": startup_script(),
        "muster-role": role_of_it,
        "muster-run": placement.run_id,
        "muster-home": placement.home,
        "muster-bundle": asked.bundle or "",
        "muster-files": placement.files_sha256 or run_folder.digest(run_files(placement.spec, placement).encoded()),
        "muster-submission": placement.submission,
        "muster-token-secret": placement.token_secret,
        "muster-gpus": str(placement.machine.gpus if role_of_it == "host" else 0),
    }
    if asked.hugging_face_secret and role_of_it == "host":
        values["muster-hugging-face-secret"] = asked.hugging_face_secret
    return {"items": [{"key": key, "value": value} for key, value in values.items()]}


def run_files(spec: RunSpec, placement: Placement, code: bytes | None = None) -> RunFiles:
    """What is put into the home, where hosts fetch it; its digest is in their metadata. ``spec`` is the run file, or
    what it becomes with the user's own ``code`` (``code_bundle.pack``)."""
    whole = resolved(replace(placement, spec=spec)).model_dump_json(indent=1) + "\n"
    text = json.dumps(spec.model_dump(mode="json", exclude_defaults=True), indent=1) + "\n"  # JSON is YAML
    return RunFiles(resolved=whole, run_yaml=text, code=code)


@cache
def startup_script() -> str:
    """The same on every machine: what differs is in its metadata."""
    return resources.files("muster.backends.gce").joinpath("startup.sh").read_text(encoding="utf-8")


def _duration(seconds: int) -> JsonObject:
    return {"seconds": str(seconds)}
