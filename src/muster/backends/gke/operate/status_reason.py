"""Why a run is where it is, in one sentence: from what the cluster says about its objects. Pure.

The objects are plain dicts as the API server returns them. The first obstacle on the way decides: the queue, the
check (DWS), the nodes, the images, the pods; then what is lost while it runs.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from muster.backends.gke.operate.status_reason_pods import pods_sentence, refused
from muster.core.types import JobState

Manifest = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class ClusterSnapshot:
    """One look at a run's objects; None or empty where there is none."""

    jobset: Manifest | None = None
    workload: Manifest | None = None
    provisioning_requests: Sequence[Manifest] = ()
    admission_checks: Sequence[Manifest] = ()
    pods: Sequence[Manifest] = ()
    events: Sequence[Manifest] = ()
    nodes: Sequence[Manifest] = ()


@dataclass(frozen=True, kw_only=True)
class Explanation:
    """The state in words that every back end shares, one sentence, and where there is one, the next step."""

    state: JobState
    sentence: str
    hint: str | None = None


def explain(snapshot: ClusterSnapshot) -> Explanation:
    """One sentence about the run; the most advanced obstacle wins."""
    if snapshot.jobset is None and snapshot.workload is None:
        return Explanation(state=JobState.ABSENT, sentence="no such run on the cluster")
    for answer in _answers(snapshot):
        if answer is not None:
            return answer
    raise AssertionError("the last answer is never None")


def _answers(snapshot: ClusterSnapshot) -> Iterator[Explanation | None]:
    yield _ended(snapshot.jobset)
    yield _deactivated_or_evicted(snapshot.workload)
    yield _queued(snapshot)
    yield _checked(snapshot)
    yield _placed(snapshot)


def _ended(jobset: Manifest | None) -> Explanation | None:
    if jobset is None:
        return None
    if _true(result := condition(jobset, "Completed")):
        return Explanation(state=JobState.SUCCEEDED, sentence="finished: the supervisor's job completed")
    if _true(result := condition(jobset, "Failed")):
        return Explanation(state=JobState.FAILED, sentence="failed: " + _words(result, "the JobSet gives no reason"))
    return None


def _deactivated_or_evicted(workload: Manifest | None) -> Explanation | None:
    if workload is None:
        return None
    evicted = condition(workload, "Evicted")
    if workload.get("spec", {}).get("active") is False:
        why = _words(evicted, "its admission check was rejected too often, or it was stopped by hand")
        return Explanation(
            state=JobState.STOPPED,
            sentence=f"Kueue has deactivated the run: {why}",
            hint="muster submit again, or set spec.active of the Workload to true",
        )
    if _true(evicted) and not _true(condition(workload, "QuotaReserved")):
        result = EVICTED.get(str((evicted or {}).get("reason")))
        if result is not None:
            sentence, hint = result
            why = _words(evicted, "no reason given")
            return Explanation(state=JobState.WAITING, sentence=f"{sentence}: {why}{_asked_again(workload)}", hint=hint)
    return None


EVICTED: Mapping[str, tuple[str, str | None]] = {
    "Preempted": ("preempted; queued again", None),
    "PodsReadyTimeout": ("evicted because not all pods became ready in time; queued again", None),
    "AdmissionCheck": ("evicted by an admission check; queued again", "another zone or mode may have capacity"),
    "ClusterQueueStopped": (
        "its cluster queue was stopped; waiting",
        "set spec.stopPolicy of the ClusterQueue to None",
    ),
    "LocalQueueStopped": ("its queue was stopped; waiting", "set spec.stopPolicy of the LocalQueue to None"),
    "NodeFailures": ("evicted because nodes failed; queued again", None),
}
"""Reason of Kueue's ``Evicted`` -> sentence, hint."""


def _asked_again(workload: Manifest) -> str:
    """When Kueue lets the run try again, where it says so."""
    state = workload.get("status", {}).get("requeueState") or {}
    if not state.get("requeueAt"):
        return ""
    return f"; Kueue tries again at {state['requeueAt']} (try {int(state.get('count', 0)) + 1})"


def _queued(snapshot: ClusterSnapshot) -> Explanation | None:
    workload = snapshot.workload
    if workload is None:
        suspended = (snapshot.jobset or {}).get("spec", {}).get("suspend")
        if not suspended:
            return None
        return Explanation(
            state=JobState.WAITING,
            sentence="waiting for Kueue to create a Workload for the run",
            hint="is Kueue running, and is the JobSet integration on?",
        )
    reserved = condition(workload, "QuotaReserved")
    if reserved is None and not _admitted(workload):
        if workload.get("status", {}).get("admission"):
            return None
        return Explanation(state=JobState.WAITING, sentence="waiting for Kueue to evaluate the run")
    if reserved is not None and not _true(reserved):
        message = _words(reserved, "no reason given")
        if "request > maximum capacity" in message:
            return Explanation(
                state=JobState.WAITING,
                sentence=f"Kueue can never admit the run, which is larger than its queue: {message}",
                hint="fewer resources.hosts, or a larger nominalQuota of the cluster queue",
            )
        if reserved.get("reason") == "Inadmissible" and ("inactive" in message or "stopped" in message):
            return Explanation(
                state=JobState.WAITING,
                sentence=f"waiting for the queue to become active: {message}",
                hint="kubectl describe clusterqueue shows what is missing, or whether it was stopped",
            )
        if reserved.get("reason") == "Inadmissible":
            return Explanation(
                state=JobState.WAITING,
                sentence=f"Kueue cannot admit the run: {message}",
                hint="muster up RUN.yaml creates the queues; or set resources.queue to one that exists",
            )
        return Explanation(
            state=JobState.WAITING,
            sentence=f"waiting for Kueue quota: {message}",
            hint="another run uses it, or the cluster queue's nominalQuota is too small",
        )
    return None


