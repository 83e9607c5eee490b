"""Before anything is made: billing, permissions with the role that brings each, services, the zone's profile."""

from __future__ import annotations

from muster.backends.gke.provision.inventory.accounts import accounts, acting_commands, commands
from muster.backends.gke.provision.inventory.resource_names import Site
from muster.backends.google.http import Call, Reply
from muster.backends.google.project.access import Services, ask, billing, check_billing, granted, permissions_of
from muster.backends.google.project.networks import network_profile
from muster.backends.google.session import NOT_SWITCHED_ON, Session
from muster.core.errors import AccessError, BackendError, CapacityError, UsageError
from muster.core.typed_json import child, children, text, texts

SERVICES = (
    "artifactregistry.googleapis.com",
    "cloudbilling.googleapis.com",
    "cloudbuild.googleapis.com",
    "cloudresourcemanager.googleapis.com",
    "compute.googleapis.com",
    "container.googleapis.com",
    "iam.googleapis.com",
    "storage.googleapis.com",
)
IMAGE_STREAMING = "containerfilesystem.googleapis.com"
ANSWERS_WITHIN_S = 600.0
"""Google speaks of "a few minutes" between switching a service on and its first answer."""
ACT_AS = "iam.serviceAccounts.actAs"
PERMISSIONS = {
    "serviceusage.services.enable": "roles/serviceusage.serviceUsageAdmin",
    "compute.networks.create": "roles/compute.networkAdmin",
    "compute.networks.delete": "roles/compute.networkAdmin",
    "compute.subnetworks.create": "roles/compute.networkAdmin",
    "compute.subnetworks.delete": "roles/compute.networkAdmin",
    "compute.firewalls.create": "roles/compute.securityAdmin",
    "compute.firewalls.delete": "roles/compute.securityAdmin",
    "container.clusters.create": "roles/container.admin",
    "container.clusters.update": "roles/container.admin",
    "container.clusters.delete": "roles/container.admin",
    "storage.buckets.create": "roles/storage.admin",
    "storage.buckets.setIamPolicy": "roles/storage.admin",
    "artifactregistry.repositories.create": "roles/artifactregistry.admin",
    "artifactregistry.repositories.delete": "roles/artifactregistry.admin",
    "cloudbuild.builds.create": "roles/cloudbuild.builds.editor",
    ACT_AS: "roles/iam.serviceAccountUser",
}
MAKING_ACCOUNTS = {
    "iam.serviceAccounts.create": "roles/iam.serviceAccountAdmin",
    "iam.serviceAccounts.delete": "roles/iam.serviceAccountAdmin",
    "resourcemanager.projects.getIamPolicy": "roles/resourcemanager.projectIamAdmin",
    "resourcemanager.projects.setIamPolicy": "roles/resourcemanager.projectIamAdmin",
    "artifactregistry.repositories.setIamPolicy": "roles/artifactregistry.admin",
}
"""Needed where ``up`` makes the accounts of nodes and builds; not where they are there, with their roles."""


ROUTERS = {
    "compute.routers.create": "roles/compute.networkAdmin",
    "compute.routers.delete": "roles/compute.networkAdmin",
}
"""Of private clusters."""


def permissions(site: Site) -> dict[str, str]:
    """What ``up`` and ``down`` need of the person who runs them -> a role that brings it."""
    makes_accounts = site.makes_node_account or site.makes_build_account
    return PERMISSIONS | (MAKING_ACCOUNTS if makes_accounts else {}) | (ROUTERS if site.private else {})


def preflight_calls(site: Site) -> list[Call]:
    """What is asked before anything is made."""
    calls = [billing(site.project), permissions_of(site.project, permissions(site))]
    if site.placement.machine.gpus:
        machine = site.placement.machine.name
        calls.append(Call(method="GET", url=f"{site.compute}/zones/{site.zone}/machineTypes/{machine}"))
    if profile := network_profile(site):
        calls.append(Call(method="GET", url=profile))
    return calls


