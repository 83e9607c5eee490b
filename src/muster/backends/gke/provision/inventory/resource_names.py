"""Where everything goes and what it is called: pure functions of the run file."""

from __future__ import annotations

import datetime
import ipaddress
import re
from dataclasses import dataclass

from muster.backends.gke.manifests.placement import Placement
from muster.backends.gke.manifests.volumes import buckets
from muster.backends.gke.provision.inventory.disks import refuse_what_does_not_fit
from muster.backends.google.project.networks import MAIN_RANGE
from muster.catalog.gke import DataNetwork, Family, Machine
from muster.config.sections.resources import Resources
from muster.core.errors import UsageError
from muster.core.protocols import Clock


@dataclass(frozen=True, kw_only=True)
class Site:
    """A place for a cluster in a project."""

    placement: Placement
    project: str
    zone: str
    adopt: bool = False
    day: str = ""
    """Today, as ``2026-08-22``: from then on nodes are not upgraded for a while. Empty: not asked for."""

    @property
    def region(self) -> str:
        return self.zone.rsplit("-", 1)[0]

    @property
    def prefix(self) -> str:
        return self.placement.options.network_prefix

    @property
    def cluster(self) -> str:
        return self.placement.spec.resources.cluster or self.prefix

    @property
    def pool(self) -> str:
        """One pool for each kind of machine and way of buying it, at most 40 characters (GKE's limit)."""
        return self.placement.queue_objects.replace("muster", self.prefix, 1)[:40].rstrip("-")

    @property
    def pools(self) -> tuple[str, ...]:
        """Of hosts: that one, or a pool for each slice of TPUs."""
        return (self.pool, *(f"{self.pool[:37]}-{number}" for number in range(1, self.placement.slices)))

    @property
    def family(self) -> Family:
        return self.placement.family

    @property
    def machine(self) -> Machine:
        return self.placement.machine

    @property
    def data_networks(self) -> tuple[DataNetwork, ...]:
        """Those of the machine's data NICs that are attached by name: claims bring networks of their own."""
        attached = self.machine.gpus and not self.placement.claims
        return tuple(self.machine.fabric.networks) if attached else ()

    @property
    def buckets(self) -> tuple[str, ...]:
        """Of the run file's paths, direct or mounted, and of its home."""
        return tuple(sorted(buckets(self.placement)))

    @property
    def network(self) -> str:
        """The cluster's own VPC: the run file's, which is there already, or ours."""
        named = self.placement.spec.resources.network
        return own_network(named, self.project) if named else f"{self.prefix}-net"

    @property
    def makes_network(self) -> bool:
        return self.placement.spec.resources.network is None

    @property
    def main_range(self) -> str:
        return MAIN_RANGE

    @property
    def private(self) -> bool:
        """Nodes have no public addresses."""
        return self.placement.spec.resources.private

    @property
    def repository(self) -> str:
        """Where ``muster image`` puts what it builds."""
        return f"projects/{self.project}/locations/{self.region}/repositories/{self.prefix}"

    @property
    def makes_node_account(self) -> bool:
        return self.placement.spec.resources.node_service_account is None

    @property
    def makes_build_account(self) -> bool:
        return self.placement.spec.resources.build_service_account is None

    @property
    def node_account(self) -> str:
        """Address of the service account that nodes run as."""
        return self.placement.spec.resources.node_service_account or self._account("nodes")

    @property
    def build_account(self) -> str:
        """The same of image builds."""
        return self.placement.spec.resources.build_service_account or self._account("build")

    def _account(self, use: str) -> str:
        """``muster-nodes@my-project.iam.gserviceaccount.com``: 30 characters at most before the ``@``."""
        domain, _, name = self.project.rpartition(":")
        place = f"{name}.{domain}" if domain else name
        return f"{self.prefix[:24].rstrip('-')}-{use}@{place}.iam.gserviceaccount.com"

    @property
    def streams_images(self) -> bool:
        """Containers start while their image is still being read: Artifact Registry alone can do that."""
        resources = self.placement.spec.resources
        if resources.image_streaming is not None:
            return resources.image_streaming
        return resources.image is None or resources.image.partition("/")[0].endswith("-docker.pkg.dev")

    @property
    def compute(self) -> str:
        return f"https://compute.googleapis.com/compute/v1/projects/{self.project}"

    @property
    def container(self) -> str:
        return f"https://container.googleapis.com/v1/projects/{self.project}/locations/{self.region}"


