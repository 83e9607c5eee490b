"""Kueue's objects for one kind of machine and one way of buying it; what the cluster needs before the first run."""

from __future__ import annotations

import re

from muster.backends.gke.manifests.placement import SUPERVISOR_PRIORITY, Placement, mode_of
from muster.core.typed_json import Json, JsonObject, changed, children, text, texts

Manifest = dict[str, Json]

API = "kueue.x-k8s.io/v1beta2"
RBAC = "rbac.authorization.k8s.io/v1"
CHECK = "muster-dws"
CPU_FLAVOR = "muster-cpu"
READS_NODES = "muster-reads-nodes"
COVERED = ("cpu", "memory", "ephemeral-storage")
"""Every resource that pods request, with GPUs or TPUs: one left out keeps the job waiting ("resource cpu unavailable
in ClusterQueue")."""
SUPERVISORS_AT_ONCE = 32
_FACTORS = {
    "m": 1e-3, "": 1.0, "k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "P": 1e15,
    "Ki": 2.0**10, "Mi": 2.0**20, "Gi": 2.0**30, "Ti": 2.0**40, "Pi": 2.0**50,
}  # fmt: skip
_QUANTITY = re.compile(r"(\d+(?:\.\d+)?)(m|k|M|G|T|P|Ki|Mi|Gi|Ti|Pi|)")


def queue_objects(placement: Placement) -> list[Manifest]:
    """Flavours, the DWS check, cluster queue and local queue, in the order of creation.

    No topology: with it Kueue binds each pod to a node, and evicts the whole run when a second one is lost before the
    first is replaced (v0.19.2 pkg/controller/tas/node_controller.go: no feature gate is asked). Pods prefer their
    run's block by themselves (``pods``).
    """
    mode = mode_of(placement)
    objects = [_host_flavor(placement), _cpu_flavor(placement)]
    if mode.queued:
        objects += [_request_config(), _admission_check()]
    return [*objects, _cluster_queue(placement, queued=mode.queued), _local_queue(placement)]


def keeping_quota(manifest: JsonObject, there: JsonObject) -> JsonObject:
    """A ClusterQueue as wanted, but with no quota below that of the one that is there; other objects as they are.

    The queue is shared by all run files of the same machines and mode. Rows of other hands in the same group (more
    flavours, a limit on borrowing) stay too, as long as the group covers the same resources.
    """
    if manifest.get("kind") != "ClusterQueue":
        return manifest
    (group,) = children(manifest, "spec", "resourceGroups")
    covered = texts(group, "coveredResources")
    ours = {text(flavor, "name"): flavor for flavor in children(group, "flavors")}
    held = {
        text(flavor, "name"): flavor
        for row in children(there, "spec", "resourceGroups")
        for flavor in children(row, "flavors")
        if set(texts(row, "coveredResources")) == set(covered)
    }
    flavors = [_more(flavor, held.get(name, {})) for name, flavor in ours.items()]
    flavors += [flavor for name, flavor in held.items() if name not in ours]
    return changed(manifest, [changed(group, flavors, "flavors")], "spec", "resourceGroups")


def _more(wanted: JsonObject, there: JsonObject) -> JsonObject:
    """The larger of two quotas for each resource of a flavour, with what else its row there says."""
    held = {text(row, "name"): row for row in children(there, "resources")}
    rows = []
    for row in children(wanted, "resources"):
        before = held.get(text(row, "name"), {})
        larger = _quantity(before.get("nominalQuota")) > _quantity(row["nominalQuota"])
        rows.append({**before, **row, "nominalQuota": before["nominalQuota"] if larger else row["nominalQuota"]})
    return changed(wanted, rows, "resources")


def _quantity(value: Json) -> float:
    """Of a number as Kubernetes writes it (``500m``, ``4Gi``); -1 for what is none."""
    found = _QUANTITY.fullmatch(str(value))
    return float(found[1]) * _FACTORS[found[2]] if found else -1.0


def account_objects(placement: Placement) -> list[Manifest]:
    """The identity of a run's pods, what it may do (queue the rest of its run, read its node), its supervisors' rank.

    Buckets are bound to it by Workload Identity's principal, so it needs no annotation.
    """
    name, namespace = placement.options.service_account, placement.options.namespace
    metadata: JsonObject = {"name": name, "namespace": namespace, "labels": {"app.kubernetes.io/managed-by": "muster"}}
    jobsets = {"apiGroups": ["jobset.x-k8s.io"], "resources": ["jobsets"], "verbs": ["get", "list", "create", "patch"]}
    subject = {"kind": "ServiceAccount", "name": name, "namespace": namespace}
    role = {"apiGroup": "rbac.authorization.k8s.io", "kind": "Role", "name": name}
    return [
        priority_class(),
        {"apiVersion": "v1", "kind": "ServiceAccount", "metadata": metadata},
        {"apiVersion": RBAC, "kind": "Role", "metadata": metadata, "rules": [jobsets]},
        {"apiVersion": RBAC, "kind": "RoleBinding", "metadata": metadata, "roleRef": role, "subjects": [subject]},
        *(_reading_nodes(namespace, subject) if placement.family.topology or placement.machine.gpus else ()),
    ]