def preflight(site: Site, session: Session) -> None:
    """Raise for everything that would fail later, before anything is made.

    Raises:
        AccessError: no such project, no billing, or permissions that are missing, each with its role.
    """
    on = services(site)
    check_billing(on, session)
    needed = permissions(site)
    held = granted(needed, on, session)
    if ACT_AS not in held and _may_act(site, session):
        held = [*held, ACT_AS]
    missing = [permission for permission in needed if permission not in held]
    making = MAKING_ACCOUNTS.keys() & set(missing)
    if making and set(missing) <= {ACT_AS, *making} and _accounts_are_there(site, session):
        missing = [permission for permission in missing if permission not in making]
    if not missing:
        return
    lines = "\n".join(f"  {permission} (in {needed[permission]})" for permission in missing)
    hint = "grant " + ", ".join(sorted({needed[permission] for permission in missing}))
    if MAKING_ACCOUNTS.keys() & set(missing):
        hint += "; or have an administrator run this once, then repeat the command:\n  "
        hint += "\n  ".join(commands(site))
    elif ACT_AS in missing:
        hint += "; or for the accounts alone:\n  " + "\n  ".join(acting_commands(site))
    raise AccessError(f"{len(missing)} permissions are missing in project {site.project}:\n{lines}", hint=hint)


def _may_act(site: Site, session: Session) -> bool:
    """Whether nodes and builds may run as their accounts by a role on each of them, where the project gives none."""
    for email in dict.fromkeys((site.node_account, site.build_account)):
        url = f"https://iam.googleapis.com/v1/projects/-/serviceAccounts/{email}:testIamPermissions"
        reply = ask(Call(method="POST", url=url, body={"permissions": [ACT_AS]}), services(site), session)
        if reply.status >= 300 or ACT_AS not in texts(reply.body, "permissions"):
            return False
    return True


def _accounts_are_there(site: Site, session: Session) -> bool:
    """Whether the accounts exist; for those not made by hand their roles are checked too."""
    return all(resource.look(session).state == "there" for resource in accounts(site))


def check_zone(site: Site, session: Session) -> None:
    """What exists in certain zones only: the machine type, and the network between its GPUs. Needs the services, which
    answer some minutes after they were switched on for the first time: that is waited for.

    Raises:
        CapacityError: not in this zone; the hint says where.
        UsageError: the run file's network is not there.
        BackendError: a service does not answer although it is on.
    """
    _when_it_answers(Call(method="GET", url=f"{site.container}/clusters"), session)
    network = Call(method="GET", url=f"{site.compute}/global/networks/{site.network}")
    if not site.makes_network and _when_it_answers(network, session).status == 404:
        raise UsageError(
            f"resources.network: project {site.project} has no VPC network {site.network}",
            hint="name one that is there, or none: up makes one",
        )
    machine = site.placement.machine
    if not machine.gpus:
        return
    url = f"{site.compute}/zones/{site.zone}/machineTypes/{machine.name}"
    if _when_it_answers(Call(method="GET", url=url), session).status == 404:
        zones = _zones_with(machine.name, site, session)
        raise CapacityError(
            f"zone {site.zone} has no {machine.name}",
            hint="it is in " + ", ".join(zones) if zones else "no zone that this project sees has it",
        )
    profile = network_profile(site)
    if profile is None or session.send(Call(method="GET", url=profile)).status != 404:
        return
    listed = session.ok(Call(method="GET", url=f"{site.compute}/global/networkProfiles")).body
    suffix = f"-{site.placement.family.network_profile}"
    names = [text(row, "name") for row in children(listed, "items")]
    zones = sorted(name.removesuffix(suffix) for name in names if name.endswith(suffix))
    raise CapacityError(
        f"zone {site.zone} has no {site.placement.family.network_profile} network for {machine.name}",
        hint="it is in " + ", ".join(zones) if zones else "no zone has one",
    )


def _when_it_answers(call: Call, session: Session) -> Reply:
    waited_s, pause_s = 0.0, 5.0
    while NOT_SWITCHED_ON & (reply := session.send(call)).reasons:
        if waited_s > ANSWERS_WITHIN_S:
            raise BackendError(
                f"{call.url}: {reply.message}", hint="it was switched on; run the same command again later"
            )
        session.clock.sleep(pause_s)
        waited_s += pause_s
        pause_s = min(30.0, pause_s * 1.5)
    return reply


def _zones_with(machine: str, site: Site, session: Session) -> list[str]:
    url = f"{site.compute}/aggregated/machineTypes?filter=name%3D{machine}"
    reply = session.send(Call(method="GET", url=url))
    places = child(reply.body, "items") if reply.status < 300 else {}
    return sorted(zone.removeprefix("zones/") for zone, row in places.items() if children(row, "machineTypes"))


def services(site: Site) -> Services:
    """Google's APIs that the cluster, its nodes and ``up`` need."""
    return Services(project=site.project, names=(*SERVICES, IMAGE_STREAMING) if site.streams_images else SERVICES)
