"""The cluster, with its small pool for supervisors."""

from __future__ import annotations

import datetime
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from muster.backends.gke.provision.inventory.pools import SUPERVISOR_MACHINE, cpu_pool, host_pools
from muster.backends.gke.provision.inventory.resource_names import Site
from muster.backends.google.http import Call
from muster.backends.google.project.resources import LABEL, Found, RestResource, last_word
from muster.backends.google.session import Session
from muster.backends.machine_prices import cluster_usd_per_hour
from muster.core.typed_json import Json, JsonObject, child, children, text

NODES_STAY_DAYS = 90
"""Half of the 180 days that such an exclusion could last when they were introduced; today's limit is later."""
OLDER_RANGES = "masterAuthorizedNetworksConfig"
READY = ("RUNNING", "RECONCILING", "DEGRADED")
"""A degraded cluster wants a person; what trains on it goes on."""


def clusters(site: Site) -> list[RestResource]:
    """The cluster and, where the run wants GPUs or TPUs, their pools."""
    return [_cluster(site), *(host_pools(site) if site.placement.chips[1] else ())]


def _cluster(site: Site) -> ControlPlane:
    name = site.cluster
    body: dict[str, Json] = {
        "name": name,
        "description": "made by muster",
        "resourceLabels": LABEL,
        "network": f"projects/{site.project}/global/networks/{site.network}",
        "subnetwork": f"projects/{site.project}/regions/{site.region}/subnetworks/{site.prefix}-sub",
        "ipAllocationPolicy": {"useIpAliases": True},
        "networkConfig": {"datapathProvider": "ADVANCED_DATAPATH", "enableMultiNetworking": True},
        "addonsConfig": {"gcsFuseCsiDriverConfig": {"enabled": True}},
        "workloadIdentityConfig": {"workloadPool": f"{site.project}.svc.id.goog"},
        "releaseChannel": {"channel": "REGULAR"},
        "nodePools": [cpu_pool(site)],
    }
    compared = {key: body[key] for key in ("networkConfig", "workloadIdentityConfig")}
    if site.private:
        body["networkConfig"] = {**child(body, "networkConfig"), "defaultEnablePrivateNodes": True}
    if ranges := site.placement.spec.resources.authorized_networks:
        body["controlPlaneEndpointsConfig"] = _endpoints(ranges)
    if site.day:
        body["maintenancePolicy"] = {"window": {"maintenanceExclusions": {"muster-nodes-stay": _nodes_stay(site.day)}}}
    return ControlPlane(
        key=f"clusters/{name}",
        url=f"{site.container}/clusters/{name}",
        create=Call(method="POST", url=f"{site.container}/clusters", body={"cluster": body}),
        owner=("resourceLabels", "managed-by"),
        compared=compared,
        needs=("services", *_network_parts(site), *_identity(site)),
        network=text(body, "network"),
        private=site.private,
        authorized=tuple(site.placement.spec.resources.authorized_networks),
        runs_as=site.node_account,
        ready=READY,
        broken=("ERROR",),
        operations=f"{site.container}/operations",
        bills=f"a cluster and one {SUPERVISOR_MACHINE}",
        runs_up=True,
        usd_per_hour=cluster_usd_per_hour(SUPERVISOR_MACHINE, site.region),
    )


@dataclass(frozen=True, kw_only=True)
class ControlPlane(RestResource):
    """The cluster. Where only certain ranges may reach it, those of a second run file are let in as well."""

    network: str
    """``projects/P/global/networks/N``."""
    private: bool = False
    authorized: tuple[str, ...] = ()

    def look(self, session: Session) -> Found:
        result = super().look(session)
        if result.state == "absent":
            return result
        return replace(
            result, differences=(*result.differences, *self._elsewhere(result.body), *self._too_open(result.body))
        )

    def _elsewhere(self, there: JsonObject) -> Iterator[str]:
        """Google answers with the network's name alone in ``network``, with its path in ``networkConfig.network``."""
        network = text(there, "networkConfig", "network") or text(there, "network")
        same = network.endswith(self.network) if "/" in network else network == last_word(self.network)
        if not same:
            yield f"network should be {self.network!r}, is {network!r}"

    def _too_open(self, there: JsonObject) -> Iterator[str]:
        """Google answers by the field that was sent, or by the older one that means the same."""
        nodes = child(there, "networkConfig").get("defaultEnablePrivateNodes")
        if self.private and not (nodes or child(there, "privateClusterConfig").get("enablePrivateNodes")):
            yield "networkConfig.defaultEnablePrivateNodes should be True (resources.private), is not"
        if self.authorized and not (_ranges(there).get("enabled") or child(there, OLDER_RANGES).get("enabled")):
            yield f"the control plane should be reached from {', '.join(self.authorized)} alone, is open to every range"

    def amendment(self, session: Session, found: Found) -> Call | None:
        """See ``Resource``: the request that lets this run file's ranges in."""
        there = _ranges(found.body) or child(found.body, OLDER_RANGES)
        known = [text(row, "cidrBlock") for row in children(there, "cidrBlocks")]
        if not there.get("enabled") or set(self.authorized) <= set(known):
            return None
        ranges = [*known, *(cidr for cidr in self.authorized if cidr not in known)]
        update: JsonObject = {"desiredControlPlaneEndpointsConfig": _endpoints(ranges)}
        return Call(method="PUT", url=self.url, body={"update": update})


def _ranges(there: JsonObject) -> JsonObject:
    return child(there, "controlPlaneEndpointsConfig", "ipEndpointsConfig", "authorizedNetworksConfig")


def _endpoints(ranges: Sequence[str]) -> dict[str, Json]:
    """The control plane has a public address that these ranges alone reach; nodes and pods come by the inner one."""
    authorized: JsonObject = {
        "enabled": True,
        "gcpPublicCidrsAccessEnabled": False,
        "cidrBlocks": [{"cidrBlock": cidr, "displayName": "muster"} for cidr in ranges],
    }
    return {
        "ipEndpointsConfig": {
            "enabled": True,
            "enablePublicEndpoint": True,
            "authorizedNetworksConfig": authorized,
        }
    }


def _network_parts(site: Site) -> tuple[str, ...]:
    """Nodes pull images as soon as they are there: the way out comes before them."""
    network = (f"networks/{site.network}",) if site.makes_network else ()
    router = (f"routers/{site.prefix}-router",) if site.private else ()
    return (*network, f"subnetworks/{site.prefix}-sub", *router)


def _identity(site: Site) -> tuple[str, ...]:
    """The first node pulls images as soon as it is there."""
    if not site.makes_node_account:
        return ()
    return (f"serviceAccounts/{site.node_account.partition('@')[0]}", "grants/nodes", "grants/nodes-images")


def _nodes_stay(day: str) -> dict[str, Json]:
    """No node is upgraded from that day on for as long as Google's shortest limit for such exclusions allows."""
    begin = datetime.date.fromisoformat(day)
    end = begin + datetime.timedelta(days=NODES_STAY_DAYS)
    return {
        "startTime": f"{begin.isoformat()}T00:00:00Z",
        "endTime": f"{end.isoformat()}T00:00:00Z",
        "maintenanceExclusionOptions": {"scope": "NO_MINOR_OR_NODE_UPGRADES"},
    }
