"""What reaches what: in a network of one's own nothing does until a rule lets it, and outside is far."""

from __future__ import annotations

import ipaddress
from typing import Any

from fakes.compute_engine.service import FakeComputeEngine


def reaches(google: FakeComputeEngine, source: str, target: str, port: int, protocol: str = "tcp") -> bool:
    """Whether a connection from one instance to another is let in: paths of both."""
    address = google.guests[source].address
    network = _tail(google.store[target]["networkInterfaces"][0].get("network", ""))
    if network != _tail(google.store[source]["networkInterfaces"][0].get("network", "")):
        return False
    rules = [body for key, body in google.store.items() if "/firewalls/" in key and _tail(body["network"]) == network]
    return any(_admits(rule, address, port, protocol) for rule in rules)


def _admits(rule: dict[str, Any], address: str, port: int, protocol: str) -> bool:
    if rule.get("direction", "INGRESS") != "INGRESS" or rule.get("disabled"):
        return False
    ranges = [ipaddress.ip_network(one) for one in rule.get("sourceRanges", [])]
    if not any(ipaddress.ip_address(address) in one for one in ranges):
        return False
    for row in rule.get("allowed", []):
        spans = [one.partition("-") for one in row.get("ports", ["0-65535"])]
        fits = any(int(low) <= port <= int(high or low) for low, _, high in spans)
        if row["IPProtocol"] in (protocol, "all") and fits:
            return True
    return False


def outside(google: FakeComputeEngine, source: str, host: str) -> bool:
    """Whether an instance reaches that host: by an address of its own, a NAT, or Google's private way to its APIs."""
    nic = google.store[source]["networkInterfaces"][0]
    subnet = google.store.get("compute/v1/" + nic.get("subnetwork", "").rpartition("compute/v1/")[2], {})
    nats = [one for key, one in google.store.items() if "/routers/" in key and one.get("nats")]
    if nic.get("accessConfigs") or any(_tail(one["network"]) == _tail(nic["network"]) for one in nats):
        return True
    return bool(subnet.get("privateIpGoogleAccess")) and host.endswith(".googleapis.com")


def _tail(link: str) -> str:
    return link.rpartition("/")[2]