def _checked(snapshot: ClusterSnapshot) -> Explanation | None:
    workload = snapshot.workload
    if workload is None or _true(condition(workload, "Admitted")):
        return None
    pending = [
        check for check in workload.get("status", {}).get("admissionChecks", []) if check.get("state") != "Ready"
    ]
    for check in pending:
        definition = next((one for one in snapshot.admission_checks if one["metadata"]["name"] == check["name"]), None)
        active = condition(definition, "Active") if definition else None
        if active is not None and not _true(active):
            return Explanation(
                state=JobState.WAITING,
                sentence=f"admission check {check['name']} is not active: {_words(active, 'no reason given')}",
            )
    if snapshot.provisioning_requests:
        return _dws(newest(snapshot.provisioning_requests), _asked_again(workload))
    for check in pending:
        message = check.get("message") or ""
        name, state = check["name"], check.get("state")
        if state in ("Retry", "Rejected"):
            return Explanation(
                state=JobState.WAITING,
                sentence=f"admission check {name} is in state {state}: {message or 'no reason given'}",
            )
        return Explanation(
            state=JobState.WAITING,
            sentence=f"quota is reserved; waiting for admission check {name}"
            + (f": {message}" if message else " (no request to DWS yet)"),
        )
    return None


def _dws(request: Manifest, again: str = "") -> Explanation | None:
    """The conditions of a ProvisioningRequest, the last word first."""
    states = {kind: condition(request, kind) for kind in DWS_CONDITIONS}
    name = request.get("metadata", {}).get("name", "the request")
    if _true(states["CapacityRevoked"]):
        return Explanation(
            state=JobState.PREEMPTED,
            sentence="DWS revoked the nodes: "
            + _words(states["CapacityRevoked"], "the allocation has ended"),
            hint="muster submit again: the run continues from its checkpoint",
        )
    if _true(states["BookingExpired"]):
        return Explanation(
            state=JobState.WAITING,
            sentence="DWS reserved the nodes, but the run did not use them in time: "
            + _words(states["BookingExpired"], "expired"),
        )
    if _true(states["Failed"]):
        return Explanation(
            state=JobState.WAITING,
            sentence="DWS cannot provide the nodes: " + _words(states["Failed"], "no reason given") + again,
            hint="Kueue asks again a few times; another zone or mode may have capacity",
        )
    if _true(states["Provisioned"]):
        return None
    if _true(states["Accepted"]):
        wait = states["Provisioned"]
        said = "" if wait is None or "wasn't provisioned" in wait.get("message", "") else f" ({wait.get('message')})"
        return Explanation(
            state=JobState.WAITING, sentence=f"DWS has accepted the request {name}; waiting for capacity{said}"
        )
    return Explanation(state=JobState.WAITING, sentence=f"requested nodes from DWS ({name}); not accepted yet")


DWS_CONDITIONS = ("Accepted", "Provisioned", "Failed", "BookingExpired", "CapacityRevoked")


def _placed(snapshot: ClusterSnapshot) -> Explanation:
    not_created = refused(snapshot.jobset, snapshot.pods, snapshot.events) if snapshot.jobset is not None else None
    if not_created is not None:
        why = "a ResourceQuota or an admission policy of the namespace refuses it"
        return Explanation(state=JobState.WAITING, sentence=f"admitted; {not_created}", hint=why)
    if not snapshot.pods:
        if snapshot.jobset is None and snapshot.workload is not None:
            queue = snapshot.workload.get("status", {}).get("admission", {}).get("clusterQueue", "the queue")
            sentence = f"admitted by {queue}; waiting for its pods"
            if not _admitted(snapshot.workload):
                sentence = f"quota is reserved in {queue}; waiting to be admitted"
            return Explanation(state=JobState.WAITING, sentence=sentence)
        return Explanation(state=JobState.WAITING, sentence="admitted; its pods are being created")
    state, sentence, hint = pods_sentence(snapshot.pods, snapshot.events, snapshot.nodes, restarts(snapshot.jobset))
    return Explanation(state=state, sentence=sentence, hint=hint)


def restarts(jobset: Manifest | None) -> int:
    """How often JobSet has recreated everything."""
    return int((jobset or {}).get("status", {}).get("restarts", 0))


def condition(thing: Manifest | None, kind: str) -> Mapping[str, Any] | None:
    """The newest condition of that type."""
    result = None
    for one in (thing or {}).get("status", {}).get("conditions", []):
        if one.get("type") == kind:
            result = one
    return result


def newest(requests: Sequence[Manifest]) -> Manifest:
    """Kueue numbers its attempts: <workload>-<check>-<n>."""

    def attempt(request: Manifest) -> tuple[int, str]:
        metadata = request.get("metadata", {})
        tail = str(metadata.get("name", "")).rpartition("-")[2]
        return int(tail) if tail.isdigit() else 0, str(metadata.get("creationTimestamp", ""))

    return max(requests, key=attempt)


def _admitted(workload: Manifest) -> bool:
    return _true(condition(workload, "Admitted")) or _all_ready(workload)


def _all_ready(workload: Manifest) -> bool:
    checks = workload.get("status", {}).get("admissionChecks", [])
    return bool(checks) and all(check.get("state") == "Ready" for check in checks)


def _true(result: Mapping[str, Any] | None) -> bool:
    return result is not None and result.get("status") == "True"


def _words(result: Mapping[str, Any] | None, otherwise: str) -> str:
    message = str((result or {}).get("message") or "").strip().rstrip(".")
    return message or otherwise
