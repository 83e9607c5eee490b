"""Machines asked for together: what becomes of each stands in an operation of its own."""

from __future__ import annotations

import functools
import uuid
from typing import Any

from fakes.compute_engine import instances
from fakes.compute_engine.service import FakeComputeEngine
from fakes.google_wire import body_of, refuse

from muster.backends.google.http import Call, Reply

Body = dict[str, Any]


def bulk_insert(google: FakeComputeEngine, path: str, query: dict[str, str], call: Call) -> Reply:
    """All or too few: a success is only what the operation of the group says at its end."""
    if repeated := google.repeated(query):
        return repeated
    asked = body_of(call)
    properties, count = asked["instanceProperties"], int(asked["count"])
    least = int(asked.get("minCount", asked["count"]))
    zones = _zones(google, path, asked)
    names = list(asked.get("perInstanceProperties", {})) or _numbered(google, zones[0], asked["namePattern"], count)
    if len(names) != count or not 1 <= least <= count:
        return refuse(400, "invalid", "count, minCount and the names do not agree.")
    if trouble := instances.refused(google, properties, names, bulk=True):
        return trouble
    if sum(one["operationType"] == "bulkInsert" and one["status"] != "DONE" for one in google.timed.values()) >= 10:
        return refuse(403, "rateLimitExceeded", "Too many bulk operations at once.")
    zone = next((one for one in zones if google.stock.get(one, count) >= least), zones[0])
    at = f"{'/'.join(path.split('/')[:4])}/zones/{zone}"
    group = str(uuid.UUID(int=len(google.timed) + 1))
    made, failed = _bulk_children(google, at, names, properties, group)
    counts = {"targetVmCount": count, "createdVmCount": len(made), "failedToCreateVmCount": failed, "deletedVmCount": 0}
    status = counts | {"status": "CREATING"}
    google.timeline.after(
        google.manners.boot_s, lambda: status.update(status="ROLLING_BACK" if len(made) < least else "DONE")
    )
    wait_s = google.manners.boot_s + (google.manners.doomed_s + google.manners.delete_s if len(made) < least else 0)

    def finish() -> list[Body]:
        status["status"] = "DONE"
        if len(made) >= least:
            return []
        status["deletedVmCount"] = len(made)
        words = f"Requested minimum count of {least} VMs could not be created."
        return [{"code": "VM_MIN_COUNT_NOT_REACHED", "message": words}]

    row = google.operation(instances.folder(path), "bulkInsert", path, wait_s, finish, group=group,
                           request_id=query.get("requestId", ""))  # fmt: skip
    row["instancesBulkInsertOperationMetadata"] = {"perLocationStatus": {f"zones/{zone}": status}}
    if len(made) < least:
        end_s = google.manners.boot_s + google.manners.doomed_s
        for target in made:
            google.timeline.after(
                end_s, functools.partial(instances.remove, google, target, google.manners.delete_s - 1)
            )
    return Reply(status=200, body=row)


def _bulk_children(
    google: FakeComputeEngine, at: str, names: list[str], properties: Body, group: str
) -> tuple[list[str], int]:
    """An operation of its own for each machine: the only place where the reason of a failure stands."""
    made: list[str] = []
    for name in names:
        target = f"{at}/instances/{name}"
        trouble = [{"code": "RESOURCE_ALREADY_EXISTS", "message": f"The resource '{target}' already exists"}]
        if target not in google.store:
            trouble = instances.take(google, at.rpartition("/")[2], properties)
        if not trouble:
            made.append(target)
            google.timeline.after(
                google.manners.visible_s, functools.partial(instances.appear, google, target, properties)
            )
        google.operation(at, "insert", target, google.manners.boot_s, functools.partial(list, trouble), group=group)
    return made, len(names) - len(made)


def _zones(google: FakeComputeEngine, path: str, asked: Body) -> list[str]:
    if "/zones/" in path:
        return [path.split("/")[5]]
    allowed = [one["zone"].rpartition("/")[2] for one in asked.get("locationPolicy", {}).get("zones", [])]
    return allowed or [one for one in google.zones if one.startswith(path.split("/")[5])]


def _numbered(google: FakeComputeEngine, zone: str, pattern: str, count: int) -> list[str]:
    """Names of a pattern go on after the largest that is there: asked again, it means other machines."""
    head, marks = pattern.rstrip("#"), len(pattern) - len(pattern.rstrip("#"))
    taken = [key.rpartition("/")[2] for key in google.store if f"/zones/{zone}/instances/{head}" in key]
    numbers = [int(name[len(head) :]) for name in taken if name[len(head) :].isdigit()]
    first = max(numbers, default=0) + 1
    return [f"{head}{number:0{marks}d}" for number in range(first, first + count)]


HANDLERS = {"instances.bulkInsert": bulk_insert, "regionInstances.bulkInsert": bulk_insert}
