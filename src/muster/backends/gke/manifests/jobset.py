"""The run's own objects: the JobSet with one child Job per host, its config map, and its resource claims."""

from __future__ import annotations

from collections.abc import Mapping

from muster.backends.gke.manifests import pods
from muster.backends.gke.manifests.placement import HOST, SUPERVISOR, Mode, Placement, mode_of
from muster.core.typed_json import Json, JsonObject

Manifest = dict[str, Json]

SAVED_AND_WANTS_TO_RUN_AGAIN = 75
"""Any end of a host's pod, and of a supervisor's that is not the run's: it is free, and the next pod comes."""
VERDICTS = [1, 2, 3, 4, 5, 6, 130]
"""Exit codes by which the supervisor says that the run is over."""
HOST_FAILURES, SUPERVISOR_FAILURES = 10_000, 100
"""Ends of a pod that count (the init container's, a kill for memory, Kueue's own) before its Job, and with it the run,
fails. A host has fewer in a week: the Job controller waits up to 10 min between two of them."""
EXCLUSIVE = {"alpha.jobset.sigs.k8s.io/exclusive-topology": "cloud.google.com/gke-nodepool"}
"""A slice of TPUs is a node pool. On the replicated job and not on the JobSet: supervisors share a pool (JobSet
api/jobset/v1alpha2, ExclusiveKey: at either level)."""
KEPT_AFTER_THE_END_S = 3 * 24 * 3600
MONITORING_API = "monitoring.googleapis.com/v1"
RBAC = "rbac.authorization.k8s.io/v1"
#: Kinds that a run with a metrics page has more than others: (api, kind, plural).
MONITORING_KINDS = (
    (MONITORING_API, "PodMonitoring", "podmonitorings"),
    (RBAC, "RoleBinding", "rolebindings"),
    (RBAC, "Role", "roles"),
)
KEY = "token"
#: The collector's account: of GKE's managed collection, and of an operator that was installed by hand.
COLLECTOR, NAMESPACES = "collector", ("gke-gmp-system", "gmp-system")
SCRAPE_INTERVAL = "30s"


def run_objects(placement: Placement, run_file: str, resolved: str) -> list[Manifest]:
    """Everything that one run needs and that ends with it, in the order of creation."""
    claims = [_claim_template(placement)] if placement.claims else []
    budget = [_disruption_budget(placement)] if placement.supervisors > 1 else []
    pages = monitoring_objects(placement, _supervisors(placement))
    return [_config_map(placement, run_file, resolved), *claims, *budget, *pages, jobset(placement, mode_of(placement))]


def jobset(placement: Placement, mode: Mode) -> Manifest:
    """Hosts as child Jobs of parallelism 1 (of TPUs: a Job for each slice, which stays with its pool), so that a lost
    pod replaces only itself; supervisors as Jobs of their own, of which one works: the first that completes, or fails
    by a verdict, ends the run for all."""
    labels = dict(placement.labels)
    if placement.kueue:
        labels["kueue.x-k8s.io/queue-name"] = placement.queue
    metadata = {
        **_metadata(placement, placement.name),
        "labels": labels,
        "annotations": {"muster/run-name": placement.spec.name, **(mode.annotations if placement.kueue else {})},
    }
    spec: Manifest = {
        "suspend": placement.kueue,
        "network": {"enableDNSHostnames": True, "subdomain": placement.name, "publishNotReadyAddresses": True},
        # Spares never end by themselves: the run is over when the supervisor is.
        "successPolicy": {"operator": "Any", "targetReplicatedJobs": [SUPERVISOR]},
        "failurePolicy": _failure_policy(),
        "ttlSecondsAfterFinished": KEPT_AFTER_THE_END_S,
        "replicatedJobs": [
            _role(SUPERVISOR, placement.supervisors, pods.supervisor_template(placement)),
            _role(
                HOST,
                placement.slices or placement.hosts,
                pods.host_template(placement, mode),
                pods_of_job=placement.hosts_of_job,
                annotations=EXCLUSIVE if placement.slices else {},
            ),
        ],
    }
    return {"apiVersion": "jobset.x-k8s.io/v1alpha2", "kind": "JobSet", "metadata": metadata, "spec": spec}


def _role(
    name: str, replicas: int, template: Manifest, *, pods_of_job: int = 1, annotations: Mapping[str, str] | None = None
) -> Manifest:
    supervises = name == SUPERVISOR
    job: JsonObject = {
        "parallelism": pods_of_job,
        "completions": pods_of_job,
        "completionMode": "Indexed",
        "backoffLimit": SUPERVISOR_FAILURES if supervises else HOST_FAILURES,
        # The only value that a pod failure policy allows: the next pod starts once the last one has really ended.
        "podReplacementPolicy": "Failed",
        "podFailurePolicy": {"rules": _supervisor_failures() if supervises else _host_failures()},
        "template": template,
    }
    metadata: JsonObject = {"metadata": {"annotations": dict(annotations)}} if annotations else {}
    return {"name": name, "replicas": replicas, "template": {**metadata, "spec": job}}


