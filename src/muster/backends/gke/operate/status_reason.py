"""Why a run is where it is, in one sentence: from what the cluster says about its objects. Pure.

The objects are plain dicts as the API server returns them. The first obstacle on the way decides: the queue, the
check (DWS), the nodes, the images, the pods; then what is lost while it runs.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from muster.backends.gke.manifests.kueue_configuration import CLAIMS_HINT, CLAIMS_REFUSED
from muster.backends.gke.manifests.placement import HOST, SUPERVISOR
from muster.backends.gke.operate.evictions import Explanation, asked_again, deactivated_or_evicted, judge
from muster.backends.gke.operate.locate import INDEX
from muster.backends.gke.operate.status_reason_pods import (
    ROLE,
    hosts_that_run,
    no_supervisor,
    nodes_of_hosts,
    pods_sentence,
    short,
    when,
)
from muster.core.typed_json import JsonObject, at, child, children, text, whole
from muster.core.types import JobState

Manifest = JsonObject
UNPLACED = "PendingDelayedTopologyRequests"
"""Reason of ``Admitted`` while Kueue waits for nodes with the topology's labels: DWS has delivered them already."""
_SERVICE = re.compile(r"service \\?\"([a-z0-9-]+)\\?\"|https://([a-z0-9-]+)\.([a-z0-9-]+)\.svc")
JOBS_FAILED = ("JobCreationFailed", "HeadlessServiceCreationFailed")
"""Reasons of events of a JobSet whose controller cannot make what belongs to it."""


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
    jobs: Sequence[Manifest] = ()
    """Of the supervisors, once the JobSet has ended."""
    topology_labels: Sequence[str] = ()
    """Labels by which the cluster's Topology objects place pods; asked while that is what the run waits for."""
    usd_per_host_hour: float | None = None
    """What a host's node costs while it exists; None: not known."""


def explain(snapshot: ClusterSnapshot) -> Explanation:
    """One sentence about the run; the most advanced obstacle wins."""
    if snapshot.jobset is None and snapshot.workload is None:
        return Explanation(JobState.ABSENT, "no such run on the cluster")
    return (
        _ended(snapshot.jobset)
        or deactivated_or_evicted(snapshot.workload)
        or _queued(snapshot)
        or _checked(snapshot)
        or _placed(snapshot)
    )


def _ended(jobset: Manifest | None) -> Explanation | None:
    if _true(condition(jobset, "Completed")):
        return Explanation(JobState.SUCCEEDED, "finished: the supervisor's job completed")
    if _true(result := condition(jobset, "Failed")):
        return Explanation(JobState.FAILED, "failed: " + _words(result, "the JobSet gives no reason"))
    return None


def _queued(snapshot: ClusterSnapshot) -> Explanation | None:
    workload = snapshot.workload
    if workload is None:
        if not at(snapshot.jobset, "spec", "suspend"):
            return None
        said = no_workload(snapshot.jobset, snapshot.events)
        hint = "is Kueue running, and is the JobSet integration on?"
        return _waiting(f"waiting for Kueue to create a Workload for the run{said}", hint)
    reserved = condition(workload, "QuotaReserved")
    if reserved is None:
        if _admitted(workload) or child(workload, "status", "admission"):
            return None
        return _waiting("waiting for Kueue to evaluate the run")
    if _true(reserved):
        return None
    return _unreserved(text(reserved, "reason"), _words(reserved))


def _unreserved(reason: str, message: str) -> Explanation:
    """Why Kueue gives the run no quota, or no nodes, by the condition's reason and message."""
    if any(words in message for words in CLAIMS_REFUSED):
        return _waiting(f"Kueue never admits the run, which asks for devices by claims: {message}", CLAIMS_HINT)
    if "topology" in message and "allows to fit" in message:
        hint = "fewer resources.hosts, or wait until nodes of one topology domain are free"
        return _waiting(f"waiting for nodes that are close enough together: {message}", hint)
    kind, message = judge(message)
    if kind == "too large" or reason == "ExceedsMaxQuota":
        hint = "fewer resources.hosts, or a larger nominalQuota of the cluster queue"
        return _waiting(f"Kueue can never admit the run, which is larger than its queue: {message}", hint)
    if kind == "not covered":
        hint = (
            "every resource that the pods request, and of claims the one that deviceClassMappings names, has to be in "
            "coveredResources; muster up RUN.yaml makes such a queue"
        )
        return _waiting(f"Kueue can never admit the run: its queue has no quota of a kind: {message}", hint)
    if kind == "other nodes":
        hint = "the queue's flavours are for other nodes: resources.queue, or muster up RUN.yaml"
        return _waiting(f"Kueue cannot admit the run to the nodes of its queue: {message}", hint)
    if reason != "Inadmissible":
        hint = "another run uses it, or the cluster queue's nominalQuota is too small"
        return _waiting(f"waiting for Kueue quota: {message}", hint)
    if "inactive" in message or "stopped" in message:
        hint = "kubectl describe clusterqueue shows what is missing, or whether it was stopped"
        return _waiting(f"waiting for the queue to become active: {message}", hint)
    hint = "muster up RUN.yaml creates the queues; or set resources.queue to one that exists"
    return _waiting(f"Kueue cannot admit the run: {message}", hint)


