"""What of ours still exists in the project after ``down``: by label, by our mark, and by the cluster's own label."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from muster.backends.cluster import Leftover
from muster.backends.gke.provision.inventory.resource_names import Site
from muster.backends.google.http import Call
from muster.backends.google.project.policies import of_project
from muster.backends.google.project.resources import LABEL, MARK, last_word
from muster.backends.google.session import Session, twice
from muster.backends.machine_prices import machine_usd_per_hour
from muster.catalog import gke as catalogue
from muster.core.typed_json import JsonObject, child, children, text, texts, whole

BILLING = ("clusters", "disks", "instances", "addresses", "routers", "buckets", "repositories")
"""Kinds that cost money while they exist; networks, subnets, firewall rules and empty groups do not."""
DAYS_A_MONTH = 730 / 24


def audit(site: Site, session: Session, *, kept: set[str]) -> list[Leftover]:
    """Everything of ours that a list of the project shows; asks the services, changes nothing. ``kept``: keys of what
    stays on purpose."""
    listed = itertools.chain(_of_compute(site, session), _of_others(site, session), _of_identities(site, session))
    rows = {(kind, last_word(row["name"])): row for kind, row in listed}
    return [
        Leftover(
            kind=kind,
            name=name,
            bills=_billed_for(kind, rows[kind, name]),
            kept=f"{kind}/{name}" in kept,
            usd_per_day=_usd_per_day(kind, rows[kind, name]),
        )
        for kind, name in sorted(rows)
    ]


def _billed_for(kind: str, row: JsonObject) -> str | None:
    if kind not in BILLING:
        return None
    if kind == "disks":
        return f"{row.get('sizeGb', '?')} GB of {last_word(row.get('type', 'disk'))}"
    if kind == "instances":
        return f"a {last_word(row.get('machineType', 'machine'))} ({row.get('status', 'in an unknown state')})"
    return catalogue.leftovers()[kind].how


def _usd_per_day(kind: str, row: JsonObject) -> float | None:
    if kind not in BILLING:
        return None
    prices = catalogue.leftovers()[kind]
    if kind == "disks":
        price = prices.usd_per_gb_month.get(last_word(row.get("type", "")))
        return price * whole(row, "sizeGb") / DAYS_A_MONTH if price and "sizeGb" in row else None
    if kind == "instances":
        return _machine_usd_per_day(row)
    return prices.usd_per_day


def _machine_usd_per_day(row: JsonObject) -> float | None:
    model = text(row, "scheduling", "provisioningModel")
    mode = {"SPOT": "spot", "FLEX_START": "flex_start", "RESERVATION_BOUND": "reservation"}.get(model, "on_demand")
    region = last_word(row.get("zone", "")).rpartition("-")[0]
    usd = machine_usd_per_hour(last_word(row.get("machineType", "")), mode, region)
    return None if usd is None else 24 * usd


def _of_compute(site: Site, session: Session) -> Iterator[tuple[str, JsonObject]]:
    for kind in ("networks", "firewalls"):
        for row in _pages(session, f"{site.compute}/global/{kind}", "items"):
            if row.get("description") == MARK and str(row.get("name", "")).startswith(f"{site.prefix}-"):
                yield kind, row
    for kind in ("subnetworks", "routers", "disks", "instances", "addresses", "instanceGroupManagers"):
        for place in _pages(session, f"{site.compute}/aggregated/{kind}", "items"):
            yield from ((kind, row) for row in children(place, kind) if _ours(row, site))


def _of_others(site: Site, session: Session) -> Iterator[tuple[str, JsonObject]]:
    everywhere = site.container.rpartition("/")[0] + "/-"
    for row in _pages(session, f"{everywhere}/clusters", "clusters"):
        if text(row, "resourceLabels", "managed-by") == LABEL["managed-by"] and text(row, "name") == site.cluster:
            yield "clusters", row
    for row in _pages(session, f"https://storage.googleapis.com/storage/v1/b?project={site.project}", "items"):
        if text(row, "labels", "managed-by") == LABEL["managed-by"] and text(row, "name") in site.buckets:
            yield "buckets", row
    folder = f"https://artifactregistry.googleapis.com/v1/projects/{site.project}/locations/{site.region}"
    for row in _pages(session, f"{folder}/repositories", "repositories"):
        if text(row, "labels", "managed-by") == LABEL["managed-by"] and last_word(text(row, "name")) == site.prefix:
            yield "repositories", row


def _of_identities(site: Site, session: Session) -> Iterator[tuple[str, JsonObject]]:
    """Our accounts, and roles on the project that one of ours has or had. Roles of an account that somebody else made
    are theirs; a policy that may not be read is not looked at."""
    made = {"nodes": site.node_account, "build": site.build_account}
    url = f"https://iam.googleapis.com/v1/projects/{site.project}/serviceAccounts"
    there = {text(row, "email"): row.get("description") for row in _pages(session, url, "accounts")}
    reply = twice(lambda: session.send(of_project(site.project).read))
    rows = children(reply.body, "bindings") if reply.status < 300 else []
    for use, email in made.items():
        if there.get(email) == MARK:
            yield "serviceAccounts", {"name": email.partition("@")[0]}
        if there.get(email, MARK) == MARK and any(email in one for row in rows for one in texts(row, "members")):
            yield "grants", {"name": use}


def _ours(row: JsonObject, site: Site) -> bool:
    """Our mark, our cluster's label (disks and addresses that GKE made), or GKE's naming of nodes."""
    labels = row.get("labels", {})
    name = str(row.get("name", ""))
    return (
        (row.get("description") == MARK and name.startswith(f"{site.prefix}-"))
        or text(labels, "goog-k8s-cluster-name") == site.cluster
        or name.startswith(f"gke-{site.cluster}-")
    )


def _pages(session: Session, url: str, field: str) -> Iterator[JsonObject]:
    """Rows of a list; of an aggregated one, which is a mapping, its places."""
    token, joint = "", "&" if "?" in url else "?"
    while reply := session.find(Call(method="GET", url=f"{url}{joint}pageToken={token}" if token else url)):
        yield from children(reply.body, field)
        yield from (child(place) for place in child(reply.body, field).values())
        token = str(reply.body.get("nextPageToken", ""))
        if not token:
            return
