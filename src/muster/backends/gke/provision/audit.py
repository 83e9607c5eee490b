"""What of ours still exists in the project after ``down``: by label, by our mark, and by the cluster's own label."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from muster.backends.cluster import Leftover
from muster.backends.gke.google.http import Call
from muster.backends.gke.google.session import Session, refusal
from muster.backends.gke.provision.prices import machine_usd_per_hour
from muster.backends.gke.provision.resource_names import Site
from muster.backends.gke.provision.resources import LABEL, MARK, NOT_SWITCHED_ON
from muster.catalog import gke as catalogue

BILLING = ("clusters", "disks", "instances", "addresses", "buckets", "repositories")
"""Kinds that cost money while they exist; networks, subnets, firewall rules and empty groups do not."""
DAYS_A_MONTH = 730 / 24


def audit(site: Site, session: Session, *, kept: set[str]) -> list[Leftover]:
    """Everything of ours that a list of the project shows; asks the services, changes nothing."""
    rows = {(kind, str(row["name"]).rpartition("/")[2]): row for kind, row in _rows(site, session)}
    return [
        Leftover(
            kind=kind,
            name=name,
            bills=_billed_for(kind, rows[kind, name]),
            kept=kind == "buckets" and name in kept,
            usd_per_day=_usd_per_day(kind, rows[kind, name]),
        )
        for kind, name in sorted(rows)
    ]


def _rows(site: Site, session: Session) -> Iterator[tuple[str, Mapping[str, Any]]]:
    yield from _of_compute(site, session)
    yield from _of_others(site, session)


def _billed_for(kind: str, row: Mapping[str, Any]) -> str | None:
    if kind not in BILLING:
        return None
    if kind == "disks":
        return f"{row.get('sizeGb', '?')} GB of {_last(row.get('type', 'disk'))}"
    if kind == "instances":
        return f"a {_last(row.get('machineType', 'machine'))} ({row.get('status', 'in an unknown state')})"
    return str(catalogue.leftovers()[kind]["how"])


def _usd_per_day(kind: str, row: Mapping[str, Any]) -> float | None:
    if kind not in BILLING:
        return None
    prices = catalogue.leftovers()[kind]
    if kind == "disks":
        price = prices["usd_per_gb_month"].get(_last(row.get("type", "")))
        return price * int(row["sizeGb"]) / DAYS_A_MONTH if price and "sizeGb" in row else None
    if kind == "instances":
        return _machine_usd_per_day(row)
    usd: float | None = prices.get("usd_per_day")
    return usd


def _machine_usd_per_day(row: Mapping[str, Any]) -> float | None:
    model = row.get("scheduling", {}).get("provisioningModel", "STANDARD")
    mode = {"SPOT": "spot", "FLEX_START": "flex_start", "RESERVATION_BOUND": "reservation"}.get(model, "on_demand")
    region = _last(row.get("zone", "")).rpartition("-")[0]
    usd = machine_usd_per_hour(_last(row.get("machineType", "")), mode, region)
    return None if usd is None else 24 * usd


def _last(address: object) -> str:
    return str(address).rpartition("/")[2]


def _of_compute(site: Site, session: Session) -> Iterator[tuple[str, Mapping[str, Any]]]:
    for kind in ("networks", "firewalls"):
        for row in _pages(session, f"{site.compute}/global/{kind}", "items"):
            if row.get("description") == MARK and str(row.get("name", "")).startswith(f"{site.prefix}-"):
                yield kind, row
    for kind in ("subnetworks", "disks", "instances", "addresses", "instanceGroupManagers"):
        for place in _places(session, f"{site.compute}/aggregated/{kind}"):
            for row in place.get(kind, []):
                if _ours(row, site):
                    yield kind, row


def _of_others(site: Site, session: Session) -> Iterator[tuple[str, Mapping[str, Any]]]:
    everywhere = site.container.rpartition("/")[0] + "/-"
    for row in _pages(session, f"{everywhere}/clusters", "clusters"):
        if row.get("resourceLabels", {}).get("managed-by") == LABEL["managed-by"] and row["name"] == site.cluster:
            yield "clusters", row
    for row in _pages(session, f"https://storage.googleapis.com/storage/v1/b?project={site.project}", "items"):
        if row.get("labels", {}).get("managed-by") == LABEL["managed-by"] and row["name"] in site.buckets:
            yield "buckets", row
    folder = f"https://artifactregistry.googleapis.com/v1/projects/{site.project}/locations/{site.region}"
    for row in _pages(session, f"{folder}/repositories", "repositories"):
        name = str(row["name"]).rpartition("/")[2]
        if row.get("labels", {}).get("managed-by") == LABEL["managed-by"] and name == site.prefix:
            yield "repositories", row


def _ours(row: Mapping[str, Any], site: Site) -> bool:
    """Our mark, our cluster's label (disks and addresses that GKE made), or GKE's naming of nodes."""
    labels = row.get("labels", {})
    name = str(row.get("name", ""))
    return (
        (row.get("description") == MARK and name.startswith(f"{site.prefix}-"))
        or labels.get("goog-k8s-cluster-name") == site.cluster
        or name.startswith(f"gke-{site.cluster}-")
    )


def _pages(session: Session, url: str, field: str) -> Iterator[Mapping[str, Any]]:
    token = ""
    while True:
        joint = "&" if "?" in url else "?"
        call = Call(method="GET", url=f"{url}{joint}pageToken={token}" if token else url)
        reply = session.send(call)
        if reply.status == 404 or NOT_SWITCHED_ON & reply.reasons:
            return
        if reply.status >= 300:
            raise refusal(call, reply)
        yield from reply.body.get(field, [])
        token = str(reply.body.get("nextPageToken", ""))
        if not token:
            return


def _places(session: Session, url: str) -> Iterator[Mapping[str, Any]]:
    """An aggregated list is a mapping of places."""
    token = ""
    while True:
        call = Call(method="GET", url=f"{url}?pageToken={token}" if token else url)
        reply = session.send(call)
        if reply.status == 404 or NOT_SWITCHED_ON & reply.reasons:
            return
        if reply.status >= 300:
            raise refusal(call, reply)
        yield from reply.body.get("items", {}).values()
        token = str(reply.body.get("nextPageToken", ""))
        if not token:
            return
