"""VPCs: the cluster's own, and those of the data NICs. RoCE networks are tied to one zone by their profile."""

from __future__ import annotations

from muster.backends.gke.google.http import Call
from muster.backends.gke.provision.resource_names import Site
from muster.backends.gke.provision.resources import MARK, RestResource
from muster.core.typed_json import Json, JsonObject

MAIN_RANGE = "10.64.0.0/20"
DATA_RANGE = "192.168.0.0/16"
"""All data subnets lie in it; the firewall rule of the plain data networks lets it through."""


def networks(site: Site) -> list[RestResource]:
    """Networks, subnets and firewall rules, each after what it needs."""
    result = [_network(site, "net"), _subnet(site, "net", "sub", MAIN_RANGE)]
    if site.placement.claims or not site.placement.machine.gpus:
        return result
    fabric = site.placement.machine.fabric
    seen: set[str] = set()
    for number, data in enumerate(fabric.networks):
        roce = data.mode == "RDMA"
        if data.vpc not in seen:
            seen.add(data.vpc)
            result.append(_network(site, data.vpc, roce=roce))
            if not roce:
                result.append(_firewall(site, data.vpc))
        result.append(_subnet(site, data.vpc, data.subnet, f"192.168.{number + 1}.0/24"))
    return result


def network_profile(site: Site) -> str | None:
    """Address of the zone's RoCE profile; None where the family needs none."""
    profile = site.placement.family.network_profile
    needed = profile and site.placement.machine.fabric.networks and not site.placement.claims
    return f"{site.compute}/global/networkProfiles/{site.zone}-{profile}" if needed else None


def _network(site: Site, suffix: str, *, roce: bool = False) -> RestResource:
    name = f"{site.prefix}-{suffix}"
    body: dict[str, Json] = {
        "name": name,
        "description": MARK,
        "autoCreateSubnetworks": False,
        "routingConfig": {"routingMode": "REGIONAL"},
    }
    mtu = site.placement.machine.fabric.mtu
    if roce:
        # The profile brings MTU 8896 and its own implied rules: a firewall rule would be refused.
        body["networkProfile"] = network_profile(site)
    elif mtu and suffix != "net":
        body["mtu"] = mtu
    matters = ("autoCreateSubnetworks", "mtu", "networkProfile")
    compared = {key: value for key, value in body.items() if key in matters}
    return _compute(site, "networks", name, "global/networks", body, compared)


def _subnet(site: Site, vpc: str, suffix: str, cidr: str) -> RestResource:
    name, network = f"{site.prefix}-{suffix}", f"{site.prefix}-{vpc}"
    body: dict[str, Json] = {
        "name": name,
        "description": MARK,
        "network": f"{site.compute}/global/networks/{network}",
        "ipCidrRange": cidr,
    }
    if suffix == "sub":
        body["privateIpGoogleAccess"] = True
    compared: JsonObject = {"network": body["network"], "ipCidrRange": cidr}
    folder = f"regions/{site.region}/subnetworks"
    return _compute(site, "subnetworks", name, folder, body, compared, needs=(f"networks/{network}",))


def _firewall(site: Site, vpc: str) -> RestResource:
    network = f"{site.prefix}-{vpc}"
    name = f"{network}-internal"
    protocols: list[JsonObject] = [
        {"IPProtocol": "tcp", "ports": ["0-65535"]},
        {"IPProtocol": "udp", "ports": ["0-65535"]},
    ]
    body: JsonObject = {
        "name": name,
        "description": MARK,
        "network": f"{site.compute}/global/networks/{network}",
        "direction": "INGRESS",
        "sourceRanges": [DATA_RANGE],
        "allowed": [*protocols, {"IPProtocol": "icmp"}],
    }
    compared = {"network": body["network"], "sourceRanges": [DATA_RANGE]}
    return _compute(site, "firewalls", name, "global/firewalls", body, compared, needs=(f"networks/{network}",))


def _compute(
    site: Site,
    kind: str,
    name: str,
    folder: str,
    body: JsonObject,
    compared: JsonObject,
    needs: tuple[str, ...] = (),
) -> RestResource:
    url = f"{site.compute}/{folder}"
    return RestResource(
        key=f"{kind}/{name}",
        url=f"{url}/{name}",
        create=Call(method="POST", url=url, body=body),
        owner=("description",),
        compared=compared,
        needs=("services", *needs),
    )
