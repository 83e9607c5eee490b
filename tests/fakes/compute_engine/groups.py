"""Managed groups and their resize requests: a place in a queue that nobody sees, and a group that heals itself."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fakes.compute_engine import instances, rules
from fakes.compute_engine.service import FakeComputeEngine
from fakes.gcp_services import error
from fakes.google_wire import body_of, refuse

from muster.backends.google.http import Call, Reply

Body = dict[str, Any]
INACTIVE = ("SUCCEEDED", "FAILED", "CANCELLED")


def insert_group(google: FakeComputeEngine, path: str, query: dict[str, str], call: Call) -> Reply:
    body = body_of(call)
    target = f"{path}/{body['name']}"
    if target in google.store:
        return error(409, "alreadyExists")
    template = "compute/v1/" + body["instanceTemplate"].rpartition("compute/v1/")[2]
    if template not in google.store:
        return refuse(404, "notFound", f"The resource '{body['instanceTemplate']}' was not found")
    google.store[target] = body | {"currentActions": {"none": 0, "creating": 0}, "status": {"isStable": True}}
    row = google.operation(instances.folder(path), "insert", target, 10, lambda: [])
    return Reply(status=200, body=row)


def insert_request(google: FakeComputeEngine, path: str, query: dict[str, str], call: Call) -> Reply:
    """Accepted, then created or not: a quota that is missing leaves it accepted."""
    if repeated := google.repeated(query):
        return repeated
    body, group = body_of(call), path.rpartition("/")[0]
    if group not in google.store:
        return error(404, "notFound")
    if ("resizeBy" in body) == ("instances" in body):
        return refuse(400, "invalid", "exactly one of resizeBy and instances must be given.")
    if "requestedRunDuration" in body and not 600 <= rules.span_s(body["requestedRunDuration"]) <= 7 * 86400:
        return refuse(400, "invalid", "requestedRunDuration must be between 10 minutes and 7 days.")
    target = f"{path}/{body['name']}"
    if target in google.store:
        return error(409, "alreadyExists")
    body |= {"state": "ACCEPTED", "status": {}}
    google.store[target] = body
    google.timeline.after(google.manners.queue_s, lambda: _try(google, target))
    row = google.operation(
        instances.folder(path), "insert", target, 5, lambda: [], request_id=query.get("requestId", "")
    )
    return Reply(status=200, body=row)


def _try(google: FakeComputeEngine, target: str) -> None:
    body = google.store.get(target)
    if body is None or body["state"] != "ACCEPTED":
        return
    at, group = instances.folder(target), target.rpartition("/resizeRequests/")[0]
    zone, wanted = at.rpartition("/")[2], body.get("resizeBy", len(body.get("instances", [])))
    there = sum("/instances/" in key for key in google.store)
    over = google.instance_quota is not None and there + wanted > google.instance_quota
    if over or google.stock.get(zone, wanted) < wanted:
        # The last try's reason: it may be an old one, and is no verdict.
        code = "QUOTA_EXCEEDED" if over else google.stockout_code
        words = {"code": code, "message": f"Instances could not be created: {code}"}
        body["status"] = {"lastAttempt": {"error": {"errors": [words]}}}
        google.timeline.after(google.manners.queue_s, lambda: _try(google, target))
        return
    if zone in google.stock:
        google.stock[zone] -= wanted
    body["state"] = "CREATING"
    found = google.store[group]
    template = google.store["compute/v1/" + found["instanceTemplate"].rpartition("compute/v1/")[2]]
    names = [one["name"] for one in body.get("instances", [])]
    names = names or [f"{found.get('baseInstanceName', found['name'])}-{number:04x}"
                      for number in range(len(google.guests) + 1, len(google.guests) + 1 + wanted)]  # fmt: skip
    found["targetSize"] = found.get("targetSize", 0) + wanted
    for name in names:
        make(google, f"{at}/instances/{name}", group, template["properties"])

    def made() -> None:
        body["state"], body["status"] = "SUCCEEDED", {}

    google.timeline.after(google.manners.boot_s, made)


def make(google: FakeComputeEngine, target: str, group: str, properties: Body) -> None:
    items = [
        *properties.get("metadata", {}).get("items", []),
        {"key": "created-by", "value": group.removeprefix("compute/v1/")},
    ]
    zone = target.split("/")[5]
    body = properties | {
        "metadata": {"items": items},
        "machineType": f"zones/{zone}/machineTypes/{properties['machineType']}",
    }
    instances.appear(google, target, body)


def misses(google: FakeComputeEngine, path: str, body: Body) -> None:
    """A machine of a group's was deleted behind its back: the group wants it again."""
    items = {row["key"]: row.get("value", "") for row in body.get("metadata", {}).get("items", [])}
    group = f"compute/v1/{items.get('created-by', '')}"
    if group not in google.store:
        return
    template = google.store["compute/v1/" + google.store[group]["instanceTemplate"].rpartition("compute/v1/")[2]]
    google.timeline.after(
        30, lambda: make(google, path, group, template["properties"]) if group in google.store else None
    )


