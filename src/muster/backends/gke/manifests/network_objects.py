"""GKE's multi-network objects: one Network and one GKENetworkParamSet for each data NIC."""

from __future__ import annotations

from muster.backends.gke.manifests.placement import Placement
from muster.catalog.gke import DataNetwork
from muster.core.typed_json import Json, JsonObject

Manifest = dict[str, Json]

API = "networking.gke.io/v1"


def network_objects(placement: Placement) -> list[Manifest]:
    """Empty where the family has no data network, or gets it by resource claims."""
    if placement.claims or not placement.machine.gpus:
        return []
    prefix = placement.options.network_prefix
    return [
        manifest
        for network in placement.machine.fabric.networks
        for manifest in (_parameters(network, prefix), _network(network))
    ]


def _parameters(network: DataNetwork, prefix: str) -> Manifest:
    spec = {"vpc": f"{prefix}-{network.vpc}", "vpcSubnet": f"{prefix}-{network.subnet}", "deviceMode": network.mode}
    return {"apiVersion": API, "kind": "GKENetworkParamSet", "metadata": {"name": network.name}, "spec": spec}


def _network(network: DataNetwork) -> Manifest:
    reference = {"group": "networking.gke.io", "kind": "GKENetworkParamSet", "name": network.name}
    spec: JsonObject = {"type": "Device", "parametersRef": reference}
    return {"apiVersion": API, "kind": "Network", "metadata": {"name": network.name}, "spec": spec}