def _checked(snapshot: ClusterSnapshot) -> Explanation | None:
    workload = snapshot.workload
    admitted = condition(workload, "Admitted")
    if workload is None or _true(admitted):
        return None
    if (admitted or {}).get("reason") == UNPLACED:
        return _unplaced(snapshot, _words(admitted))
    pending = [check for check in children(workload, "status", "admissionChecks") if text(check, "state") != "Ready"]
    for check in pending:
        definition = next(
            (
                check_row
                for check_row in snapshot.admission_checks
                if text(check_row, "metadata", "name") == text(check, "name")
            ),
            None,
        )
        active = condition(definition, "Active") if definition else None
        if active is not None and not _true(active):
            return _waiting(f"admission check {check['name']} is not active: {_words(active)}")
    if snapshot.provisioning_requests:
        return _dws(newest(snapshot.provisioning_requests), asked_again(workload))
    for check in pending:
        message = text(check, "message")
        name, state = text(check, "name"), text(check, "state")
        if state in ("Retry", "Rejected"):
            return _waiting(f"admission check {name} is in state {state}: {message or 'no reason given'}")
        if message.startswith("Error creating ProvisioningRequest"):
            return _waiting(f"Kueue cannot ask DWS for nodes: {message}", "Kueue's role, or a quota of the namespace")
        asked = f": {message}" if message else " (no request to DWS yet)"
        return _waiting(f"quota is reserved; waiting for admission check {name}{asked}")
    if admitted is not None and (message := text(admitted, "message")):
        return _unreserved(text(admitted, "reason"), message)
    return None


def _unplaced(snapshot: ClusterSnapshot, message: str) -> Explanation:
    """The nodes are there, and lack a label (or are not ready): Kueue never places pods on them, and DWS takes them
    back after about ten minutes, only to be asked again."""
    found = []
    wanted = next((row for row in children(snapshot.workload, "spec", "podSets") if text(row, "name") == "host"), {})
    selector = child(wanted, "template", "spec", "nodeSelector")
    for node in snapshot.nodes:
        labels = child(node, "metadata", "labels")
        if selector and selector.items() <= labels.items():
            lacks = [label for label in snapshot.topology_labels if not labels.get(label)]
            ready = condition(node, "Ready")
            name = text(node, "metadata", "name")
            if lacks:
                found.append(f"node {name} has no label {lacks[0]}")
            elif not _true(ready):
                found.append(f"node {name} is not ready")
    why = "; ".join(found[:3]) or message
    hint = "muster down ends the cost; the queue's flavour needs a Topology whose labels all nodes have, or none"
    return _waiting(f"DWS has delivered the nodes, which bill, and Kueue does not place the pods on them: {why}", hint)


def _dws(request: Manifest, again: str = "") -> Explanation:
    """The conditions of a ProvisioningRequest, the last word first."""
    kinds = ("Accepted", "Provisioned", "Failed", "BookingExpired", "CapacityRevoked")
    accepted, provisioned, failed, expired, revoked = (condition(request, kind) for kind in kinds)
    name = text(request, "metadata", "name", default="the request")
    if _true(revoked):
        sentence = f"DWS revoked the nodes: {_words(revoked, 'the allocation has ended')}"
        return Explanation(JobState.PREEMPTED, sentence, "muster submit again: the run continues from its checkpoint")
    if _true(expired):
        return _waiting(f"DWS reserved the nodes, but the run did not use them in time: {_words(expired, 'expired')}")
    if _true(failed):
        hint = "Kueue asks again a few times; another zone or mode may have capacity"
        return _waiting(f"DWS cannot provide the nodes: {_words(failed)}{again}", hint)
    if _true(provisioned):
        return _waiting("DWS has delivered the nodes, which bill; waiting for Kueue to admit the run")
    if _true(accepted):
        message = text(provisioned, "message", default="wasn't provisioned")
        said = "" if "wasn't provisioned" in message else f" ({message})"
        return _waiting(f"DWS has accepted the request {name}; waiting for capacity{said}")
    return _waiting(f"requested nodes from DWS ({name}); not accepted yet")


