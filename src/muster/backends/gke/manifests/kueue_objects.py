"""Kueue's objects for one kind of machine and one way of buying it; what the cluster needs before the first run."""

from __future__ import annotations

from muster.backends.gke.manifests.placement import Placement, mode_of
from muster.core.typed_json import Json, JsonObject, changed

Manifest = dict[str, Json]

API = "kueue.x-k8s.io/v1beta2"
RBAC = "rbac.authorization.k8s.io/v1"
CHECK = "muster-dws"
TOPOLOGY = "muster-gce"
CPU_FLAVOR = "muster-cpu"
COVERED = ("cpu", "memory", "ephemeral-storage", "nvidia.com/gpu")
"""Every resource that pods request: one left out keeps the job waiting ("resource cpu unavailable in ClusterQueue")."""
SUPERVISORS_AT_ONCE = 32


def queue_objects(placement: Placement) -> list[Manifest]:
    """Topology, flavours, the DWS check, cluster queue and local queue, in the order of creation."""
    mode = mode_of(placement)
    objects = []
    if mode.topology:
        objects.append(_topology())
    objects += [_host_flavor(placement), _cpu_flavor(placement)]
    if mode.queued:
        objects += [_request_config(), _admission_check()]
    return [*objects, _cluster_queue(placement, queued=mode.queued), _local_queue(placement)]


def account_objects(placement: Placement) -> list[Manifest]:
    """The identity of a run's pods, and what it may do here: queue the rest of its own run.

    Buckets are bound to it by Workload Identity's principal, so it needs no annotation.
    """
    name, namespace = placement.options.service_account, placement.options.namespace
    metadata: JsonObject = {"name": name, "namespace": namespace, "labels": {"app.kubernetes.io/managed-by": "muster"}}
    jobsets = {"apiGroups": ["jobset.x-k8s.io"], "resources": ["jobsets"], "verbs": ["get", "list", "create", "patch"]}
    subject = {"kind": "ServiceAccount", "name": name, "namespace": namespace}
    role = {"apiGroup": "rbac.authorization.k8s.io", "kind": "Role", "name": name}
    return [
        {"apiVersion": "v1", "kind": "ServiceAccount", "metadata": metadata},
        {"apiVersion": RBAC, "kind": "Role", "metadata": metadata, "rules": [jobsets]},
        {"apiVersion": RBAC, "kind": "RoleBinding", "metadata": metadata, "roleRef": role, "subjects": [subject]},
    ]


def _topology() -> Manifest:
    levels = [f"cloud.google.com/gce-topology-{level}" for level in ("block", "subblock", "host")]
    return _object("Topology", TOPOLOGY, {"levels": [{"nodeLabel": n} for n in [*levels, "kubernetes.io/hostname"]]})


def _host_flavor(placement: Placement) -> Manifest:
    mode = mode_of(placement)
    spec: dict[str, Json] = {"nodeLabels": dict(mode.node_selector)} if mode.node_selector else {}
    if mode.topology:
        spec["topologyName"] = TOPOLOGY
    return _object("ResourceFlavor", placement.queue_objects, spec)


def _cpu_flavor(placement: Placement) -> Manifest:
    # A flavour of its own: an admission check acts on flavours, and the supervisor must not be asked of DWS.
    labels = {"cloud.google.com/gke-nodepool": placement.options.supervisor_pool}
    return _object("ResourceFlavor", CPU_FLAVOR, {"nodeLabels": labels})


def _request_config() -> Manifest:
    spec: JsonObject = {
        "provisioningClassName": "queued-provisioning.gke.io",
        "managedResources": ["nvidia.com/gpu"],
        "podSetMergePolicy": "IdenticalWorkloadSchedulingRequirements",
        "retryStrategy": {"backoffLimitCount": 2, "backoffBaseSeconds": 60, "backoffMaxSeconds": 1800},
    }
    return _object("ProvisioningRequestConfig", CHECK, spec)


def _admission_check() -> Manifest:
    parameters = {"apiGroup": "kueue.x-k8s.io", "kind": "ProvisioningRequestConfig", "name": CHECK}
    spec: JsonObject = {"controllerName": "kueue.x-k8s.io/provisioning-request", "parameters": parameters}
    return _object("AdmissionCheck", CHECK, spec)


def _cluster_queue(placement: Placement, *, queued: bool) -> Manifest:
    nodes = placement.options.nodes_in_quota or placement.hosts
    machine = placement.machine
    hosts: JsonObject = {
        "cpu": machine.vcpus * nodes,
        "memory": f"{machine.memory_gb * nodes}G",
        "ephemeral-storage": f"{nodes}Ti",
        "nvidia.com/gpu": machine.gpus * nodes,
    }
    supervisors: JsonObject = {
        "cpu": SUPERVISORS_AT_ONCE,
        "memory": f"{4 * SUPERVISORS_AT_ONCE}Gi",
        "ephemeral-storage": "1Ti",
        "nvidia.com/gpu": 0,
    }
    flavors = [_flavor_quota(placement.queue_objects, hosts), _flavor_quota(CPU_FLAVOR, supervisors)]
    spec: Manifest = {
        "namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": placement.options.namespace}},
        "queueingStrategy": "BestEffortFIFO",
        "resourceGroups": [{"coveredResources": list(COVERED), "flavors": flavors}],
    }
    if queued:
        # v1beta2 has no spec.admissionChecks: a lenient apply would drop it, and no request would ever be made.
        check = {"name": CHECK, "onFlavors": [placement.queue_objects]}
        spec["admissionChecksStrategy"] = {"admissionChecks": [check]}
    return _object("ClusterQueue", placement.queue_objects, spec)


def _flavor_quota(name: str, quotas: JsonObject) -> Manifest:
    return {"name": name, "resources": [{"name": resource, "nominalQuota": quotas[resource]} for resource in COVERED]}


def _local_queue(placement: Placement) -> Manifest:
    queue = _object("LocalQueue", placement.queue, {"clusterQueue": placement.queue_objects})
    return changed(queue, placement.options.namespace, "metadata", "namespace")


def _object(kind: str, name: str, spec: JsonObject) -> Manifest:
    metadata: Manifest = {"name": name, "labels": {"app.kubernetes.io/managed-by": "muster"}}
    return {"apiVersion": API, "kind": kind, "metadata": metadata, "spec": spec}
