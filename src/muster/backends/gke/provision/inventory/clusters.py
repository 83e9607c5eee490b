"""The cluster, with its small CPU pool, and the pool of GPU nodes."""

from __future__ import annotations

import datetime

from muster.backends.gke.google.http import Call
from muster.backends.gke.manifests.placement import longest_run_s
from muster.backends.gke.provision.inventory.prices import cluster_usd_per_hour, machine_usd_per_hour
from muster.backends.gke.provision.inventory.resource_names import Site
from muster.backends.gke.provision.inventory.resources import LABEL, RestResource
from muster.catalog import gke as catalogue
from muster.core.typed_json import Json, JsonObject

SUPERVISOR_MACHINE = "e2-standard-4"
SCOPES = ["https://www.googleapis.com/auth/cloud-platform"]
NODES_STAY_DAYS = 90
"""Half of the 180 days that such an exclusion could last when they were introduced; today's limit is later."""
PATIENCE_S = 1800.0
"""A pool whose machines are not there by then has no capacity. Only pools of reservations have any from the start."""
BROKEN = ("ERROR", "DEGRADED")


def clusters(site: Site) -> list[RestResource]:
    """The cluster and, where the run wants GPUs, their pool."""
    return [_cluster(site), _pool(site)] if site.placement.machine.gpus else [_cluster(site)]


def _cluster(site: Site) -> RestResource:
    name = site.cluster
    body: dict[str, Json] = {
        "name": name,
        "description": "made by muster",
        "resourceLabels": LABEL,
        "network": f"projects/{site.project}/global/networks/{site.prefix}-net",
        "subnetwork": f"projects/{site.project}/regions/{site.region}/subnetworks/{site.prefix}-sub",
        "ipAllocationPolicy": {"useIpAliases": True},
        "networkConfig": {"datapathProvider": "ADVANCED_DATAPATH", "enableMultiNetworking": True},
        "addonsConfig": {"gcsFuseCsiDriverConfig": {"enabled": True}},
        "workloadIdentityConfig": {"workloadPool": f"{site.project}.svc.id.goog"},
        "releaseChannel": {"channel": "REGULAR"},
        "nodePools": [_cpu_pool(site)],
    }
    if site.day:
        body["maintenancePolicy"] = {"window": {"maintenanceExclusions": {"muster-nodes-stay": _nodes_stay(site.day)}}}
    compared = {key: body[key] for key in ("networkConfig", "workloadIdentityConfig", "network")}
    return RestResource(
        key=f"clusters/{name}",
        url=f"{site.container}/clusters/{name}",
        create=Call(method="POST", url=f"{site.container}/clusters", body={"cluster": body}),
        owner=("resourceLabels", "managed-by"),
        compared=compared,
        needs=("services", f"networks/{site.prefix}-net", f"subnetworks/{site.prefix}-sub"),
        ready=("RUNNING", "RECONCILING"),
        broken=BROKEN,
        operations=f"{site.container}/operations",
        bills=f"a cluster and one {SUPERVISOR_MACHINE}",
        runs_up=True,
        usd_per_hour=cluster_usd_per_hour(SUPERVISOR_MACHINE, site.region),
    )


def _nodes_stay(day: str) -> dict[str, Json]:
    """No node is upgraded from that day on for as long as Google's shortest limit for such exclusions allows."""
    begin = datetime.date.fromisoformat(day)
    end = begin + datetime.timedelta(days=NODES_STAY_DAYS)
    return {
        "startTime": f"{begin.isoformat()}T00:00:00Z",
        "endTime": f"{end.isoformat()}T00:00:00Z",
        "maintenanceExclusionOptions": {"scope": "NO_MINOR_OR_NODE_UPGRADES"},
    }


def _cpu_pool(site: Site) -> dict[str, Json]:
    """Where supervisors run: on demand, because a preempted supervisor cannot recover anything."""
    return {
        "name": site.placement.options.supervisor_pool,
        "initialNodeCount": 1,
        "locations": [site.zone],
        "autoscaling": {"enabled": True, "totalMinNodeCount": 1, "totalMaxNodeCount": 4, "locationPolicy": "BALANCED"},
        "management": {"autoRepair": True, "autoUpgrade": True},
        "config": {
            "machineType": SUPERVISOR_MACHINE,
            "diskType": "pd-balanced",
            "diskSizeGb": 50,
            "oauthScopes": SCOPES,
            "resourceLabels": LABEL,
            "workloadMetadataConfig": {"mode": "GKE_METADATA"},
        },
    }


