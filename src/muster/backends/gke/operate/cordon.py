"""A node on which no new pods should be placed (``kubectl cordon``); those that run there stay."""

from __future__ import annotations

from collections.abc import Callable

from muster.backends.gke.kubernetes.api import Cluster
from muster.backends.gke.kubernetes.config import own_cluster
from muster.core import environment
from muster.core.clock import SystemClock
from muster.core.errors import BackendError
from muster.core.typed_json import JsonObject, at

#: Annotation of the node: why it is cordoned.
WHY = "muster/cordoned-because"


def cordon(node: str, reason: str, connect: Callable[[], Cluster] | None = None) -> str:
    """Cordon ``node``, as the account of this pod; what is so now.

    Raises:
        AccessError: the account may not (it needs ``get`` and ``patch`` on nodes), or this is no pod.
        BackendError: the API server does not answer, or has no such node.
    """
    cluster = connect() if connect else own_cluster(SystemClock(), environment.inherited())
    named: JsonObject = {"apiVersion": "v1", "kind": "Node", "metadata": {"name": node}}
    found = cluster.get(named)
    if found is None:
        raise BackendError(f"the API server has no node {node}")
    if at(found, "spec", "unschedulable") is True:
        return f"node {node} is cordoned already"
    cluster.apply({**named, "metadata": {"name": node, "annotations": {WHY: reason}}, "spec": {"unschedulable": True}})
    return f"node {node} is cordoned: it gets no new pods (kubectl uncordon {node} ends that)"
