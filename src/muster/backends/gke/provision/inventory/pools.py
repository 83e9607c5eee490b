"""The pools of nodes: a small one for supervisors, and one of GPU nodes of one kind of machine and way of buying it, or
one for each slice of TPUs.

Run files of the same machine and mode share a pool: what a later one needs beyond an earlier one is added (size), or
refused with the reason (disks, reservation); nothing that an earlier one needs is taken away.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from muster.backends.gke.manifests.placement import SEVEN_DAYS_S, Placement, longest_run_s, reservation_name
from muster.backends.gke.provision.inventory.disks import SUPERVISOR_DISK_GB, boot_disk_gb
from muster.backends.gke.provision.inventory.resource_names import Site
from muster.backends.google.http import Call
from muster.backends.google.project.resources import LABEL, Found, RestResource
from muster.backends.google.session import Session, twice
from muster.backends.machine_prices import machine_usd_per_hour
from muster.catalog import gke as catalogue
from muster.core.errors import MusterError
from muster.core.typed_json import Json, JsonObject, child, text, texts, whole

SUPERVISOR_MACHINE = "e2-standard-4"
SUPERVISOR_NODES = 8
"""At most: every run has a supervisor and one that stands by, on another node."""
SCOPES = ["https://www.googleapis.com/auth/cloud-platform"]
PATIENCE_S = 1800.0
"""A pool whose machines are not there by then has no capacity. Only pools of reservations have any from the start."""
STATIC = ("reservation", "calendar")
NO_NODE_YET = ("creating", "creatingWithoutRetries", "deleting", "abandoning")
"""What an instance group is doing for machines that are not there, or are about to go."""
RESERVATION_NAME = "cloud.google.com/reservation-name"


def cpu_pool(site: Site) -> dict[str, Json]:
    """Where supervisors run: on demand, because a preempted supervisor cannot recover anything."""
    private: dict[str, Json] = {"networkConfig": {"enablePrivateNodes": True}} if site.private else {}
    return private | {
        "name": site.placement.options.supervisor_pool,
        "initialNodeCount": 1,
        "locations": [site.zone],
        "autoscaling": {
            "enabled": True,
            "totalMinNodeCount": 1,
            "totalMaxNodeCount": SUPERVISOR_NODES,
            "locationPolicy": "BALANCED",
        },
        "management": {"autoRepair": True, "autoUpgrade": True},
        "config": {
            "machineType": SUPERVISOR_MACHINE,
            "serviceAccount": site.node_account,
            "diskType": "pd-balanced",
            "diskSizeGb": SUPERVISOR_DISK_GB,
            "oauthScopes": SCOPES,
            "resourceLabels": LABEL,
            "workloadMetadataConfig": {"mode": "GKE_METADATA"},
        },
    }


@dataclass(frozen=True, kw_only=True)
class Pool(RestResource):
    """Hosts' nodes. One that is there already is made larger where this run file needs more, and never smaller."""

    placement: Placement
    nodes: int
    compute: str
    """Address of the project's Compute Engine: a pool of a reservation has its size there alone."""

    def look(self, session: Session) -> Found:
        result = super().look(session)
        if result.state == "absent":
            return result
        return replace(result, differences=(*result.differences, *self._too_little(child(result.body, "config"))))

    def amendment(self, session: Session, found: Found) -> Call | None:
        """See ``Resource``: the request for more nodes."""
        if self.placement.mode in STATIC:
            there = self._standing(session, found)
            return self._resize(self.nodes) if there < self.nodes else None
        scaling = child(found.body, "autoscaling")
        if whole(scaling, "totalMaxNodeCount") >= self.nodes:
            return None
        body: JsonObject = {"autoscaling": {**scaling, **_autoscaling(self.placement.mode, self.nodes)}}
        return Call(method="POST", url=f"{self.url}:setAutoscaling", body=body)

    def amend(self, session: Session, call: Call) -> None:
        """See ``Resource``. Where the nodes of a reservation do not come, the pool goes back to those that it had."""
        before = self._standing(session, self.look(session)) if self.placement.mode in STATIC else None
        try:
            super().amend(session, call)
        except MusterError:
            if before is not None:
                self._follow(session, twice(lambda: session.ok(self._resize(before))))
            raise

    def in_use(self, session: Session, found: Found) -> bool:
        """See ``Resource``: a pool in error whose nodes are there may have runs on them."""
        for group in texts(found.body, "instanceGroupUrls"):
            reply = session.find(self._group(group))
            actions = child(reply.body, "currentActions") if reply else {}
            if any(whole(actions, action) for action in actions if action not in NO_NODE_YET):
                return True
        return False

    def _resize(self, nodes: int) -> Call:
        return Call(method="POST", url=f"{self.url}:setSize", body={"nodeCount": nodes})

    def _standing(self, session: Session, found: Found) -> int:
        """Nodes that its instance groups have or are making."""
        total = 0
        for group in texts(found.body, "instanceGroupUrls"):
            total += whole(session.ok(self._group(group)).body, "targetSize")
        return total

    def _group(self, address: str) -> Call:
        return Call(method="GET", url=f"{self.compute}/zones/{address.partition('/zones/')[2]}")

    def _too_little(self, config: JsonObject) -> Iterator[str]:
        """What of the pool's nodes is not enough for this run; more than enough is no difference."""
        resources = self.placement.spec.resources
        runs_s, disk = longest_run_s(self.placement.spec), boot_disk_gb(self.placement)
        there_s = text(config, "maxRunDuration").removesuffix("s")
        if there_s and float(there_s) < runs_s:
            yield f"config.maxRunDuration should be at least '{runs_s}s', is '{there_s}s'"
        kind = text(config, "diskType", default=self.placement.family.boot_disk)
        if kind != self.placement.family.boot_disk:
            yield f"config.diskType should be {self.placement.family.boot_disk!r}, is {kind!r}"
        if "diskSizeGb" in config and whole(config, "diskSizeGb") < disk:
            yield f"config.diskSizeGb should be at least {disk} for the weights, is {whole(config, 'diskSizeGb')}"
        ssds = whole(config, "ephemeralStorageLocalSsdConfig", "localSsdCount")
        if resources.local_ssd is not None and ssds != resources.local_ssd:
            yield f"config.ephemeralStorageLocalSsdConfig.localSsdCount should be {resources.local_ssd}, is {ssds}"
        if self.placement.mode in STATIC:
            named = reservation_name(resources.reservation or "")
            if (there := child(config, "labels").get(RESERVATION_NAME)) != named:
                yield f"config.labels should have {RESERVATION_NAME}={named} (runs ask for it), has {there or 'none'}"
        account = resources.node_service_account
        if account and text(config, "serviceAccount") != account:
            yield f"config.serviceAccount should be {account!r}, is {text(config, 'serviceAccount')!r}"
        if resources.image_streaming and not child(config, "gcfsConfig").get("enabled"):
            yield "config.gcfsConfig should be enabled (resources.image_streaming), is not"


