"""Check that a run's queue exists: Kueue accepts a job for any queue name, and leaves it waiting forever."""

from __future__ import annotations

from muster.backends.gke.kubernetes.api import Cluster
from muster.backends.gke.manifests.kueue_objects import API
from muster.core.errors import UsageError
from muster.core.typed_json import JsonObject, text

LABEL = "kueue.x-k8s.io/queue-name"


def refuse_unknown_queue(cluster: Cluster, jobset: JsonObject) -> None:
    """Before anything is created; nothing for a run without a queue, or a cluster that does not know Kueue's kinds.

    Raises:
        UsageError: no such queue; the hint names those that are there.
    """
    name, namespace = text(jobset, "metadata", "labels", LABEL), text(jobset, "metadata", "namespace")
    queue: JsonObject = {"apiVersion": API, "kind": "LocalQueue", "metadata": {"name": name, "namespace": namespace}}
    if not name or cluster.get(queue) is not None:
        return
    if not cluster.knows(queue):
        return
    there = sorted(text(queue, "metadata", "name") for queue in cluster.list(API, "localqueues", namespace=namespace))
    hint = "muster up RUN.yaml makes it" + (f"; or resources.queue: {', '.join(there)}" if there else "")
    raise UsageError(f"there is no queue {name!r} in namespace {namespace!r} of the cluster", hint=hint)
