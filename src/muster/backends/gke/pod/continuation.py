"""The rest of a run as another JobSet: through the queue again, to a new allocation, on from the checkpoint.

The first JobSet is called after the run, the next ones ``<run>-c2``, ``<run>-c3``; config map, secret and claim
templates are shared. The newest one is the run.
"""

from __future__ import annotations

from collections.abc import Sequence

from muster.backends.gke.kubernetes.api import Cluster
from muster.backends.gke.manifests.placement import object_name
from muster.core.errors import BackendError, CapacityError
from muster.core.typed_json import JsonObject, changed, child, children, text, whole

API = "jobset.x-k8s.io/v1alpha2"
NUMBER = "muster/allocation"
"""Annotation of a continuation: which allocation of the run it is."""
INSTANCE = "app.kubernetes.io/instance"
#: But for the owner, the Secret of the run's token: one that arrives after `down` goes with it, too.
_SERVERS_OWN = ("uid", "resourceVersion", "generation", "creationTimestamp", "managedFields",
                "deletionTimestamp", "deletionGracePeriodSeconds", "finalizers", "selfLink")  # fmt: skip
_ASKED = ("kueue.x-k8s.io/safe-to-forcefully-delete",)
"""The annotations of Kueue's own that manifests have: it puts others of this form there by itself."""


class AllocationsUsedUp(CapacityError):
    """The run has had as many allocations as its limit allows."""


class JobSetGone(BackendError):
    """What was to be continued is not there."""


def number_of(jobset: JsonObject) -> int:
    """1 for the JobSet that was submitted, then counted up."""
    return whole(jobset, "metadata", "annotations", NUMBER, default=1)


def newest(jobsets: Sequence[JsonObject]) -> JsonObject | None:
    """The one that is the run now."""
    return max(jobsets, key=number_of, default=None)


def continuation(jobset: JsonObject) -> JsonObject:
    """The JobSet that goes on after ``jobset``: the same, suspended, under the next name. Pure."""
    number = number_of(jobset) + 1
    there, spec = child(jobset, "metadata"), child(jobset, "spec")
    name = f"{object_name(text(there, 'labels', INSTANCE))}-c{number}"
    annotations = {key: value for key, value in child(there, "annotations").items() if "kubectl" not in key}
    metadata = {key: value for key, value in there.items() if key not in _SERVERS_OWN}
    following: JsonObject = {
        **spec,
        "suspend": "kueue.x-k8s.io/queue-name" in child(there, "labels"),
        "replicatedJobs": [_without_the_queue(role) for role in children(spec, "replicatedJobs")],
    }
    if "network" in spec:  # the headless service is the JobSet's own: two of them cannot share one
        following = changed(following, name, "network", "subdomain")
    return {
        **{key: value for key, value in jobset.items() if key != "status"},
        "apiVersion": API,
        "kind": "JobSet",
        "metadata": {**metadata, "name": name, "annotations": {**annotations, NUMBER: str(number)}},
        "spec": following,
    }


def queue_continuation(cluster: Cluster, namespace: str, name: str, *, at_most: int = 0) -> str:
    """Create the continuation of the JobSet ``name``; the same twice makes one. Returns its name.

    Raises:
        AllocationsUsedUp: by ``at_most``.
        JobSetGone: the run was ended.
        MusterError: the server does not answer, or will not.
    """
    metadata = {"name": name, "namespace": namespace}
    there = cluster.get({"apiVersion": API, "kind": "JobSet", "metadata": metadata})
    if there is None:
        raise JobSetGone(f"the JobSet {namespace}/{name} is gone", hint="the run was ended")
    if at_most and number_of(there) >= at_most:
        raise AllocationsUsedUp(
            f"the run has had {at_most} allocations, all that limits.max_hours allows",
            hint="muster submit RUN.yaml limits.max_hours=... continues it",
        )
    following = continuation(there)
    cluster.create(following)
    return f"{namespace}/{text(following, 'metadata', 'name')}"


def _without_the_queue(role: JsonObject) -> JsonObject:
    """What Kueue wrote into the pods on admission belongs to the old allocation; what was asked of it stays."""
    template = child(role, "template", "spec", "template")
    metadata, spec = dict(child(template, "metadata")), dict(child(template, "spec"))
    for table in metadata.keys() & {"annotations", "labels"}:
        kept = {key: value for key, value in child(metadata, table).items() if not _of_an_allocation(key)}
        metadata[table] = kept
    gates = [gate for gate in children(spec, "schedulingGates") if not _of_an_allocation(text(gate, "name"))]
    spec.pop("schedulingGates", None)
    if gates:
        spec["schedulingGates"] = gates
    return changed(role, {**template, "metadata": metadata, "spec": spec}, "template", "spec", "template")


def _of_an_allocation(key: str) -> bool:
    return key.startswith(("autoscaling.x-k8s.io/", "kueue.x-k8s.io/")) and key not in _ASKED