def host_pools(site: Site) -> list[Pool]:
    """The pool for this run file's machine and mode; of TPUs one for each slice."""
    return [_pool(site, name) for name in site.pools]


def _pool(site: Site, name: str) -> Pool:
    placement, pools = site.placement, f"{site.container}/clusters/{site.cluster}/nodePools"
    nodes = placement.hosts_of_job if placement.slices else placement.options.nodes_in_quota or placement.hosts
    mode = placement.mode
    flex, static = mode.startswith("flex_start"), mode in STATIC
    body = _body(site, name, nodes)
    config = child(body, "config")
    compared: dict[str, Json] = {
        "machineType": placement.machine.name,
        "flexStart": flex,
        "spot": mode == "spot",
    }
    if static:
        compared["reservationAffinity"] = config["reservationAffinity"]
    subnets = tuple(
        f"subnetworks/{site.prefix}-{data.subnet}" for data in placement.machine.fabric.networks if not placement.claims
    )
    bills = f"{placement.machine.name} nodes while a run has them"
    if mode in ("spot", "on_demand") and nodes > 1:
        bills += "; they come one by one, and the first bill while the last is waited for"
    usd = machine_usd_per_hour(placement.machine.name, mode, site.region)
    return Pool(
        key=f"nodePools/{name}",
        url=f"{pools}/{name}",
        create=Call(method="POST", url=pools, body={"nodePool": body}),
        owner=("config", "resourceLabels", "managed-by"),
        compared={
            "queuedProvisioning": {"enabled": mode == catalogue.QUEUED},
            "config": compared,
            "locations": [site.zone],
        },
        needs=(f"clusters/{site.cluster}", *subnets),
        ready=("RUNNING", "RECONCILING", "RUNNING_WITH_ERROR"),
        broken=("ERROR",),
        operations=f"{site.container}/operations",
        patience_s=PATIENCE_S,
        runs_as=site.node_account,
        bills=f"{nodes} x {placement.machine.name} as long as they exist" if static else bills,
        runs_up=static,
        usd_per_hour=nodes * usd if static and usd is not None else None,
        placement=placement,
        nodes=nodes,
        compute=site.compute,
    )