def delete_instances(google: FakeComputeEngine, path: str, query: dict[str, str], call: Call) -> Reply:
    """The way to be rid of a machine of a group's."""
    group, asked = path.rpartition("/")[0], body_of(call)["instances"]
    if group not in google.store:
        return error(404, "notFound")
    targets = [f"{instances.folder(path)}/instances/{one.rpartition('/')[2]}" for one in asked]
    found = [one for one in targets if one in google.store]
    for target in found:
        instances.remove(google, target, google.manners.delete_s)
    google.store[group]["targetSize"] = max(0, google.store[group].get("targetSize", 0) - len(found))
    row = google.operation(instances.folder(path), "deleteInstances", group, google.manners.delete_s + 1, lambda: [])
    return Reply(status=200, body=row)


def cancel_request(google: FakeComputeEngine, path: str, query: dict[str, str], call: Call) -> Reply:
    """Only while it is accepted; while that is under way the machines may come after all."""
    target = path.rpartition("/")[0]
    if target not in google.store:
        return error(404, "notFound")
    body = google.store[target]
    if body["state"] != "ACCEPTED":
        return refuse(400, "invalid", f"The resize request is {body['state']}: only accepted ones can be cancelled.")

    def finish() -> list[Body]:
        if body["state"] != "ACCEPTED":
            return [{"code": "RESIZE_REQUEST_CANCELLATION_FAILED", "message": f"The request is {body['state']}."}]
        body["state"] = "CANCELLED"
        return []

    return Reply(
        status=200, body=google.operation(instances.folder(path), "cancel", target, google.manners.cancel_s, finish)
    )


def delete_request(google: FakeComputeEngine, path: str, query: dict[str, str], call: Call) -> Reply:
    """Deletes no machines."""
    if path not in google.store:
        return error(404, "notFound")
    if google.store[path]["state"] not in INACTIVE:
        return refuse(400, "invalid", "Only inactive resize requests can be deleted.")
    google.store.pop(path)
    return Reply(status=200, body=google.operation(instances.folder(path), "delete", path, 5, lambda: []))


def delete_group(google: FakeComputeEngine, path: str, query: dict[str, str], call: Call) -> Reply:
    """With its machines; not while a request of its waits."""
    if path not in google.store:
        return error(404, "notFound")
    requests = [one for key, one in google.store.items() if key.startswith(f"{path}/resizeRequests/")]
    if any(one["state"] not in INACTIVE for one in requests):
        return refuse(400, "resourceInUseByAnotherResource", "The group has resize requests that are not inactive.")
    mine = [key for key in google.store if key in google.guests and created_by(google, key) == path]
    for target in mine:
        instances.remove(google, target, google.manners.delete_s)

    def finish() -> list[Body]:
        for key in [key for key in google.store if key == path or key.startswith(f"{path}/")]:
            del google.store[key]
        return []

    row = google.operation(instances.folder(path), "delete", path, google.manners.delete_s + 1, finish)
    return Reply(status=200, body=row)


def created_by(google: FakeComputeEngine, target: str) -> str:
    items = google.store[target].get("metadata", {}).get("items", [])
    return "compute/v1/" + next((row["value"] for row in items if row["key"] == "created-by"), "")


def get_group(google: FakeComputeEngine, path: str, query: dict[str, str], call: Call) -> Reply:
    return Reply(status=200, body=google.store[path]) if path in google.store else error(404, "notFound")


def managed(google: FakeComputeEngine, path: str, query: dict[str, str], call: Call) -> Reply:
    group = path.rpartition("/")[0]
    mine = [one for key, one in google.store.items() if key in google.guests and created_by(google, key) == group]
    rows = [{"instance": one["selfLink"], "instanceStatus": one["status"], "currentAction": "NONE"} for one in mine]
    return Reply(status=200, body={"managedInstances": rows} if rows else {})


HANDLERS: dict[str, Callable[[FakeComputeEngine, str, dict[str, str], Call], Reply]] = {
    "instanceGroupManagers.insert": insert_group,
    "instanceGroupManagers.get": get_group,
    "instanceGroupManagers.delete": delete_group,
    "instanceGroupManagers.deleteInstances": delete_instances,
    "instanceGroupManagers.listManagedInstances": managed,
    "instanceGroupManagerResizeRequests.insert": insert_request,
    "instanceGroupManagerResizeRequests.cancel": cancel_request,
    "instanceGroupManagerResizeRequests.delete": delete_request,
}
