"""Everything that runs on plain machines find in a project: two accounts, a role, a bucket, networks. Pure."""

from __future__ import annotations

import ipaddress
import zlib
from collections.abc import Sequence
from dataclasses import dataclass

from muster.backends.bucket_paths import as_uri
from muster.backends.gce.placement import PREFIX, Placement, region_of
from muster.backends.gce.requests import PERMISSIONS as SUPERVISOR_PERMISSIONS
from muster.backends.gce.requests import ROLE, role
from muster.backends.google.http import Call
from muster.backends.google.project import terraform
from muster.backends.google.project.access import Services, account_grant, service_account
from muster.backends.google.project.buckets import bucket
from muster.backends.google.project.networks import MAIN_RANGES, main_rule, networks
from muster.backends.google.project.policies import of_account, of_bucket, of_project
from muster.backends.google.project.resources import Found, Resource, RestResource
from muster.backends.google.session import Session
from muster.catalog.gke import DataNetwork, Family, Machine
from muster.core.errors import UsageError
from muster.core.typed_json import texts

SERVICES = (
    "cloudbilling.googleapis.com",
    "cloudresourcemanager.googleapis.com",
    "compute.googleapis.com",
    "iam.googleapis.com",
    "secretmanager.googleapis.com",
    "storage.googleapis.com",
)
NEEDED = {
    "serviceusage.services.enable": "roles/serviceusage.serviceUsageAdmin",
    "compute.networks.create": "roles/compute.networkAdmin",
    "compute.networks.delete": "roles/compute.networkAdmin",
    "compute.subnetworks.create": "roles/compute.networkAdmin",
    "compute.subnetworks.delete": "roles/compute.networkAdmin",
    "compute.firewalls.create": "roles/compute.securityAdmin",
    "compute.firewalls.delete": "roles/compute.securityAdmin",
    "compute.routers.create": "roles/compute.networkAdmin",
    "compute.routers.delete": "roles/compute.networkAdmin",
    "iam.roles.create": "roles/iam.roleAdmin",
    "iam.roles.delete": "roles/iam.roleAdmin",
    "iam.roles.undelete": "roles/iam.roleAdmin",
    "iam.serviceAccounts.create": "roles/iam.serviceAccountAdmin",
    "iam.serviceAccounts.delete": "roles/iam.serviceAccountAdmin",
    "iam.serviceAccounts.setIamPolicy": "roles/iam.serviceAccountAdmin",
    "resourcemanager.projects.getIamPolicy": "roles/resourcemanager.projectIamAdmin",
    "resourcemanager.projects.setIamPolicy": "roles/resourcemanager.projectIamAdmin",
    "storage.buckets.create": "roles/storage.admin",
    "storage.buckets.setIamPolicy": "roles/storage.admin",
}
"""What ``up`` and ``down`` need of the person who runs them -> a role that brings it."""
WRITES = "roles/storage.objectUser"
ACTS = "roles/iam.serviceAccountUser"
SLOT = 20
"""Prefix of a region's main subnet: 4,092 machines, and 256 regions in ``MAIN_RANGES``."""


@dataclass(frozen=True, kw_only=True)
class Site:
    """One region of a run file, by its first zone there."""

    placement: Placement
    zone: str

    @property
    def project(self) -> str:
        return self.placement.project

    @property
    def region(self) -> str:
        return region_of(self.zone)

    @property
    def prefix(self) -> str:
        return PREFIX

    @property
    def network(self) -> str:
        return f"{PREFIX}-net"

    @property
    def makes_network(self) -> bool:
        return self.placement.spec.gce.subnetwork is None

    @property
    def main_range(self) -> str:
        """The region's own, the same for each run file: two subnets of one network may not overlap."""
        slots = list(ipaddress.IPv4Network(MAIN_RANGES).subnets(new_prefix=SLOT))
        return str(slots[zlib.crc32(self.region.encode()) % len(slots)])

    @property
    def private(self) -> bool:
        return self.placement.spec.resources.private

    @property
    def family(self) -> Family:
        return self.placement.family

    @property
    def machine(self) -> Machine:
        return self.placement.machine

    @property
    def data_networks(self) -> tuple[DataNetwork, ...]:
        return tuple(self.machine.fabric.networks)

    @property
    def compute(self) -> str:
        return f"https://compute.googleapis.com/compute/v1/projects/{self.project}"

    @property
    def buckets(self) -> tuple[str, ...]:
        """Of the run's home and of its checkpoints."""
        named = [self.placement.home, as_uri(self.placement.spec.checkpoint.dir or "")]
        return tuple(dict.fromkeys(uri.split("/")[2] for uri in named if uri.startswith("gs://")))

    @property
    def services(self) -> Services:
        return Services(project=self.project, names=SERVICES)


