"""Why an object of a run that should be there was never made: its owner's own events. Pure."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple

from muster.backends.gke.operate.locate import INDEX
from muster.backends.gke.operate.status_reason_pods import ROLE, short, when
from muster.core.typed_json import JsonObject, children, text, whole

_SERVICE = re.compile(r"service \\?\"([a-z0-9-]+)\\?\"|https://([a-z0-9-]+)\.([a-z0-9-]+)\.svc")
JOBS_FAILED = ("JobCreationFailed", "HeadlessServiceCreationFailed")
"""Reasons of events of a JobSet whose controller cannot make what belongs to it."""


class NotCreated(NamedTuple):
    """Who is missing and why, and what to do."""

    sentence: str
    hint: str


def no_pod(jobset: JsonObject | None, pods: Sequence[JsonObject], events: Sequence[JsonObject]) -> NotCreated | None:
    """Why a missing pod of the JobSet was not created: its Job's own message (quota, a policy, a webhook)."""
    if jobset is None:
        return None
    name = text(jobset, "metadata", "name")
    missing = _missing(jobset, pods)
    failures = [row for row in events if text(row, "reason") == "FailedCreate" and _about(row) in missing]
    if failures:
        subject = missing[_about(max(failures, key=when))] if len(missing) == 1 else f"{len(missing)} pods"
    elif not pods:
        failures = [row for row in events if text(row, "reason") in JOBS_FAILED and _about(row) == name]
        subject = "its jobs"
    if not failures:
        return None
    message = text(max(failures, key=when), "message", default="no reason given")
    if "failed calling webhook" in message:
        service = _webhook(message)
        return NotCreated(
            f"{subject} cannot be created: the webhook {service} does not answer ({short(message)})",
            f"its controller is down or starting ({service}): what runs is untouched, and nothing lost is replaced",
        )
    hint = "a ResourceQuota or an admission policy of the namespace refuses it"
    return NotCreated(f"{subject} cannot be created ({short(message)})", hint)


def no_workload(jobset: JsonObject | None, events: Sequence[JsonObject]) -> str:
    """What Kueue says of a JobSet that it has made no Workload for, after a colon; empty where it says nothing."""
    name = text(jobset, "metadata", "name")
    said = [row for row in events if text(row, "type") == "Warning" and _about(row) == name and text(row, "message")]
    return f": {short(text(max(said, key=when), 'message'))}" if said else ""


def _missing(jobset: JsonObject, pods: Sequence[JsonObject]) -> dict[str, str]:
    """Name of the Job -> host or supervisor whose pod is not there."""
    there = {
        (text(pod, "metadata", "labels", ROLE), text(pod, "metadata", "labels", INDEX, default="0")) for pod in pods
    }
    return {
        f"{text(jobset, 'metadata', 'name')}-{role['name']}-{index}": f"{role['name']}-{index * _pods_of_job(role)}"
        for role in children(jobset, "spec", "replicatedJobs")
        for index in range(whole(role, "replicas", default=1))
        if (text(role, "name"), str(index)) not in there
    }


def _pods_of_job(role: JsonObject) -> int:
    return whole(role, "template", "spec", "completions", default=1)


def _about(event: JsonObject) -> str:
    return text(event, "involvedObject", "name")


def _webhook(message: str) -> str:
    """``jobset-webhook-service (jobset-system)`` of the API server's complaint."""
    found = list(_SERVICE.finditer(message))
    name = next((row[1] or row[2] for row in found), "of the cluster")
    namespace = next((row[3] for row in found if row[3]), "")
    return f"{name} ({namespace})" if namespace else name