def _body(site: Site, name: str, nodes: int) -> dict[str, Json]:
    placement = site.placement
    mode, static = placement.mode, placement.mode in STATIC
    body: dict[str, Json] = {
        "name": name,
        "locations": [site.zone],
        # A reservation is paid for anyway; its nodes are there, so that topology-aware placement can count them.
        "initialNodeCount": nodes if static else 0,
        # Flex-start refuses repair. Elsewhere a cluster with a release channel refuses a pool that does not repair and
        # upgrade itself ("Auto_upgrade and auto_repair cannot be false"), after the cluster has begun to bill; so that
        # no upgrade drains a node that trains, the cluster has an exclusion, and repair takes only nodes that are dead.
        "management": {"autoRepair": not mode.startswith("flex_start"), "autoUpgrade": True},
        "config": _node_config(site),
    }
    if mode == catalogue.QUEUED:
        body["queuedProvisioning"] = {"enabled": True}
    if mode == "on_demand" and placement.family.compact:
        body["placementPolicy"] = {"type": "COMPACT"}
    if placement.slices and nodes > 1:  # none where the slice is one machine (xpk core/nodepool.py, 2026-06-25)
        body["placementPolicy"] = {"type": "COMPACT", "tpuTopology": placement.topology}
    if not static:
        body["autoscaling"] = _autoscaling(mode, nodes)
    if network := _networks_of_nodes(site):
        body["networkConfig"] = network
    return body


def _autoscaling(mode: str, nodes: int) -> dict[str, Json]:
    policy = "ANY" if mode.startswith("flex_start") or mode == "spot" else "BALANCED"
    return {"enabled": True, "totalMinNodeCount": 0, "totalMaxNodeCount": nodes, "locationPolicy": policy}


def _node_config(site: Site) -> dict[str, Json]:
    placement, family = site.placement, site.placement.family
    accelerator: JsonObject = {
        "acceleratorType": family.label,
        "acceleratorCount": str(placement.machine.gpus),
        "gpuDriverInstallationConfig": {"gpuDriverVersion": family.driver},
    }
    config: dict[str, Json] = {
        "machineType": placement.machine.name,
        **({"accelerators": [accelerator]} if placement.machine.gpus else {}),
        "diskType": family.boot_disk,
        "diskSizeGb": boot_disk_gb(placement),
        "serviceAccount": site.node_account,
        "oauthScopes": SCOPES,
        "resourceLabels": LABEL,
        "gvnic": {"enabled": True},
        "workloadMetadataConfig": {"mode": "GKE_METADATA"},
    }
    if ssds := placement.local_ssds:
        # The machine brings them in any case; said aloud, images and temporary files are sure to lie there.
        config["ephemeralStorageLocalSsdConfig"] = {"localSsdCount": ssds}
    if family.fast_socket:
        config["fastSocket"] = {"enabled": True}
    if site.streams_images:
        config["gcfsConfig"] = {"enabled": True}
    return config | _bought(site)


def _bought(site: Site) -> dict[str, Json]:
    """What the way of buying changes in a node's configuration."""
    placement, mode = site.placement, site.placement.mode
    config: dict[str, Json] = {"reservationAffinity": {"consumeReservationType": "NO_RESERVATION"}}
    labels: dict[str, Json] = {}
    if mode == catalogue.QUEUED:
        labels["cloud.google.com/gke-queued"] = "true"
    if placement.claims:
        labels["cloud.google.com/gke-networking-dra-driver"] = "true"
    if mode.startswith("flex_start"):
        config["flexStart"] = True
        # Always the longest: a run's own annotation shortens it, and the next run file may need longer.
        config["maxRunDuration"] = f"{SEVEN_DAYS_S}s"
    if mode == "spot":
        config["spot"] = True
    if mode in STATIC:
        named = placement.spec.resources.reservation or ""
        labels[RESERVATION_NAME] = reservation_name(named)
        config["reservationAffinity"] = {
            "consumeReservationType": "SPECIFIC_RESERVATION",
            "key": "compute.googleapis.com/reservation-name",
            "values": [full_reservation(named, site.project)],
        }
    return config | ({"labels": labels} if labels else {})


def full_reservation(named: str, project: str) -> str:
    """As a node pool's affinity takes it: a plain name as it is, a block by its whole path (as the Toolkit does)."""
    return named if "/" not in named or named.startswith("projects/") else f"projects/{project}/reservations/{named}"


def _networks_of_nodes(site: Site) -> dict[str, Json]:
    result: dict[str, Json] = {"enablePrivateNodes": True} if site.private else {}
    if site.placement.claims:
        return {**result, "acceleratorNetworkProfile": "auto"}
    rows = [
        {"network": f"{site.prefix}-{data.vpc}", "subnetwork": f"{site.prefix}-{data.subnet}"}
        for data in site.placement.machine.fabric.networks
    ]
    return {**result, "additionalNodeNetworkConfigs": rows} if rows else result