def _pool(site: Site) -> RestResource:
    placement, pools = site.placement, f"{site.container}/clusters/{site.cluster}/nodePools"
    mode = placement.mode
    flex, queued = mode.startswith("flex_start"), mode == catalogue.QUEUED
    nodes = placement.options.nodes_in_quota or placement.hosts
    static = mode in ("reservation", "calendar")
    body: dict[str, Json] = {
        "name": site.pool,
        "locations": [site.zone],
        # A reservation is paid for anyway; its nodes are there, so that topology-aware placement can count them.
        "initialNodeCount": nodes if static else 0,
        # Flex-start refuses repair. Elsewhere a cluster with a release channel refuses a pool that does not repair and
        # upgrade itself ("Auto_upgrade and auto_repair cannot be false"), after the cluster has begun to bill; so that
        # no upgrade drains a node that trains, the cluster has an exclusion, and repair takes only nodes that are dead.
        "management": {"autoRepair": not flex, "autoUpgrade": True},
        "config": _node_config(site, flex=flex),
    }
    if queued:
        body["queuedProvisioning"] = {"enabled": True}
    if not static:
        policy = "ANY" if flex or mode == "spot" else "BALANCED"
        body["autoscaling"] = {
            "enabled": True,
            "totalMinNodeCount": 0,
            "totalMaxNodeCount": nodes,
            "locationPolicy": policy,
        }
    network = _networks_of_nodes(site)
    if network:
        body["networkConfig"] = network
    compared: JsonObject = {
        "queuedProvisioning": {"enabled": queued},
        "config": {"machineType": placement.machine.name, "flexStart": flex, "spot": mode == "spot"},
        "locations": [site.zone],
    }
    subnets = tuple(
        f"subnetworks/{site.prefix}-{data.subnet}" for data in placement.machine.fabric.networks if not placement.claims
    )
    return RestResource(
        key=f"nodePools/{site.pool}",
        url=f"{pools}/{site.pool}",
        create=Call(method="POST", url=pools, body={"nodePool": body}),
        owner=("config", "resourceLabels", "managed-by"),
        compared=compared,
        needs=(f"clusters/{site.cluster}", *subnets),
        ready=("RUNNING", "RECONCILING"),
        broken=("ERROR", "RUNNING_WITH_ERROR"),
        operations=f"{site.container}/operations",
        patience_s=PATIENCE_S,
        bills=f"{nodes} x {placement.machine.name} as long as they exist"
        if static
        else f"{placement.machine.name} nodes while a run has them",
        runs_up=static,
        usd_per_hour=nodes * usd if static and (usd := _usd_per_node_hour(site)) is not None else None,
    )


def _usd_per_node_hour(site: Site) -> float | None:
    return machine_usd_per_hour(site.placement.machine.name, site.placement.mode, site.region)


def _node_config(site: Site, *, flex: bool) -> dict[str, Json]:
    placement = site.placement
    mode, family = placement.mode, placement.family
    accelerator: JsonObject = {
        "acceleratorType": family.label,
        "acceleratorCount": str(placement.machine.gpus),
        "gpuDriverInstallationConfig": {"gpuDriverVersion": family.driver},
    }
    config: dict[str, Json] = {
        "machineType": placement.machine.name,
        "accelerators": [accelerator],
        "diskType": family.boot_disk,
        "diskSizeGb": 200,
        "oauthScopes": SCOPES,
        "resourceLabels": LABEL,
        "gvnic": {"enabled": True},
        "workloadMetadataConfig": {"mode": "GKE_METADATA"},
        "reservationAffinity": {"consumeReservationType": "NO_RESERVATION"},
    }
    labels = {}
    if mode == catalogue.QUEUED:
        labels["cloud.google.com/gke-queued"] = "true"
    if placement.claims:
        labels["cloud.google.com/gke-networking-dra-driver"] = "true"
    if labels:
        config["labels"] = labels
    if flex:
        config["flexStart"] = True
        config["maxRunDuration"] = f"{longest_run_s(placement.spec)}s"
    if mode == "spot":
        config["spot"] = True
    if mode in ("reservation", "calendar"):
        config["reservationAffinity"] = {
            "consumeReservationType": "SPECIFIC_RESERVATION",
            "key": "compute.googleapis.com/reservation-name",
            "values": [placement.spec.resources.reservation],
        }
    return config


def _networks_of_nodes(site: Site) -> dict[str, Json]:
    if site.placement.claims:
        return {"acceleratorNetworkProfile": "auto"}
    rows = [
        {"network": f"{site.prefix}-{data.vpc}", "subnetwork": f"{site.prefix}-{data.subnet}"}
        for data in site.placement.machine.fabric.networks
    ]
    return {"additionalNodeNetworkConfigs": rows} if rows else {}
