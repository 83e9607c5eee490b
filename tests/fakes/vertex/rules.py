"""What Vertex AI refuses at create although the request has the right shape."""

from __future__ import annotations

import re
from typing import Any

from fakes.vertex.machines import FLEX, GPUS, unsupported

DAY_S = 86400.0
LABEL = re.compile(r"[a-z0-9_-]{0,64}")
REDUCER = "/vertex-ai-restricted/training/reductionserver:"


def seconds(duration: str) -> float:
    return float(duration.removesuffix("s"))


def complaint(job: dict[str, Any], region: str, several_regions: set[str]) -> str | None:
    """Why the job is refused (400), if it is; ``several_regions`` are buckets of more than one region."""
    if len(job.get("displayName", "")) not in range(1, 129):
        return "display_name must have 1 to 128 characters."
    labels = job.get("labels", {})
    if len(labels) > 64 or not all(LABEL.fullmatch(text) for pair in labels.items() for text in pair):
        return "labels: at most 64; keys and values of at most 64 lower-case letters, digits, underscores and dashes."
    spec = job["jobSpec"]
    pools = spec.get("workerPoolSpecs", [])
    if not pools or not pools[0] or len(pools) > 4:
        return "worker_pool_specs: one to four pools, the first of them not empty."
    if int(pools[0].get("replicaCount", "1")) != 1:
        return "The first worker pool must have replica_count 1."
    for pool in filter(None, pools):
        if trouble := _of_pool(pool, region):
            return trouble
    if spec.get("tensorboard") and not spec.get("serviceAccount"):
        return "service_account is required with tensorboard."
    if spec.get("network") and not re.fullmatch(r"projects/\d+/global/networks/[a-z0-9-]+", spec["network"]):
        return "network must be projects/NUMBER/global/networks/NAME, with the project's number."
    bucket = spec.get("baseOutputDirectory", {}).get("outputUriPrefix", "").removeprefix("gs://").partition("/")[0]
    if bucket in several_regions:
        return f"Bucket {bucket} is in more than one region, which is not supported."
    return _of_scheduling(spec.get("scheduling", {}), [pool for pool in pools if pool])


def _of_pool(pool: dict[str, Any], region: str) -> str | None:
    if int(pool.get("replicaCount", "1")) < 1:
        return "replica_count must be at least 1."
    if ("containerSpec" in pool) == ("pythonPackageSpec" in pool):
        return "exactly one of container_spec and python_package_spec must be set."
    if len(pool.get("containerSpec", {}).get("env", [])) > 100:
        return "container_spec.env: at most 100 variables."
    size = pool.get("diskSpec", {}).get("bootDiskSizeGb", 100)
    if not 100 <= size <= 64000:
        return "disk_spec.boot_disk_size_gb must be between 100 and 64000."
    affinity = pool["machineSpec"].get("reservationAffinity", {})
    if affinity.get("reservationAffinityType") == "SPECIFIC_RESERVATION":
        values = affinity.get("values", [])
        named = (
            r"projects/[^/]+/zones/[^/]+/reservations/[^/]+(/reservationBlocks/[^/]+)?(/reservationSubBlocks/[^/]+)?"
        )
        if affinity.get("key") != "compute.googleapis.com/reservation-name" or len(values) != 1:
            return "reservation_affinity: key compute.googleapis.com/reservation-name and one value."
        if not re.fullmatch(named, values[0]):
            return "reservation_affinity: the value names project, zone and reservation."
    return unsupported(pool["machineSpec"], region)


def _of_scheduling(scheduling: dict[str, Any], pools: list[dict[str, Any]]) -> str | None:
    if scheduling.get("strategy") != "FLEX_START":
        return "max_wait_duration is for FLEX_START." if "maxWaitDuration" in scheduling else None
    if seconds(scheduling.get("timeout", "604800s")) > 7 * DAY_S:
        return "FLEX_START: timeout must not exceed 7 days."
    if any(GPUS.get(pool["machineSpec"]["machineType"], ("",))[0] not in FLEX for pool in pools):
        return "FLEX_START: the accelerator is not supported."
    if any(pool["machineSpec"] != pools[0]["machineSpec"] for pool in pools):
        return "FLEX_START: all worker pools must have the same machine configuration."
    reserved = {pool["machineSpec"].get("reservationAffinity", {}).get("reservationAffinityType") for pool in pools}
    if reserved - {None, "NO_RESERVATION"}:
        return "FLEX_START cannot be used with reservations."
    return None