def sites(placement: Placement, *, zone: str | None = None) -> list[Site]:
    """One for each region, in the run file's order; ``zone``: that one's alone.

    Raises:
        UsageError: data networks that cannot be in all of its zones.
    """
    zones = [zone] if zone else placement.zones
    first: dict[str, str] = {}
    for one in zones:
        first.setdefault(region_of(one), one)
    found = [Site(placement=placement, zone=one) for one in first.values()]
    data, machine = found[0].data_networks, placement.machine.name
    if data and len(found) > 1:
        raise UsageError(
            f"the data networks of {machine} have one range each, and resources.locations has {len(found)} regions",
            hint=f"zones of one region; --zone {zones[0]} makes that one's",
        )
    if data and placement.family.network_profile and len(zones) > 1:
        raise UsageError(
            f"the RDMA network of {machine} is tied to one zone, and resources.locations has {', '.join(zones)}",
            hint=f"resources.locations: [{zones[0]}]",
        )
    return found


def resources(site: Site) -> list[Resource]:
    """In an order that satisfies each one's needs."""
    return [site.services, *_identities(site), *_networks(site), *_storage(site)]


def _networks(site: Site) -> list[Resource]:
    """With ``gce.subnetwork`` the first address is the user's to provide; data networks are ours in any case."""
    found = networks(site)
    if site.makes_network:
        return [*found, main_rule(site)]
    return [one for one in found if not one.key.endswith((f"/{PREFIX}-sub", f"/{PREFIX}-router"))]


def elsewhere(site: Site) -> list[str]:
    """Accounts of the run file that are another project's: neither made nor given roles here."""
    asked = site.placement.spec.gce
    named = [asked.service_account or "", asked.supervisor_service_account or ""]
    return [email for email in named if not _of_project(site, email)]


def _of_project(site: Site, email: str) -> bool:
    domain, _, name = site.project.rpartition(":")
    return email.endswith(f"@{name}.{domain}.iam.gserviceaccount.com" if domain else f"@{name}.iam.gserviceaccount.com")


def _identities(site: Site) -> list[Resource]:
    """Hosts have no right on machines. The supervisor's account makes and removes them, and may act as the hosts' own,
    not as any other of the project."""
    asked, project = site.placement.spec.gce, site.project
    hosts = service_account(project, asked.service_account or "", "hosts of Muster's runs")
    supervisor_email = asked.supervisor_service_account or ""
    supervisor = service_account(project, supervisor_email, "supervisors of Muster's runs")
    own = Role(
        key=f"roles/{ROLE}",
        url=f"https://iam.googleapis.com/v1/projects/{project}/roles/{ROLE}",
        create=Call(method="POST", url=role(site.placement).url, body=role(site.placement).body),
        owner=(),
        needs=("services",),
        foreign="use",
    )
    name = f"projects/{project}/roles/{ROLE}"
    to_act = of_account(project, asked.service_account or "")
    found: list[Resource] = [hosts] if _of_project(site, asked.service_account or "") else []
    if not _of_project(site, supervisor_email):
        return [*found, own]
    found += [supervisor, own]
    found.append(account_grant(supervisor, "machines", supervisor_email, of_project(project), name, (own.key,)))
    if hosts in found:
        found.append(account_grant(supervisor, "acts-as-hosts", supervisor_email, to_act, ACTS, (hosts.key,)))
    return found


def _storage(site: Site) -> list[Resource]:
    asked, project = site.placement.spec.gce, site.project
    emails: Sequence[tuple[str, str]] = (
        ("hosts", asked.service_account or ""), ("supervisor", asked.supervisor_service_account or ""),
    )  # fmt: skip
    found: list[Resource] = []
    for name in site.buckets:
        made = bucket(project, site.region, name)
        found.append(made)
        for use, email in emails:
            if not _of_project(site, email):
                continue
            account = service_account(project, email, "")
            found.append(account_grant(account, f"{use}-{name}", email, of_bucket(name), WRITES, (made.key,)))
    return found


@dataclass(frozen=True, kw_only=True)
class Role(RestResource):
    """A role of the project's own. Removed, it can be seen for a week, and its name is taken for longer: it comes back
    by being undeleted (Google's page on custom roles)."""

    def look(self, session: Session) -> Found:
        reply = session.find(Call(method="GET", url=self.url))
        if reply is None or reply.body.get("deleted"):
            return Found(state="absent")
        lacking = sorted(set(SUPERVISOR_PERMISSIONS) - set(texts(reply.body, "includedPermissions")))
        differences = (f"includedPermissions lacks {', '.join(lacking)}",) if lacking else ()
        return Found(state="there", body=reply.body, differences=differences)

    def make(self, session: Session) -> None:
        reply = session.find(Call(method="GET", url=self.url))
        if reply is not None and reply.body.get("deleted"):
            session.ok(Call(method="POST", url=f"{self.url}:undelete", body={}))
            return
        super().make(session)


def rendered(placement: Placement) -> dict[str, str]:
    """File name -> text, for the run file's first region.

    Raises:
        UsageError: data networks that cannot be in all of its zones.
    """
    where = sites(placement)[0]
    about = (
        f"Written by `muster render --format terraform` for runs on {where.machine.name} in {where.region}.\n"
        "`muster submit` makes the machines. It was never applied: read `terraform plan`."
    )
    values = {"services": [*where.services.names]}
    return terraform.rendered(
        resources(where), where="gce", project=where.project, zone=where.zone, values=values, about=about
    )
