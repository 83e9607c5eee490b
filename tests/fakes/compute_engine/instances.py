"""Machines: asked for one by one or in bulk, stopped, deleted, preempted, lost."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

from fakes.compute_engine import rules
from fakes.compute_engine.guest import Guest, serial_output
from fakes.compute_engine.service import FakeComputeEngine
from fakes.gcp_services import error
from fakes.google_wire import body_of, refuse

from muster.backends.google.http import Call, Reply

Body = dict[str, Any]
FOLDER = re.compile(r"(compute/v1/projects/[^/]+/(?:zones|regions)/[^/]+)/")
ON = ("PROVISIONING", "STAGING", "RUNNING", "REPAIRING")


def folder(path: str) -> str:
    found = FOLDER.match(path + "/")
    assert found, path
    return found[1]


def insert(google: FakeComputeEngine, path: str, query: dict[str, str], call: Call) -> Reply:
    if repeated := google.repeated(query):
        return repeated
    body, at = body_of(call), folder(path)
    if trouble := refused(google, body, [body["name"]]):
        return trouble
    target = f"{path}/{body['name']}"
    if target in google.store or any(one["targetLink"].endswith(target) and one["status"] != "DONE"
                                     for one in google.timed.values()):  # fmt: skip
        return refuse(409, "alreadyExists", f"The resource '{target.removeprefix('compute/v1/')}' already exists")
    if body.get("scheduling", {}).get("provisioningModel") == "FLEX_START":
        return Reply(status=200, body=_wait_for_machines(google, target, body, query))
    trouble_later = take(google, at.rpartition("/")[2], body)
    if not trouble_later:
        google.timeline.after(google.manners.visible_s, lambda: appear(google, target, body))

    row = google.operation(at, "insert", target, google.manners.boot_s, lambda: trouble_later,
                           request_id=query.get("requestId", ""))  # fmt: skip
    return Reply(status=200, body=row)


def refused(google: FakeComputeEngine, body: Body, names: list[str], *, bulk: bool = False) -> Reply | None:
    """What is said at once."""
    if not all(rules.NAME.fullmatch(name) for name in names):
        return refuse(400, "invalid", f"Invalid value for field 'resource.name': {names}")
    if trouble := rules.complaint(body, bulk=bulk):
        return refuse(400, "invalid", trouble)
    for account in body.get("serviceAccounts", []):
        holds_s = (google.actors or {}).get(account["email"], float("inf"))
        if google.actors is not None and google.timeline.now_s < holds_s:
            return refuse(403, "forbidden", rules.access_refused(account["email"]))
    for nic in body["networkInterfaces"]:
        for at in ("network", "subnetwork"):
            if at in nic and "compute/v1/" + nic[at].rpartition("compute/v1/")[2] not in google.store:
                return refuse(404, "notFound", f"The resource '{nic[at]}' was not found")
    there = sum("/instances/" in key for key in google.store)
    if google.instance_quota is not None and there + len(names) > google.instance_quota:
        words = f"Quota 'INSTANCES' exceeded.  Limit: {float(google.instance_quota)} in region us-central1."
        return refuse(403, "quotaExceeded", words)
    return None


def take(google: FakeComputeEngine, zone: str, body: Body) -> list[Body]:
    """One machine of the zone's; the errors where there is none. A reservation that fits is used up first, unless the
    request says that none shall be."""
    if zone in google.odd_errors:
        code, message = google.odd_errors.pop(zone)
        return [{"code": code, "message": message}]
    affinity = body.get("reservationAffinity", {})
    kind = affinity.get("consumeReservationType", "ANY_RESERVATION")
    named = [one.rpartition("/")[2] for one in affinity.get("values", [])]
    for key, one in google.store.items():
        specific = one.get("specificReservation", {})
        wanted = key.rpartition("/")[2] in named if named else not one.get("specificReservationRequired")
        fits = specific.get("instanceProperties", {}).get("machineType") == rules.machine(body)
        free = int(specific.get("inUseCount", "0")) < int(specific.get("count", "0"))
        if f"/{zone}/reservations/" in key and kind != "NO_RESERVATION" and wanted and fits and free:
            specific["inUseCount"] = str(int(specific.get("inUseCount", "0")) + 1)
            return []
    if google.stock.get(zone, 1) < 1:
        others = tuple(one for one in google.zones if google.stock.get(one, 1) > 0)
        return [rules.stockout(zone, rules.machine(body), google.stockout_code, others)]
    if zone in google.stock:
        google.stock[zone] -= 1
    return []


def appear(google: FakeComputeEngine, target: str, asked: Body, *, boot: bool = True) -> None:
    """The machine and its disks; it boots."""
    name, at = target.rpartition("/")[2], folder(target)
    body = json.loads(json.dumps(asked)) | {
        "name": name,
        "status": "PROVISIONING",
        "id": str(7000 + len(google.guests)),
    }
    body |= {"zone": f"https://www.googleapis.com/{at}", "selfLink": f"https://www.googleapis.com/{target}"}
    body |= {"creationTimestamp": google.timeline.stamp(), "labelFingerprint": "MQ=="}
    body["metadata"] = {"fingerprint": "MQ==", **body.get("metadata", {})}
    google.addresses += 1
    address = f"10.0.{google.addresses // 250}.{3 + google.addresses % 250}"
    for nic in body["networkInterfaces"]:
        nic.setdefault("networkIP", address)
    for number, disk in enumerate(body["disks"]):
        disk.setdefault("deviceName", f"persistent-disk-{number}")
        if disk.get("type") != "SCRATCH" and "source" not in disk:
            of = disk.get("initializeParams", {})
            path = f"{at}/disks/{of.get('diskName', name if disk.get('boot') else f'{name}-{number}')}"
            google.store[path] = {"name": path.rpartition("/")[2], "sizeGb": of.get("diskSizeGb", "10"),
                                  "labels": of.get("labels", {}), "status": "READY", "zone": body["zone"],
                                  "selfLink": f"https://www.googleapis.com/{path}"}  # fmt: skip
            disk["source"] = f"https://www.googleapis.com/{path}"
        disk.pop("initializeParams", None)
    google.store[target] = body
    guest = Guest(name, at.rpartition("/")[2], body["networkInterfaces"][0]["networkIP"])
    project = "projects/123456789"
    guest.metadata = {"name": name, "zone": f"{project}/zones/{guest.zone}", "preempted": "FALSE",
                      "maintenance-event": "NONE"}  # fmt: skip
    guest.metadata |= {f"attributes/{row['key']}": row.get("value", "") for row in body["metadata"].get("items", [])}
    google.guests[target] = guest
    if boot:
        google.timeline.after(google.manners.boot_s - google.manners.visible_s, lambda: start(google, target, guest))


def start(google: FakeComputeEngine, target: str, guest: Guest) -> None:
    if google.guests.get(target) is not guest or google.store[target]["status"] not in ("PROVISIONING", "REPAIRING"):
        return
    google.boots += 1
    body = google.store[target]
    body["status"] = "RUNNING"
    guest.boot(google.boots, google.timeline.now_s)
    scheduling = body.get("scheduling", {})
    if limit_s := rules.span_s(scheduling.get("maxRunDuration")):
        # In the API alone: no key of the metadata server's tells it.
        body["resourceStatus"] = {"scheduling": {"terminationTimestamp": google.timeline.stamp(limit_s)}}
        google.timeline.after(limit_s, lambda: shut_down(google, target, guest))
    google.programs.boot(guest)


def _wait_for_machines(google: FakeComputeEngine, target: str, body: Body, query: dict[str, str]) -> Body:
    """One machine with flex-start: pending until there is one, or the request is over; 0 is to fail at once."""
    zone, at = target.split("/")[5], folder(target)
    valid_s = rules.span_s(body.get("params", {}).get("requestValidForDuration"))
    began_s = google.timeline.now_s
    row = google.operation(at, "insert", target, float("inf"), lambda: [], request_id=query.get("requestId", ""))
    plain = {key: value for key, value in body.items() if key != "params"}
    google.timeline.after(google.manners.visible_s, lambda: appear(google, target, plain, boot=False))

    def over(errors: list[Body]) -> None:
        row.update(status="DONE", progress=100, endTime=google.timeline.stamp())
        if errors:
            row["error"] = {"errors": errors}
            forget(google, target)

    def look() -> None:
        if row["status"] == "DONE" or target not in google.store:
            over([{"code": "RESOURCE_NOT_FOUND", "message": "The request was cancelled."}])
            return
        google.store[target]["status"] = "PENDING"
        errors = take(google, zone, body)
        if not errors:
            google.store[target]["status"] = "PROVISIONING"
            google.timeline.after(google.manners.boot_s, lambda: start(google, target, google.guests[target]))
            over([])
        elif google.timeline.now_s - began_s >= valid_s:
            over(errors)
        else:
            google.timeline.after(google.manners.queue_s, look)

    google.timeline.after(google.manners.visible_s + 1, look)
    return row


# ---- ends


def forget(google: FakeComputeEngine, target: str) -> None:
    """The machine is gone, and those of its disks that go with it."""
    body, guest = google.store.pop(target, None), google.guests.pop(target, None)
    if guest and guest.up:
        guest.up = False
        google.programs.kill(guest)
    for disk in (body or {}).get("disks", []):
        if disk.get("autoDelete") and "source" in disk:
            google.store.pop("compute/v1/" + disk["source"].rpartition("compute/v1/")[2], None)


def remove(google: FakeComputeEngine, target: str, after_s: float) -> None:
    if target not in google.store:
        return
    google.store[target]["status"] = "STOPPING"
    guest = google.guests[target]
    if guest.up:
        google.programs.acpi(guest, after_s)
    google.timeline.after(after_s, lambda: forget(google, target) if google.guests.get(target) is guest else None)


def delete(google: FakeComputeEngine, path: str, query: dict[str, str], call: Call) -> Reply:
    from fakes.compute_engine import groups

    if repeated := google.repeated(query):
        return repeated
    if path not in google.store:
        return error(404, "notFound")
    pending = google.store[path]["status"] == "PENDING"
    wait_s = google.manners.delete_pending_s if pending else google.manners.delete_s
    body = google.store[path]
    if not pending:
        remove(google, path, wait_s)

    def finish() -> list[Body]:
        forget(google, path)
        groups.misses(google, path, body)
        return []

    row = google.operation(folder(path), "delete", path, wait_s, finish, request_id=query.get("requestId", ""))
    return Reply(status=200, body=row)


def stop(google: FakeComputeEngine, path: str, query: dict[str, str], call: Call) -> Reply:
    """Stopped: disks are billed and the name stays taken."""
    target = path.rpartition("/")[0]
    if target not in google.store:
        return error(404, "notFound")
    if rules.local_ssd(google.store[target]) and "discardLocalSsd" not in query:
        return refuse(400, "invalid", "discardLocalSsd must be given: the instance has local SSDs.")
    halt(google, target, google.manners.stop_s)
    row = google.operation(folder(path), "stop", target, google.manners.stop_s + 1, lambda: [])
    return Reply(status=200, body=row)


def halt(google: FakeComputeEngine, target: str, after_s: float) -> None:
    guest = google.guests[target]
    google.store[target]["status"] = "STOPPING"
    google.programs.acpi(guest, after_s)

    def halted() -> None:
        if google.guests.get(target) is guest and google.store[target]["status"] == "STOPPING":
            google.store[target]["status"] = "TERMINATED"
            guest.up, guest.local_ssd = False, None
            google.programs.kill(guest)

    google.timeline.after(after_s, halted)


def shut_down(google: FakeComputeEngine, target: str, guest: Guest) -> None:
    """Google ends it: ACPI, and half a minute on Spot, two minutes else; stopped unless it asked to be deleted."""
    if google.guests.get(target) is not guest or google.store[target]["status"] != "RUNNING":
        return
    scheduling = google.store[target].get("scheduling", {})
    grace_s = 30.0 if scheduling.get("provisioningModel") == "SPOT" else 120.0
    if scheduling.get("instanceTerminationAction") == "DELETE":
        remove(google, target, grace_s)
    else:
        halt(google, target, grace_s)


def preempt(google: FakeComputeEngine, target: str) -> None:
    """Spot: the notice comes that long before the shutdown as was asked for, which is not at all."""
    guest = google.guests[target]
    notice_s = rules.span_s(google.store[target].get("scheduling", {}).get("preemptionNoticeDuration"))
    guest.metadata["preempted"] = "TRUE"
    google.timeline.after(notice_s, lambda: shut_down(google, target, guest))
    google.timeline.settle()


def host_error(google: FakeComputeEngine, target: str) -> None:
    """The host under it dies; Google sees it late. The same name and address, on another host, if it restarts."""
    guest, body = google.guests[target], google.store[target]
    guest.up = False
    guest.fresh_host()
    google.programs.kill(guest)
    scheduling = body.get("scheduling", {})
    default = {"seconds": "3600"} if rules.local_ssd(body) else None
    wait_s = rules.span_s(scheduling.get("localSsdRecoveryTimeout", default))

    def noticed() -> None:
        if google.guests.get(target) is not guest:
            return
        body["status"] = "REPAIRING" if scheduling.get("automaticRestart", True) else "TERMINATED"
        if body["status"] == "REPAIRING":
            google.timeline.after(wait_s + google.manners.repair_s, lambda: start(google, target, guest))

    google.timeline.after(scheduling.get("hostErrorTimeoutSeconds", google.manners.noticed_s), noticed)


# ---- changes and looks


def set_labels(google: FakeComputeEngine, path: str, query: dict[str, str], call: Call) -> Reply:
    return _change(google, path, body_of(call), "setLabels", "labelFingerprint")


def set_metadata(google: FakeComputeEngine, path: str, query: dict[str, str], call: Call) -> Reply:
    return _change(google, path, body_of(call), "setMetadata", "fingerprint")


def _change(google: FakeComputeEngine, path: str, asked: Body, verb: str, mark: str) -> Reply:
    target = path.rpartition("/")[0]
    if target not in google.store:
        return error(404, "notFound")
    body = google.store[target]
    found = body if verb == "setLabels" else body["metadata"]
    if asked.get(mark) != found[mark]:
        return refuse(412, "conditionNotMet", f"{mark} does not match the current one.")

    def finish() -> list[Body]:
        found[mark] = asked[mark] + "x"
        if verb == "setLabels":
            body["labels"] = asked.get("labels", {})
        else:
            found["items"] = asked.get("items", [])
            guest = google.guests[target].metadata
            for key in [key for key in guest if key.startswith("attributes/")]:
                del guest[key]
            guest.update({f"attributes/{row['key']}": row.get("value", "") for row in found["items"]})
        return []

    return Reply(status=200, body=google.operation(folder(path), verb, target, 5, finish))


def serial(google: FakeComputeEngine, path: str, query: dict[str, str], call: Call) -> Reply:
    guest = google.guests.get(path.rpartition("/")[0])
    return (
        Reply(status=200, body=dict(serial_output(guest, int(query.get("start", 0)))))
        if guest
        else error(404, "notFound")
    )


def simulate(google: FakeComputeEngine, path: str, query: dict[str, str], call: Call) -> Reply:
    target = path.rpartition("/")[0]
    if target not in google.store:
        return error(404, "notFound")
    google.timeline.after(1, lambda: preempt(google, target))
    return Reply(
        status=200,
        body=google.operation(folder(path), "compute.instances.simulateMaintenanceEvent", target, 60, lambda: []),
    )


HANDLERS: dict[str, Callable[[FakeComputeEngine, str, dict[str, str], Call], Reply]] = {
    "instances.insert": insert,
    "instances.delete": delete,
    "instances.stop": stop,
    "instances.setLabels": set_labels,
    "instances.setMetadata": set_metadata,
    "instances.getSerialPortOutput": serial,
    "instances.simulateMaintenanceEvent": simulate,
}
