"""Would the cluster's Kueue end this run for a host that is lost or slow? Read from its live Configuration."""

from __future__ import annotations

from muster.backends.gke.kubernetes.api import Cluster
from muster.backends.gke.manifests import kueue_configuration as kueue
from muster.backends.gke.manifests.kueue_objects import API
from muster.backends.gke.manifests.placement import LEAD_S
from muster.backends.gke.operate.queue_check import LABEL
from muster.core.errors import AccessError
from muster.core.typed_json import JsonObject, children, text

HINT = (
    f"in ConfigMap {kueue.NAMESPACE}/{kueue.CONFIG_MAP}: waitForPodsReady: {{timeout: 8760h, recoveryTimeout: 0s}}, "
    "then restart its Deployment; muster up does so on clusters that it made"
)


def kueue_warnings(cluster: Cluster, jobset: JsonObject, *, max_hours: float | None = None) -> list[str]:
    """One sentence for each way in which Kueue would evict the run, which holds hosts for ``max_hours`` (None: for any
    time); none for a run without a queue.

    Who may not read Kueue's namespace is told so: that is no proof of anything.
    """
    if not text(jobset, "metadata", "labels", LABEL):
        return []
    try:
        config = cluster.get(_object("v1", "ConfigMap", kueue.CONFIG_MAP))
        deployment = cluster.get(_object("apps/v1", "Deployment", kueue.DEPLOYMENT)) or {}
    except AccessError as error:
        return [f"Kueue's Configuration cannot be read, so it may evict a run that is a host short: {error}"]
    if config is None and not deployment:
        where = f"{kueue.NAMESPACE}/{kueue.CONFIG_MAP}"
        return [f"Kueue's Configuration is not in {where}, so it may evict a run that is a host short"]
    configuration = kueue.parsed(text(config, "data", kueue.KEY)) or {}
    found = kueue.evictions(
        configuration,
        arguments=kueue.arguments_of(deployment),
        release=kueue.release_of(deployment),
        topology=_by_topology(cluster, jobset),
        # Its hours count from its first host, Kueue's from before it.
        lasts_s=kueue.LONGEST_RUN_S if max_hours is None else max_hours * 3600 + LEAD_S,
    )
    return [f"Kueue of this cluster ends runs: {risk} ({HINT})" for risk in found]


def _by_topology(cluster: Cluster, jobset: JsonObject) -> bool:
    """Whether a flavour of the run's queue assigns nodes by topology; who may not look is taken to have one."""
    name, namespace = text(jobset, "metadata", "labels", LABEL), text(jobset, "metadata", "namespace")
    try:
        local = cluster.get(_queue("LocalQueue", name, namespace))
        queue = cluster.get(_queue("ClusterQueue", text(local, "spec", "clusterQueue"), "")) if local else None
        flavors = cluster.list(API, "resourceflavors")
    except AccessError:
        return True
    groups = children(queue, "spec", "resourceGroups")
    ours = {text(flavor, "name") for group in groups for flavor in children(group, "flavors")}
    return any(
        text(flavor, "spec", "topologyName") and (not ours or text(flavor, "metadata", "name") in ours)
        for flavor in flavors
    )


def _queue(kind: str, name: str, namespace: str) -> JsonObject:
    return {"apiVersion": API, "kind": kind, "metadata": {"name": name or "none", "namespace": namespace or "default"}}


def _object(api: str, kind: str, name: str) -> JsonObject:
    return {"apiVersion": api, "kind": kind, "metadata": {"name": name, "namespace": kueue.NAMESPACE}}
