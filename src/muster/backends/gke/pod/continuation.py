"""The rest of a run as another JobSet: through the queue again, to a new allocation, on from the checkpoint.

The first JobSet is called after the run, the next ones ``<run>-c2``, ``<run>-c3``; config map, secret and claim
templates are shared. The newest one is the run.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

from muster.backends.gke.kubernetes.api import Cluster
from muster.backends.gke.manifests.placement import object_name
from muster.core.errors import BackendError, CapacityError

Manifest = dict[str, Any]

API = "jobset.x-k8s.io/v1alpha2"
NUMBER = "muster/allocation"
"""Annotation of a continuation: which allocation of the run it is."""
INSTANCE = "app.kubernetes.io/instance"
_SERVERS_OWN = ("uid", "resourceVersion", "generation", "creationTimestamp", "managedFields", "ownerReferences",
                "deletionTimestamp", "selfLink")  # fmt: skip


def number_of(jobset: Mapping[str, Any]) -> int:
    """1 for the JobSet that was submitted, then counted up."""
    return int(jobset["metadata"].get("annotations", {}).get(NUMBER, 1))


def newest(jobsets: Sequence[Mapping[str, Any]]) -> Mapping[str, Any] | None:
    """The one that is the run now."""
    return max(jobsets, key=number_of, default=None)


def continuation(jobset: Mapping[str, Any]) -> Manifest:
    """The JobSet that goes on after ``jobset``: the same, suspended, under the next name. Pure."""
    result: Manifest = copy.deepcopy({key: value for key, value in jobset.items() if key != "status"})
    number = number_of(jobset) + 1
    metadata = {key: value for key, value in result["metadata"].items() if key not in _SERVERS_OWN}
    metadata["name"] = object_name(f"{metadata['labels'][INSTANCE]}-c{number}")
    annotations = {key: value for key, value in metadata.get("annotations", {}).items() if "kubectl" not in key}
    metadata["annotations"] = {**annotations, NUMBER: str(number)}
    result["metadata"] = metadata
    result["apiVersion"], result["kind"] = API, "JobSet"
    spec = result["spec"]
    spec["suspend"] = "kueue.x-k8s.io/queue-name" in metadata["labels"]
    # The headless service is the JobSet's own: two of them cannot share one.
    spec.get("network", {})["subdomain"] = metadata["name"]
    for role in spec["replicatedJobs"]:
        _forget_the_queue(role["template"]["spec"]["template"])
    return result


def queue_continuation(cluster: Cluster, namespace: str, name: str, *, at_most: int = 0) -> str:
    """Create the continuation of the JobSet ``name``; the same twice makes one. Returns its name.

    Raises:
        CapacityError: the run has had as many allocations as its limit allows.
        BackendError: the JobSet is gone, or the server will not.
    """
    metadata = {"name": name, "namespace": namespace}
    there = cluster.get({"apiVersion": API, "kind": "JobSet", "metadata": metadata})
    if there is None:
        raise BackendError(f"the JobSet {namespace}/{name} is gone", hint="the run was ended")
    if at_most and number_of(there) >= at_most:
        raise CapacityError(
            f"the run has had {at_most} allocations, all that limits.max_hours allows",
            hint="muster submit RUN.yaml limits.max_hours=... continues it",
        )
    following = continuation(there)
    cluster.apply(following)
    return f"{namespace}/{following['metadata']['name']}"


def _forget_the_queue(template: Manifest) -> None:
    """What Kueue wrote into the pods on admission belongs to the old allocation; what was asked of it stays."""
    metadata, spec = template.get("metadata", {}), template["spec"]
    for table in (metadata.get("annotations", {}), metadata.get("labels", {})):
        for key in [key for key in table if _of_an_allocation(key)]:
            del table[key]
    gates = [gate for gate in spec.pop("schedulingGates", []) if not _of_an_allocation(gate["name"])]
    if gates:
        spec["schedulingGates"] = gates


def _of_an_allocation(key: str) -> bool:
    asked = key.startswith("kueue.x-k8s.io/podset-") and key.endswith("-topology")
    return key.startswith(("autoscaling.x-k8s.io/", "kueue.x-k8s.io/")) and not asked