def _placed(snapshot: ClusterSnapshot) -> Explanation:
    running = hosts_that_run(snapshot.pods)
    if missing := no_pod(snapshot.jobset, snapshot.pods, snapshot.events):
        if running:
            found = pods_sentence(snapshot.pods, snapshot.events, snapshot.nodes, restarts(snapshot.jobset))
            return found._replace(sentence=f"{found.sentence}; {missing.sentence}", hint=found.hint or missing.hint)
        return _waiting(f"admitted; {missing.sentence}{_billed(snapshot)}", missing.hint)
    if alone := _unsupervised(snapshot):
        return alone
    if snapshot.pods:
        found = pods_sentence(snapshot.pods, snapshot.events, snapshot.nodes, restarts(snapshot.jobset))
        waits = found.state is JobState.WAITING
        return found._replace(sentence=found.sentence + _billed(snapshot)) if waits else found
    if snapshot.jobset is not None or snapshot.workload is None:
        return _waiting("admitted; its pods are being created")
    queue = text(snapshot.workload, "status", "admission", "clusterQueue", default="the queue")
    if not _admitted(snapshot.workload):
        return _waiting(f"quota is reserved in {queue}; waiting to be admitted")
    return _waiting(f"admitted by {queue}; waiting for its pods")


def _unsupervised(snapshot: ClusterSnapshot) -> Explanation | None:
    """No supervisor has a node: nothing trains, and hosts that have come cost money."""
    found = no_supervisor(snapshot.pods, snapshot.events)
    if found is None:
        return None
    pod, trouble = found
    if flavor := _hosts_flavor(snapshot.workload, pod):
        run = text(snapshot.jobset, "metadata", "labels", "app.kubernetes.io/instance", default="RUN")
        sentence = f"Kueue gave the supervisor the hosts' flavour {flavor}, and no node is of that and its own pool"
        hint = (
            "muster up RUN.yaml repairs its queue (your own Kueue: docs/how-to/gke.md); then submit again: "
            f"muster down {run} && muster submit RUN.yaml"
        )
        return _waiting(f"the run cannot start: {sentence}{_billed(snapshot)}", hint)
    if not (billed := _billed(snapshot)):
        return None
    # Of a run that had one before, hosts may train on: the state is by them.
    state = pods_sentence(snapshot.pods, snapshot.events, snapshot.nodes, 0).state
    return Explanation(state, f"the supervisor has no node: {trouble.reason}{billed}", trouble.hint)


def _hosts_flavor(workload: Manifest | None, supervisor: Manifest) -> str | None:
    """Flavour by which Kueue has sent a supervisor to the hosts' nodes: it is theirs too, and its labels in the pod's
    selector, not in the template, are of machines that hosts select, or of GPUs or TPUs. None: it has not."""
    rows = children(workload, "status", "admission", "podSetAssignments")
    flavors = {text(row, "name"): set(child(row, "flavors").values()) for row in rows}
    shared = flavors.get(SUPERVISOR, set()) & flavors.get(HOST, set())
    roles = {text(row, "name"): row for row in children(workload, "spec", "podSets")}
    asked, hosts = (child(roles, role, "template", "spec", "nodeSelector") for role in (SUPERVISOR, HOST))
    wrong = any(
        key not in asked and (hosts.get(key) == value or key.endswith("-accelerator"))
        for key, value in child(supervisor, "spec", "nodeSelector").items()
    )
    return str(min(shared, key=str)) if shared and wrong else None


def _billed(snapshot: ClusterSnapshot) -> str:
    """How many hosts' nodes cost money while the run waits, and how much."""
    count = len(nodes_of_hosts(snapshot.pods))
    if not count:
        return ""
    usd = snapshot.usd_per_host_hour
    price = f", about ${count * usd:.2f} an hour" if usd else ""
    return f"; {count} host node{'s bill' if count > 1 else ' bills'} meanwhile{price}"


def restarts(jobset: Manifest | None) -> int:
    """How often JobSet has recreated everything."""
    return whole(jobset, "status", "restarts")


def condition(thing: Manifest | None, kind: str) -> JsonObject | None:
    """The newest condition of that type."""
    conditions = children(thing, "status", "conditions")
    return next((row for row in reversed(conditions) if text(row, "type") == kind), None)


def newest(requests: Sequence[Manifest]) -> Manifest:
    """Kueue numbers its attempts: <workload>-<check>-<n>."""

    def attempt(request: Manifest) -> tuple[int, str]:
        metadata = child(request, "metadata")
        tail = text(metadata, "name").rpartition("-")[2]
        return int(tail) if tail.isdigit() else 0, text(metadata, "creationTimestamp")

    return max(requests, key=attempt)


def _waiting(sentence: str, hint: str | None = None) -> Explanation:
    return Explanation(JobState.WAITING, sentence, hint)


def _admitted(workload: Manifest) -> bool:
    checks = children(workload, "status", "admissionChecks")
    all_ready = bool(checks) and all(text(check, "state") == "Ready" for check in checks)
    return all_ready or _true(condition(workload, "Admitted"))


def _true(result: JsonObject | None) -> bool:
    return result is not None and result.get("status") == "True"


def _words(result: JsonObject | None, otherwise: str = "no reason given") -> str:
    message = str((result or {}).get("message") or "").strip().rstrip(".")
    return message or otherwise


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
