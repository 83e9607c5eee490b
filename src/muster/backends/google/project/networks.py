"""VPCs: what hosts are reached by, and those of data NICs. RoCE networks are tied to a zone by their profile."""

from __future__ import annotations

import ipaddress
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Protocol

from muster.backends.google.http import Call
from muster.backends.google.project.resources import MARK, Found, RestResource, last_word
from muster.backends.google.session import Session
from muster.catalog.gke import DataNetwork, Family, Machine
from muster.core.typed_json import Json, JsonObject, children, text

MAIN_RANGE = "10.64.0.0/20"
MAIN_RANGES = "10.64.0.0/12"
"""All main subnets lie in it: one in each region that has machines."""
DATA_RANGE = "192.168.0.0/16"
"""All data subnets lie in it; the firewall rule of the plain data networks lets it through."""
EVERY_SUBNET = "ALL_SUBNETWORKS_ALL_"
"""Of all ranges, or of primary ones: pods go out by their node's address."""
DATA_PREFIX = 20
"""Of each data subnet: 4,092 nodes, and sixteen subnets in the range; the widest fabric (gIB) has nine."""


class Site(Protocol):
    """Where networks are made, and for which machines."""

    @property
    def project(self) -> str: ...
    @property
    def zone(self) -> str: ...
    @property
    def region(self) -> str: ...
    @property
    def prefix(self) -> str:
        """Of the names of everything that a project has once."""
        ...

    @property
    def network(self) -> str:
        """Name of the VPC that hosts are reached by."""
        ...

    @property
    def makes_network(self) -> bool:
        """That VPC is ours."""
        ...

    @property
    def main_range(self) -> str:
        """Of a subnet of that VPC that is made: inside ``MAIN_RANGES``."""
        ...

    @property
    def private(self) -> bool:
        """Hosts have no public addresses."""
        ...

    @property
    def family(self) -> Family: ...
    @property
    def machine(self) -> Machine: ...
    @property
    def data_networks(self) -> Sequence[DataNetwork]:
        """One for each data NIC of a host that is attached by name."""
        ...

    @property
    def compute(self) -> str:
        """Address of the project's Compute Engine."""
        ...


def networks(site: Site) -> list[RestResource]:
    """Networks, subnets and firewall rules, each after what it needs."""
    result = [_network(site, "net")] if site.makes_network else []
    result.append(_main_subnet(site))
    if site.private:
        result.append(_router(site))
    seen: set[str] = set()
    for number, data in enumerate(site.data_networks):
        roce = data.mode == "RDMA"
        if data.vpc not in seen:
            seen.add(data.vpc)
            result.append(_network(site, data.vpc, roce=roce))
            if not roce:
                result.append(_firewall(site, data.vpc, DATA_RANGE))
        result.append(_data_subnet(site, data.vpc, data.subnet, number))
    return result


def network_profile(site: Site) -> str | None:
    """Address of the zone's RoCE profile; None where the family needs none."""
    profile = site.family.network_profile
    needed = profile and site.data_networks
    return f"{site.compute}/global/networkProfiles/{site.zone}-{profile}" if needed else None


def _network(site: Site, suffix: str, *, roce: bool = False) -> RestResource:
    name = f"{site.prefix}-{suffix}"
    body: dict[str, Json] = {
        "name": name,
        "description": MARK,
        "autoCreateSubnetworks": False,
        "routingConfig": {"routingMode": "REGIONAL"},
    }
    mtu = site.machine.fabric.mtu
    if roce:
        # The profile brings MTU 8896 and its own implied rules: a firewall rule would be refused.
        body["networkProfile"] = network_profile(site)
    elif mtu and suffix != "net":
        body["mtu"] = mtu
    matters = ("autoCreateSubnetworks", "mtu", "networkProfile")
    compared = {key: value for key, value in body.items() if key in matters}
    return _compute(site, "networks", body, compared)


@dataclass(frozen=True, kw_only=True)
class Subnet(RestResource):
    """Any range inside ``within`` will do: a data NIC's may be a /24 of an earlier version."""

    within: str

    def look(self, session: Session) -> Found:
        result = super().look(session)
        if result.state == "absent" or _inside(text(result.body, "ipCidrRange"), self.within):
            return result
        wrong = f"ipCidrRange should be inside {self.within}, is {text(result.body, 'ipCidrRange')!r}"
        return replace(result, differences=(*result.differences, wrong))


def _inside(cidr: str, whole: str) -> bool:
    try:
        return ipaddress.IPv4Network(cidr).subnet_of(ipaddress.IPv4Network(whole))
    except ValueError:
        return False


def _data_subnet(site: Site, vpc: str, suffix: str, number: int) -> RestResource:
    cidr = list(ipaddress.IPv4Network(DATA_RANGE).subnets(new_prefix=DATA_PREFIX))[number]
    body = _subnet_body(site, vpc, suffix, str(cidr))
    return _subnet(site, body, DATA_RANGE, (f"{site.prefix}-{vpc}",))


