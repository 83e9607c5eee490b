"""What of ours still exists in the project after ``down``: by label, by our mark, and by the cluster's own label."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from muster.backends.gke.provision.http import Call
from muster.backends.gke.provision.resources import LABEL, MARK, NOT_SWITCHED_ON
from muster.backends.gke.provision.session import Session, refusal
from muster.backends.gke.provision.site import Site

BILLS = {
    "clusters": "cluster fee and nodes",
    "disks": "by the GB",
    "instances": "by the second",
    "addresses": "while it is not in use",
    "buckets": "the bytes in it",
    "repositories": "the bytes of its images",
}
"""Kinds that cost money while they exist; networks, subnets, firewall rules and empty groups do not."""


@dataclass(frozen=True, kw_only=True)
class Leftover:
    """Something of ours that still exists."""

    kind: str
    name: str
    bills: str | None
    kept: bool = False


def audit(site: Site, session: Session, *, kept: set[str]) -> list[Leftover]:
    """Everything of ours that a list of the project shows; asks the services, changes nothing."""
    rows = [*_of_compute(site, session), *_of_others(site, session)]
    return [
        Leftover(kind=kind, name=name, bills=BILLS.get(kind), kept=kind == "buckets" and name in kept)
        for kind, name in sorted(set(rows))
    ]


def _of_compute(site: Site, session: Session) -> Iterator[tuple[str, str]]:
    for kind in ("networks", "firewalls"):
        for row in _pages(session, f"{site.compute}/global/{kind}", "items"):
            if row.get("description") == MARK and str(row.get("name", "")).startswith(f"{site.prefix}-"):
                yield kind, row["name"]
    for kind in ("subnetworks", "disks", "instances", "addresses", "instanceGroupManagers"):
        for place in _places(session, f"{site.compute}/aggregated/{kind}"):
            for row in place.get(kind, []):
                if _ours(row, site):
                    yield kind, row["name"]


def _of_others(site: Site, session: Session) -> Iterator[tuple[str, str]]:
    everywhere = site.container.rpartition("/")[0] + "/-"
    for row in _pages(session, f"{everywhere}/clusters", "clusters"):
        if row.get("resourceLabels", {}).get("managed-by") == LABEL["managed-by"] and row["name"] == site.cluster:
            yield "clusters", row["name"]
    for row in _pages(session, f"https://storage.googleapis.com/storage/v1/b?project={site.project}", "items"):
        if row.get("labels", {}).get("managed-by") == LABEL["managed-by"] and row["name"] in site.buckets:
            yield "buckets", row["name"]
    folder = f"https://artifactregistry.googleapis.com/v1/projects/{site.project}/locations/{site.region}"
    for row in _pages(session, f"{folder}/repositories", "repositories"):
        name = str(row["name"]).rpartition("/")[2]
        if row.get("labels", {}).get("managed-by") == LABEL["managed-by"] and name == site.prefix:
            yield "repositories", name


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
