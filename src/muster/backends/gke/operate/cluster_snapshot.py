"""Everything on the cluster that one sentence about a run may need, asked once."""

from __future__ import annotations

import re
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
AGAIN = 75
"""A supervisor's pod that was removed, or stood by when the run ended: not the run's own end."""
_EXIT_CODE = re.compile(r"failed with exit code (\d+) matching FailJob rule")
"""In the message of a Job's condition, where its pod failure policy ended it."""


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
    over = any(text(condition(jobset, kind) or {}, "status") == "True" for kind in ("Completed", "Failed"))
    roles = {locate.JOBSET: name, locate.ROLE: SUPERVISOR}
    return ClusterSnapshot(
        jobset=jobset,
        jobs=cluster.list("batch/v1", "jobs", namespace=namespace, labels=roles) if over else [],
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


def tasks(pods: Sequence[JsonObject], holder: str | None = None) -> dict[str, str]:
    """Task -> phase and node, of its newest pod. Of two supervisors ``supervisor`` is the one that holds the run, by
    its address, or else the one that runs; the other one stands by."""
    newest_pods = {locate.task(pod)[0]: pod for pod in sorted(pods, key=_made)}
    supervisors = [name for name, pod in newest_pods.items() if locate.task(pod)[1] == SUPERVISOR]
    supervisors.sort(key=lambda name: _standing(newest_pods[name], holder), reverse=True)
    names = {name: f"stand-by{'' if place == 1 else place}" if place else SUPERVISOR
             for place, name in enumerate(supervisors)}  # fmt: skip
    result = {}
    for name, pod in newest_pods.items():
        node = text(pod, "spec", "nodeName")
        phase = text(pod, "status", "phase", default="?").lower()
        result[names.get(name, name)] = phase + (f" on {node}" if node else "")
    return result


def _standing(pod: JsonObject, holder: str | None) -> tuple[bool, bool, str]:
    running = text(pod, "status", "phase") == "Running" and not text(pod, "metadata", "deletionTimestamp")
    return holder is not None and text(pod, "status", "podIP") == holder, running, _made(pod)


def _made(pod: JsonObject) -> str:
    return text(pod, "metadata", "creationTimestamp")


def exit_code(snapshot: ClusterSnapshot, state: JobState) -> int | None:
    """The supervisor's own, by what its Job says of it (its pod goes with its node, minutes after the end), else by its
    pod; else what the JobSet says."""
    if not state.ended:
        return None
    for job in snapshot.jobs:
        for kind in ("Failed", "FailureTarget"):
            said = text(condition(job, kind), "message")
            if found := _EXIT_CODE.search(said):
                return int(found[1])
    for pod in snapshot.pods:
        if locate.task(pod)[1] == SUPERVISOR:
            for container in children(pod, "status", "containerStatuses"):
                ended = child(container, "state", "terminated")
                if ended and text(container, "name") == SUPERVISOR and whole(ended, "exitCode") != AGAIN:
                    return whole(ended, "exitCode")
    return {JobState.SUCCEEDED: 0, JobState.FAILED: 1}.get(state)


def _owned_by(row: JsonObject, name: str) -> bool:
    return any(text(owner, "name") == name for owner in children(row, "metadata", "ownerReferences"))
