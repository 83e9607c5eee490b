"""Everything on the cluster that one sentence about a run may need, asked once."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from muster.backends.gke.kubernetes.api import Cluster
from muster.backends.gke.manifests.placement import SUPERVISOR, object_name
from muster.backends.gke.operate import locate
from muster.backends.gke.operate.status_reason import ClusterSnapshot, condition
from muster.backends.gke.pod.continuation import API as JOBSET_API
from muster.backends.gke.pod.continuation import newest, number_of
from muster.core.types import JobState

KUEUE_API = "kueue.x-k8s.io/v1beta2"
PROVISIONING_API = "autoscaling.x-k8s.io/v1"


def take_snapshot(cluster: Cluster, namespace: str, run_id: str) -> ClusterSnapshot:
    """Everything that one sentence about the run may need, asked once."""
    jobset = newest(cluster.list(JOBSET_API, "jobsets", namespace=namespace, labels=label(run_id)))
    name = jobset["metadata"]["name"] if jobset else object_name(run_id)
    workloads = cluster.list(KUEUE_API, "workloads", namespace=namespace)
    workload = next((row for row in workloads if _owned_by(row, name)), None)
    requests: list[Mapping[str, Any]] = []
    checks: list[Mapping[str, Any]] = []
    if workload is not None and (condition(workload, "Admitted") or {}).get("status") != "True":
        owner = workload["metadata"]["name"]
        rows = cluster.list(PROVISIONING_API, "provisioningrequests", namespace=namespace)
        requests = [row for row in rows if _owned_by(row, owner)]
        checks = list(cluster.list(KUEUE_API, "admissionchecks"))
    pods = cluster.list("v1", "pods", namespace=namespace, labels=label(run_id))
    if jobset is not None and number_of(jobset) > 1:  # an earlier allocation's pods are history
        pods = [pod for pod in pods if pod["metadata"].get("labels", {}).get(locate.JOBSET) in (None, name)]
    started = jobset is not None and not jobset["spec"].get("suspend")  # then a pod that is missing has a reason
    events = cluster.list("v1", "events", namespace=namespace) if pods or started else []
    nodes = cluster.list("v1", "nodes") if pods else []
    return ClusterSnapshot(
        jobset=jobset,
        workload=workload,
        provisioning_requests=requests,
        admission_checks=checks,
        pods=pods,
        events=events,
        nodes=nodes,
    )


def label(run_id: str) -> dict[str, str]:
    """The label of everything that is the run's."""
    return {"app.kubernetes.io/instance": run_id}


def tasks(pods: Any) -> dict[str, str]:
    """Task -> phase and node, of its newest pod."""
    result = {}
    for pod in sorted(pods, key=lambda pod: str(pod["metadata"].get("creationTimestamp", ""))):
        node = pod.get("spec", {}).get("nodeName")
        result[locate.task(pod)[0]] = str(pod.get("status", {}).get("phase", "?")).lower() + (
            f" on {node}" if node else ""
        )
    return result


def exit_code(snapshot: ClusterSnapshot, state: JobState) -> int | None:
    """The supervisor's own, where its pod is still there; else what the JobSet says."""
    if not state.ended:
        return None
    for pod in snapshot.pods:
        if locate.task(pod)[0] == SUPERVISOR:
            for container in pod.get("status", {}).get("containerStatuses", []):
                ended = container.get("state", {}).get("terminated")
                if ended and container.get("name") == SUPERVISOR:
                    return int(ended["exitCode"])
    return {JobState.SUCCEEDED: 0, JobState.FAILED: 1}.get(state)


def _owned_by(row: Mapping[str, Any], name: str) -> bool:
    return any(owner.get("name") == name for owner in row["metadata"].get("ownerReferences", []))