def _reading_nodes(namespace: str, subject: JsonObject) -> list[Manifest]:
    """What a host needs to learn its node's block and sub-block, and the Xids that GKE has seen there. Nodes are of no
    namespace, so neither is the role."""
    labels: JsonObject = {"app.kubernetes.io/managed-by": "muster"}
    rules = [{"apiGroups": [""], "resources": ["nodes"], "verbs": ["get"]}]
    named: JsonObject = {"name": READS_NODES, "labels": labels}
    bound: JsonObject = {"name": f"{READS_NODES}-{namespace}", "labels": labels}
    role: JsonObject = {"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": READS_NODES}
    return [
        {"apiVersion": RBAC, "kind": "ClusterRole", "metadata": named, "rules": rules},
        {"apiVersion": RBAC, "kind": "ClusterRoleBinding", "metadata": bound, "roleRef": role, "subjects": [subject]},
    ]


def priority_class() -> Manifest:
    """Of supervisors: a small pod on a shared node is the first to go otherwise, and with it all hosts' supervision."""
    metadata: JsonObject = {"name": SUPERVISOR_PRIORITY, "labels": {"app.kubernetes.io/managed-by": "muster"}}
    rank: JsonObject = {"value": 1000, "globalDefault": False, "preemptionPolicy": "Never"}
    return {"apiVersion": "scheduling.k8s.io/v1", "kind": "PriorityClass", "metadata": metadata, **rank}


def _host_flavor(placement: Placement) -> Manifest:
    mode = mode_of(placement)
    spec: dict[str, Json] = {"nodeLabels": dict(mode.node_selector)} if mode.node_selector else {}
    resource, count = placement.chips
    if count:
        # The nodes' own taint, by which every Kueue keeps the supervisor off this flavour; newer ones do not by labels
        # (``kueue_configuration.matches_by_own_keys``). Hosts tolerate it in their template: GKE adds tolerations to
        # pods, too late for Kueue.
        spec["nodeTaints"] = [{"key": resource, "value": "present", "effect": "NoSchedule"}]
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
    machine, (resource, chips) = placement.machine, placement.chips
    hosts: JsonObject = {
        "cpu": machine.vcpus * nodes,
        "memory": f"{machine.memory_gb * nodes}G",
        "ephemeral-storage": f"{nodes}Ti",
        resource: chips * nodes,
    }
    supervisors: JsonObject = {
        "cpu": SUPERVISORS_AT_ONCE,
        "memory": f"{4 * SUPERVISORS_AT_ONCE}Gi",
        "ephemeral-storage": "1Ti",
        resource: 0,
    }
    flavors = [_flavor_quota(placement.queue_objects, hosts), _flavor_quota(CPU_FLAVOR, supervisors)]
    spec: Manifest = {
        "namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": placement.options.namespace}},
        "queueingStrategy": "BestEffortFIFO",
        "resourceGroups": [{"coveredResources": [*COVERED, resource], "flavors": flavors}],
    }
    if queued:
        # v1beta2 has no spec.admissionChecks: a lenient apply would drop it, and no request would ever be made.
        check = {"name": CHECK, "onFlavors": [placement.queue_objects]}
        spec["admissionChecksStrategy"] = {"admissionChecks": [check]}
    return _object("ClusterQueue", placement.queue_objects, spec)


def _flavor_quota(name: str, quotas: JsonObject) -> Manifest:
    return {"name": name, "resources": [{"name": resource, "nominalQuota": quotas[resource]} for resource in quotas]}


def _local_queue(placement: Placement) -> Manifest:
    queue = _object("LocalQueue", placement.queue, {"clusterQueue": placement.queue_objects})
    return changed(queue, placement.options.namespace, "metadata", "namespace")


def _object(kind: str, name: str, spec: JsonObject) -> Manifest:
    metadata: Manifest = {"name": name, "labels": {"app.kubernetes.io/managed-by": "muster"}}
    return {"apiVersion": API, "kind": kind, "metadata": metadata, "spec": spec}
