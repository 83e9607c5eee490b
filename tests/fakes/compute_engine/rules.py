"""What Compute Engine refuses at once although the request has the right shape, and what it reads out of it."""

from __future__ import annotations

import re
from typing import Any

GPU = re.compile(r"(a2|a3|a4|a4x|g2|g4)-")
NAME = re.compile(r"[a-z]([-a-z0-9]{0,61}[a-z0-9])?")
METADATA_BYTES = 512 << 10
VALUE_BYTES = 256 << 10


def machine(body: dict[str, Any]) -> str:
    return str(body.get("machineType", "")).rpartition("/")[2]


def has_gpu(body: dict[str, Any]) -> bool:
    return bool(GPU.match(machine(body)) or body.get("guestAccelerators"))


def local_ssd(body: dict[str, Any]) -> bool:
    return any(one.get("type") == "SCRATCH" for one in body.get("disks", []))


def span_s(duration: dict[str, Any] | None) -> float:
    """Seconds of a Duration, whose seconds are an int64 in text."""
    return float((duration or {}).get("seconds", 0))


def complaint(body: dict[str, Any], *, bulk: bool) -> str | None:
    """Why an instance, or what a bulk request would make, is refused (400)."""
    scheduling, metadata = body.get("scheduling", {}), body.get("metadata", {}).get("items", [])
    model = scheduling.get("provisioningModel", "STANDARD")
    sizes = [len(row["key"]) + len(row.get("value", "")) for row in metadata]
    if sum(sizes) > METADATA_BYTES or any(len(row.get("value", "")) > VALUE_BYTES for row in metadata):
        return "Metadata is too large: 512 KB in all, 256 KB a value."
    if has_gpu(body) and scheduling.get("onHostMaintenance") != "TERMINATE":
        return "Instances with guest accelerators do not support live migration."
    if not body.get("disks") or not any(one.get("boot") for one in body["disks"]):
        return "At least one boot disk must be specified."
    if not body.get("networkInterfaces"):
        return "At least one network interface is required."
    affinity = body.get("reservationAffinity", {}).get("consumeReservationType", "ANY_RESERVATION")
    if model in ("SPOT", "FLEX_START") and affinity not in ("NO_RESERVATION", "ANY_RESERVATION"):
        return f"Provisioning model {model} cannot consume a reservation."
    if model == "SPOT" and scheduling.get("automaticRestart", True):
        return "Automatic restart must be disabled for Spot VMs."
    if model == "FLEX_START":
        return _flex(body, scheduling, affinity)
    if model == "RESERVATION_BOUND" and affinity != "SPECIFIC_RESERVATION":
        return "RESERVATION_BOUND needs a specific reservation."
    if span_s(body.get("params", {}).get("requestValidForDuration")):
        return "requestValidForDuration is for FLEX_START."
    if "maxRunDuration" in scheduling and not 30 <= span_s(scheduling["maxRunDuration"]) <= 120 * 86400:
        return "maxRunDuration must be between 30 seconds and 120 days."
    return None


def _flex(body: dict[str, Any], scheduling: dict[str, Any], affinity: str) -> str | None:
    if not 600 <= span_s(scheduling.get("maxRunDuration")) <= 7 * 86400:
        return "FLEX_START needs maxRunDuration between 10 minutes and 7 days."
    if scheduling.get("instanceTerminationAction") != "DELETE":
        return "FLEX_START needs instanceTerminationAction DELETE."
    if affinity != "NO_RESERVATION":
        return "FLEX_START needs reservation affinity NO_RESERVATION."
    if body.get("resourcePolicies"):
        return "FLEX_START does not support placement policies."
    return None


def access_refused(account: str) -> str:
    return (
        f"The user does not have access to service account '{account}'.  User: 'muster'.  Ask a project owner to grant "
        "you the iam.serviceAccountUser role on the service account"
    )


STOCKOUTS = ("ZONE_RESOURCE_POOL_EXHAUSTED", "ZONE_RESOURCE_POOL_EXHAUSTED_WITH_DETAILS")


def stockout(zone: str, kind: str, code: str, others: tuple[str, ...]) -> dict[str, Any]:
    """One error of an operation; the newer code says where there might be some."""
    project = "projects/example-project"
    message = f"The zone '{project}/zones/{zone}' does not have enough resources available to fulfill the request."
    found: dict[str, Any] = {"code": code, "message": message}
    if code.endswith("DETAILS"):
        where = {"zone": zone, "vmType": kind, "attachment": "", "zonesAvailable": ",".join(others)}
        info = {"reason": "resource_availability", "domain": "compute.googleapis.com", "metadatas": where}
        found["errorDetails"] = [{"errorInfo": info}]
    return found