NOT_MADE = {
    "anywhere_cache": (
        "up makes no caches, since a bucket that had one cannot be removed for more than an hour after the cache is "
        "disabled: down would leave it",
        "muster plan says when one pays; gcloud storage buckets anywhere-caches create gs://BUCKET ZONE",
    ),
    "rapid": (
        "objects of a zonal bucket are written by gRPC alone, which Muster does not speak: neither a run's home nor "
        "its checkpoints could be there",
        "resources.storage: standard; data may be read from a zonal bucket that is there already",
    ),
}
"""Kind of storage -> why ``up`` does not make it, and what to do."""


def site(placement: Placement, *, zone: str | None = None, adopt: bool = False, day: str = "") -> Site:
    """The first place of the run file, or ``zone``.

    Raises:
        UsageError: no project or no zone, or nodes on which the run's pods would never fit.
    """
    resources = placement.spec.resources
    if not resources.project:
        raise UsageError("no Google Cloud project", hint="resources.project: MY-PROJECT")
    if not re.fullmatch(r"([a-z][a-z0-9.-]*:)?[a-z][-a-z0-9]{4,28}[a-z0-9]", resources.project):
        raise UsageError(f"{resources.project!r} cannot be a project's id", hint="6 to 30 of a-z, 0-9 and -")
    chosen = zone or next(iter(resources.locations), None)
    if chosen is None or not re.fullmatch(r"[a-z]+-[a-z]+[0-9]+-[a-z]", chosen):
        raise UsageError(f"a cluster needs a zone, got {chosen!r}", hint="resources.locations: [us-central1-b]")
    _refuse_what_is_not_done(resources, resources.project)
    refuse_what_does_not_fit(placement)
    return Site(placement=placement, project=resources.project, zone=chosen, adopt=adopt, day=day)


def own_network(named: str, project: str) -> str:
    """``NAME`` of ``NAME`` or ``projects/PROJECT/global/networks/NAME``.

    Raises:
        UsageError: another project's (shared VPC), or no network's name.
    """
    name = named
    if found := re.fullmatch(r"(?:.*/)?projects/([^/]+)/global/networks/([^/]+)", named):
        name = found[2]
        if found[1] != project:
            raise UsageError(
                f"resources.network: {named} is of project {found[1]}: a shared VPC is not supported, since its "
                f"subnets and the host project's roles for GKE would have to be there: up makes things in {project}",
                hint="name a network of the project itself, or none: up makes one",
            )
    if not re.fullmatch(r"[a-z]([-a-z0-9]{0,61}[a-z0-9])?", name):
        raise UsageError(
            f"resources.network: {named!r} cannot be a VPC network's name", hint="1 to 63 of a-z, 0-9 and -"
        )
    return name


def _refuse_what_is_not_done(resources: Resources, project: str) -> None:
    """What the run file's keys ask for and ``up`` cannot make.

    Raises:
        UsageError: with the reason, before anything is asked of Google.
    """
    if resources.network:
        own_network(resources.network, project)
    if resources.private and not resources.authorized_networks:
        raise UsageError(
            "resources.private needs resources.authorized_networks: else the control plane cannot be reached",
            hint="the range of the machine that runs muster: resources.authorized_networks: [203.0.113.7/32]",
        )
    if reason := NOT_MADE.get(resources.storage):
        raise UsageError(f"resources.storage: {resources.storage}: {reason[0]}", hint=reason[1])
    for cidr in resources.authorized_networks:
        try:
            ipaddress.ip_network(cidr)
        except ValueError as error:
            raise UsageError(
                f"resources.authorized_networks: {error}", hint="an address range as 203.0.113.7/32"
            ) from error


def today(clock: Clock) -> str:
    """The day by that clock, as ``2026-08-22`` (UTC)."""
    return datetime.datetime.fromtimestamp(clock.wall_ns() / 1e9, datetime.UTC).date().isoformat()