def _host_failures() -> list[Manifest]:
    return [_disruptions_are_free(), _exit_codes(HOST, "Ignore", [SAVED_AND_WANTS_TO_RUN_AGAIN])]


def _supervisor_failures() -> list[Manifest]:
    return [
        _disruptions_are_free(),
        _exit_codes(SUPERVISOR, "Ignore", [SAVED_AND_WANTS_TO_RUN_AGAIN]),
        _exit_codes(SUPERVISOR, "FailJob", VERDICTS),
    ]


def _disruptions_are_free() -> Manifest:
    """A preempted or evicted pod is replaced and not charged to backoffLimit."""
    return {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]}


def _exit_codes(container: str, action: str, values: list[int]) -> Manifest:
    return {"action": action, "onExitCodes": {"containerName": container, "operator": "In", "values": values}}


def _failure_policy() -> Manifest:
    """The supervisor's verdict ends the run; nothing restarts Jobs (action RestartJob needs a feature gate, alpha in
    JobSet 0.12, and a failed Job that no rule names would recreate every pod, the supervisor's too)."""
    rule: JsonObject = {
        "name": "supervisorDecided",
        "action": "FailJobSet",
        "onJobFailureReasons": ["PodFailurePolicy"],
        "targetReplicatedJobs": [SUPERVISOR],
    }
    return {"maxRestarts": 0, "rules": [rule]}


def _disruption_budget(placement: Placement) -> Manifest:
    """Nodes are drained one supervisor at a time."""
    return {
        "apiVersion": "policy/v1",
        "kind": "PodDisruptionBudget",
        "metadata": {**_metadata(placement, f"{placement.name}-supervisor"), "labels": dict(placement.labels)},
        "spec": {"minAvailable": 1, "selector": _supervisors(placement)},
    }


def _supervisors(placement: Placement) -> JsonObject:
    return {"matchLabels": {**placement.labels, pods.ROLE: SUPERVISOR}}


def _config_map(placement: Placement, run_file: str, resolved: str) -> Manifest:
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {**_metadata(placement, f"{placement.name}-run"), "labels": dict(placement.labels)},
        "data": {"resolved.json": resolved, "run.yaml": run_file},
    }


def _claim_template(placement: Placement) -> Manifest:
    fabric = placement.machine.fabric
    request: JsonObject = {
        "name": "rdma",
        "exactly": {"deviceClassName": fabric.claim_class, "allocationMode": "ExactCount", "count": fabric.claim_count},
    }
    return {
        "apiVersion": "resource.k8s.io/v1",
        "kind": "ResourceClaimTemplate",
        "metadata": {**_metadata(placement, f"{placement.name}-rdma"), "labels": dict(placement.labels)},
        "spec": {"spec": {"devices": {"requests": [request]}}},
    }


def _metadata(placement: Placement, name: str) -> Manifest:
    return {"name": name, "namespace": placement.options.namespace}


def metrics_secret_name(jobset: str) -> str:
    """Of the Secret with what a scrape shows; made at submission: it is in no file."""
    return f"{jobset}-metrics"


def monitoring_objects(placement: Placement, selector: JsonObject) -> list[dict[str, Json]]:
    """None where the run has no page. ``selector``: of the supervisors' pods; the one that stands by serves none.

    https://github.com/GoogleCloudPlatform/prometheus-engine (doc/api.md): ``PodMonitoring``, and a collector that may
    read the one Secret that it names.
    """
    port = placement.metrics_port
    if port is None:
        return []
    name = metrics_secret_name(placement.name)
    metadata: JsonObject = {
        "name": name,
        "namespace": placement.options.namespace,
        "labels": dict(placement.labels),
    }
    reads: JsonObject = {
        "apiGroups": [""],
        "resources": ["secrets"],
        "resourceNames": [name],
        "verbs": ["get", "list", "watch"],
    }
    role: JsonObject = {"apiGroup": "rbac.authorization.k8s.io", "kind": "Role", "name": name}
    subjects: list[Json] = [{"kind": "ServiceAccount", "name": COLLECTOR, "namespace": place} for place in NAMESPACES]
    credentials: JsonObject = {"secret": {"name": name, "key": KEY}}
    endpoint: JsonObject = {
        "port": port,
        "path": "/metrics",
        "interval": SCRAPE_INTERVAL,
        "authorization": {"type": "Bearer", "credentials": credentials},
    }
    spec: JsonObject = {"selector": selector, "endpoints": [endpoint], "targetLabels": {"metadata": ["pod", "node"]}}
    return [
        {"apiVersion": RBAC, "kind": "Role", "metadata": metadata, "rules": [reads]},
        {"apiVersion": RBAC, "kind": "RoleBinding", "metadata": metadata, "roleRef": role, "subjects": subjects},
        {"apiVersion": MONITORING_API, "kind": "PodMonitoring", "metadata": metadata, "spec": spec},
    ]
