"""Removes everything of a run from Compute Engine, in an order that Google takes, and says what is left.

Found by label in all zones, and by name where a kind has no labels (groups, templates, policies). Each pass does what
can be done now; what something else still uses goes in a later one. It may be killed anywhere and run again.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from muster.backends.gce.compute import Compute
from muster.backends.gce.placement import region_of
from muster.backends.gce.provision import delete, instances_of
from muster.backends.google.http import Unreachable
from muster.backends.machine_prices import machine_usd_per_hour
from muster.catalog import gke as catalogue
from muster.core.errors import AccessError, BackendError
from muster.core.protocols import Clock
from muster.core.typed_json import JsonObject, text

WAITING = ("ACCEPTED",)
INACTIVE = ("SUCCEEDED", "FAILED", "CANCELLED")
GOING = ("STOPPING", "DEPROVISIONING")
PAUSE_S = 5.0
DAYS_A_MONTH = 730 / 24


@dataclass(frozen=True, kw_only=True)
class Left:
    """One thing of the run that exists."""

    kind: str
    name: str
    place: str
    text: str = ""
    usd_per_day: float | None = None

    def __str__(self) -> str:
        price = f", about ${self.usd_per_day:.2f} a day" if self.usd_per_day else ""
        return f"{self.kind}/{self.name} in {self.place}" + (f" ({self.text}{price})" if self.text else price)


def leftovers(compute: Compute, stem: str) -> list[Left]:
    """What exists of the run, with its price; asks, changes nothing."""
    found = [
        Left(kind="instances", name=one.name, place=one.zone, text=one.status, usd_per_day=machine_usd_per_day(one.row))
        for one in instances_of(compute, stem)
    ]
    for place, row in _disks(compute, stem):
        size, at = f"{gigabytes(row) or '?'} GB", place.rpartition("/")[2]
        found.append(Left(kind="disks", name=text(row, "name"), place=at, text=size, usd_per_day=disk_usd_per_day(row)))
    for kind, place, row in _unlabelled(compute, stem):
        found.append(Left(kind=kind, name=text(row, "name"), place=place.rpartition("/")[2]))
    return found


def remove(compute: Compute, stem: str, clock: Clock, *, patience_s: float, spared: str = "") -> list[Left]:
    """Remove it all; returns what is left after ``patience_s`` (a machine that waits for flex-start took 39 minutes).

    ``spared``: the machine that this runs on; it goes last, and is not waited for.

    Raises:
        AccessError, Unreachable: Google does not let us, or does not answer.
    """
    waited_s = 0.0
    while True:
        _pass(compute, stem, spared)
        left = [one for one in leftovers(compute, stem) if not spared or one.name != spared]
        if not left or waited_s >= patience_s:
            break
        clock.sleep(PAUSE_S)
        waited_s += PAUSE_S
    for one in instances_of(compute, stem) if spared else ():
        if one.name == spared:
            delete(compute, one)
    return left


def _pass(compute: Compute, stem: str, spared: str) -> None:
    machines = [one for one in instances_of(compute, stem) if one.name != spared]
    for one in sorted(machines, key=lambda one: one.request_number):  # the supervisor's first: it would make others
        if one.status not in GOING and not one.group:
            delete(compute, one)
    groups = [(place, row) for kind, place, row in _unlabelled(compute, stem) if kind == "instanceGroupManagers"]
    for place, row in groups:
        _remove_group(compute, f"{place}/instanceGroupManagers/{text(row, 'name')}")
    for one in machines:
        if one.group and one.status not in GOING and not groups:  # its group is gone, and it is not
            _try(compute, "DELETE", f"zones/{one.zone}/instances/{one.name}")
    if machines or groups:  # what they use goes in a later pass
        return
    for place, row in _disks(compute, stem):
        if text(row, "name") != spared:
            _try(compute, "DELETE", f"{place}/disks/{text(row, 'name')}")
    for kind, place, row in _unlabelled(compute, stem):
        _try(compute, "DELETE", f"{place}/{kind}/{text(row, 'name')}")


def _try(compute: Compute, method: str, path: str) -> None:
    """Something may still use it, or a request may have ended meanwhile: the next pass looks again."""
    try:
        compute.ok(method, compute.url(path))
    except (AccessError, Unreachable):
        raise
    except BackendError:
        pass


def _remove_group(compute: Compute, path: str) -> None:
    """With its machines; its requests have to be over before."""
    asked = compute.listed(f"{path}/resizeRequests")
    for one in asked:
        if text(one, "state") in WAITING:
            _try(compute, "POST", f"{path}/resizeRequests/{text(one, 'name')}/cancel")
    if all(text(one, "state") in INACTIVE for one in asked):
        _try(compute, "DELETE", path)


def _disks(compute: Compute, stem: str) -> list[tuple[str, JsonObject]]:
    rows = compute.everywhere("disks", f'labels.muster-run="{stem}"')
    return [(place, row) for place, row in rows if text(row, "labels", "muster-run") == stem]


def _unlabelled(compute: Compute, stem: str) -> Iterator[tuple[str, str, JsonObject]]:
    """(kind, place, row). Groups, templates and policies have no labels: their names have the request's number."""
    named = re.compile(rf"{re.escape(stem)}-\d+(s\d+)?")
    for kind in ("instanceGroupManagers", "resourcePolicies"):
        for place, row in compute.everywhere(kind, f'name eq "{stem}-.*"'):
            if named.fullmatch(text(row, "name")):
                yield kind, place, row
    for row in compute.listed("global/instanceTemplates", f'name eq "{stem}-.*"'):
        if named.fullmatch(text(row, "name")):
            yield "instanceTemplates", "global", row


def machine_usd_per_day(row: JsonObject) -> float | None:
    if text(row, "status") in ("STOPPED", "TERMINATED", "SUSPENDED"):
        return None  # its disks are listed, and billed
    model = text(row, "scheduling", "provisioningModel")
    mode = {"SPOT": "spot", "FLEX_START": "flex_start", "RESERVATION_BOUND": "reservation"}.get(model, "on_demand")
    machine, zone = text(row, "machineType").rpartition("/")[2], text(row, "zone").rpartition("/")[2]
    usd = machine_usd_per_hour(machine, mode, region_of(zone))
    return None if usd is None else 24 * usd


def disk_usd_per_day(row: JsonObject) -> float | None:
    price = catalogue.leftovers()["disks"].usd_per_gb_month.get(text(row, "type").rpartition("/")[2] or "pd-balanced")
    return price * gigabytes(row) / DAYS_A_MONTH if price else None


def gigabytes(row: JsonObject) -> int:
    """An int64, which is text in JSON."""
    size = text(row, "sizeGb")
    return int(size) if size.isdigit() else 0
