"""Everything on the cluster that one sentence about a run may need, asked once."""

from __future__ import annotations

from collections.abc import Sequence

from muster.backends.gke.kubernetes.api import Cluster
from muster.backends.gke.manifests.placement import SUPERVISOR, object_name
from muster.backends.gke.operate import locate
from muster.backends.gke.operate.status_reason import UNPLACED, ClusterSnapshot, condition
from muster.backends.gke.pod.continuation import API as JOBSET_API
from muster.backends.gke.pod.continuation import newest, number_of
from muster.core.typed_json import JsonObject, at, child, children, text, whole
from muster.core.types import JobState

KUEUE_API = "kueue.x-k8s.io/v1beta2"
PROVISIONING_API = "autoscaling.x-k8s.io/v1"


def take_snapshot(cluster: Cluster, namespace: str, run_id: str) -> ClusterSnapshot:
    """Everything that one sentence about the run may need, asked once."""
    jobset = newest(cluster.list(JOBSET_API, "jobsets", namespace=namespace, labels=label(run_id)))
    name = text(jobset, "metadata", "name") if jobset else object_name(run_id)
    workloads = cluster.list(KUEUE_API, "workloads", namespace=namespace)
    workload = next((row for row in workloads if _owned_by(row, name)), None)
    requests: list[JsonObject] = []
    checks: list[JsonObject] = []
    if workload is not None and (condition(workload, "Admitted") or {}).get("status") != "True":
        owner = text(workload, "metadata", "name")
        rows = cluster.list(PROVISIONING_API, "provisioningrequests", namespace=namespace)
        requests = [row for row in rows if _owned_by(row, owner)]
        checks = list(cluster.list(KUEUE_API, "admissionchecks"))
    pods = cluster.list("v1", "pods", namespace=namespace, labels=label(run_id))
    if jobset is not None and number_of(jobset) > 1:  # an earlier allocation's pods are history
        pods = [pod for pod in pods if text(pod, "metadata", "labels", locate.JOBSET) in ("", name)]
    started = jobset is not None and not at(jobset, "spec", "suspend")  # then a pod that is missing has a reason
    unseen = jobset is not None and workload is None  # and Kueue may say why it takes no notice
    events = cluster.list("v1", "events", namespace=namespace) if pods or started or unseen else []
    unplaced = (condition(workload, "Admitted") or {}).get("reason") == UNPLACED
    nodes = cluster.list("v1", "nodes") if pods or unplaced else []
    topologies = cluster.list(KUEUE_API, "topologies") if unplaced else []
    return ClusterSnapshot(
        jobset=jobset,
        workload=workload,
        provisioning_requests=requests,
        admission_checks=checks,
        pods=pods,
        events=events,
        nodes=nodes,
        topology_labels=[text(level, "nodeLabel") for row in topologies for level in children(row, "spec", "levels")],
    )


def label(run_id: str) -> dict[str, str]:
    """The label of everything that is the run's."""
    return {"app.kubernetes.io/instance": run_id}


def tasks(pods: Sequence[JsonObject]) -> dict[str, str]:
    """Task -> phase and node, of its newest pod."""
    result = {}
    for pod in sorted(pods, key=lambda pod: text(pod, "metadata", "creationTimestamp")):
        node = text(pod, "spec", "nodeName")
        result[locate.task(pod)[0]] = text(pod, "status", "phase", default="?").lower() + (
            f" on {node}" if node else ""
        )
    return result


def exit_code(snapshot: ClusterSnapshot, state: JobState) -> int | None:
    """The supervisor's own, where its pod is still there; else what the JobSet says."""
    if not state.ended:
        return None
    for pod in snapshot.pods:
        if locate.task(pod)[0] == SUPERVISOR:
            for container in children(pod, "status", "containerStatuses"):
                ended = child(container, "state", "terminated")
                if ended and text(container, "name") == SUPERVISOR:
                    return whole(ended, "exitCode")
    return {JobState.SUCCEEDED: 0, JobState.FAILED: 1}.get(state)


def _owned_by(row: JsonObject, name: str) -> bool:
    return any(text(owner, "name") == name for owner in children(row, "metadata", "ownerReferences"))