def _main_subnet(site: Site) -> RestResource:
    """In its own VPC or in the run file's, where Google refuses the range if it is taken."""
    body = {**_subnet_body(site, "net", "sub", site.main_range), "privateIpGoogleAccess": True}
    body["network"] = f"{site.compute}/global/networks/{site.network}"
    return _subnet(site, body, MAIN_RANGES, _main_network(site))


def main_rule(site: Site) -> RestResource:
    """Lets hosts in that VPC reach each other: one of one's own lets nothing in. (GKE makes rules for its nodes.)"""
    return _firewall(site, "net", MAIN_RANGES)


def _main_network(site: Site) -> tuple[str, ...]:
    return (site.network,) if site.makes_network else ()


@dataclass(frozen=True, kw_only=True)
class Router(RestResource):
    """The way out. In a network that is there another one may already lead out of every subnet: Google refuses a
    second one for the same subnet, and none is needed."""

    routers: Call | None = None
    """Lists the region's routers; None: the network is ours."""
    network: str

    def look(self, session: Session) -> Found:
        result = super().look(session)
        if result.state != "absent" or self.routers is None or (reply := session.find(self.routers)) is None:
            return result
        for row in children(reply.body, "items"):
            ways = [text(nat, "sourceSubnetworkIpRangesToNat") for nat in children(row, "nats")]
            if last_word(text(row, "network")) == self.network and any(way.startswith(EVERY_SUBNET) for way in ways):
                return Found(state="there", body=row, ours=False)
        return result


def _router(site: Site) -> Router:
    """Cloud NAT: the way out of nodes without public addresses, to model hubs and registries other than Google's.

    Ports are given as they are needed: a machine that downloads weights has hundreds of connections to one address, and
    the fixed number is 64.
    """
    nat: JsonObject = {
        "name": f"{site.prefix}-nat",
        "natIpAllocateOption": "AUTO_ONLY",
        "sourceSubnetworkIpRangesToNat": "ALL_SUBNETWORKS_ALL_IP_RANGES",
        "enableDynamicPortAllocation": True,
        "enableEndpointIndependentMapping": False,
        "minPortsPerVm": 64,
        "maxPortsPerVm": 8192,
    }
    if not site.makes_network:
        # The others of that network have their own way out, or none on purpose.
        subnet = f"{site.compute}/regions/{site.region}/subnetworks/{site.prefix}-sub"
        nat = {
            **nat,
            "sourceSubnetworkIpRangesToNat": "LIST_OF_SUBNETWORKS",
            "subnetworks": [{"name": subnet, "sourceIpRangesToNat": ["ALL_IP_RANGES"]}],
        }
    body: JsonObject = {
        "name": f"{site.prefix}-router",
        "description": MARK,
        "network": f"{site.compute}/global/networks/{site.network}",
        "nats": [nat],
    }
    url = f"{site.compute}/regions/{site.region}/routers"
    return Router(
        key=f"routers/{site.prefix}-router",
        url=f"{url}/{site.prefix}-router",
        create=Call(method="POST", url=url, body=body),
        owner=("description",),
        compared={"network": body["network"]},
        needs=("services", *(f"networks/{one}" for one in _main_network(site)), f"subnetworks/{site.prefix}-sub"),
        foreign="refuse" if site.makes_network else "use",
        bills="a NAT gateway, by the hour and VM, and the bytes through it",
        routers=None if site.makes_network else Call(method="GET", url=url),
        network=site.network,
    )


def _subnet_body(site: Site, vpc: str, suffix: str, cidr: str) -> dict[str, Json]:
    return {
        "name": f"{site.prefix}-{suffix}",
        "description": MARK,
        "network": f"{site.compute}/global/networks/{site.prefix}-{vpc}",
        "ipCidrRange": cidr,
    }


def _firewall(site: Site, vpc: str, source: str) -> RestResource:
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
        "sourceRanges": [source],
        "allowed": [*protocols, {"IPProtocol": "icmp"}],
    }
    compared = {"network": body["network"], "sourceRanges": [source]}
    return _compute(site, "firewalls", body, compared, (network,))


def _subnet(site: Site, body: dict[str, Json], within: str, networks: tuple[str, ...]) -> RestResource:
    plain = _compute(site, "subnetworks", body, {"network": body["network"]}, networks)
    return Subnet(**{one.name: getattr(plain, one.name) for one in fields(plain)}, within=within)


def _compute(
    site: Site,
    kind: str,
    body: JsonObject,
    compared: JsonObject,
    networks: tuple[str, ...] = (),
) -> RestResource:
    name = text(body, "name")
    url = f"{site.compute}/{'global' if kind in ('networks', 'firewalls') else f'regions/{site.region}'}/{kind}"
    return RestResource(
        key=f"{kind}/{name}",
        url=f"{url}/{name}",
        create=Call(method="POST", url=url, body=body),
        owner=("description",),
        compared=compared,
        needs=("services", *(f"networks/{network}" for network in networks)),
    )
