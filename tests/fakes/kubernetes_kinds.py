"""The kinds that the API server in memory serves, how it tells of them, and which of their fields never change."""

from __future__ import annotations

from typing import Any

KINDS = {
    "api/v1": {
        "Namespace": ("namespaces", False),
        "Node": ("nodes", False),
        "ConfigMap": ("configmaps", True),
        "Secret": ("secrets", True),
        "Service": ("services", True),
        "ServiceAccount": ("serviceaccounts", True),
        "Pod": ("pods", True),
        "Event": ("events", True),
        "PodTemplate": ("podtemplates", True),
    },
    "apis/apps/v1": {"DaemonSet": ("daemonsets", True), "Deployment": ("deployments", True)},
    "apis/monitoring.googleapis.com/v1": {"PodMonitoring": ("podmonitorings", True)},
    "apis/rbac.authorization.k8s.io/v1": {
        "Role": ("roles", True),
        "RoleBinding": ("rolebindings", True),
        "ClusterRole": ("clusterroles", False),
        "ClusterRoleBinding": ("clusterrolebindings", False),
    },
    "apis/batch/v1": {"Job": ("jobs", True)},
    "apis/policy/v1": {"PodDisruptionBudget": ("poddisruptionbudgets", True)},
    "apis/scheduling.k8s.io/v1": {"PriorityClass": ("priorityclasses", False)},
    "apis/jobset.x-k8s.io/v1alpha2": {"JobSet": ("jobsets", True)},
    "apis/resource.k8s.io/v1": {"ResourceClaimTemplate": ("resourceclaimtemplates", True)},
    "apis/networking.gke.io/v1": {
        "Network": ("networks", False),
        "GKENetworkParamSet": ("gkenetworkparamsets", False),
    },
    "apis/kueue.x-k8s.io/v1beta2": {
        "Topology": ("topologies", False),
        "ResourceFlavor": ("resourceflavors", False),
        "ProvisioningRequestConfig": ("provisioningrequestconfigs", False),
        "AdmissionCheck": ("admissionchecks", False),
        "ClusterQueue": ("clusterqueues", False),
        "LocalQueue": ("localqueues", True),
        "Workload": ("workloads", True),
    },
    "apis/autoscaling.x-k8s.io/v1": {"ProvisioningRequest": ("provisioningrequests", True)},
}
IMMUTABLE = {
    "Job": ("spec.selector", "spec.template", "spec.completions", "spec.completionMode", "spec.podFailurePolicy"),
    "RoleBinding": ("roleRef",),
    "ClusterRoleBinding": ("roleRef",),
    "Deployment": ("spec.selector",),
    "DaemonSet": ("spec.selector",),
    "Service": ("spec.clusterIP",),
    "LocalQueue": ("spec.clusterQueue",),
    "Topology": ("spec.levels",),
    "ResourceFlavor": ("spec.topologyName",),
    "AdmissionCheck": ("spec.controllerName",),
    "ProvisioningRequest": ("spec",),
    "Pod": ("spec.containers", "spec.initContainers", "spec.volumes", "spec.nodeSelector", "spec.hostname"),
    "Secret": ("type",),
}
"""Fields that a server (by its own checks or by CEL) refuses to change once they are set."""


def changed_for_good(old: dict[str, Any], new: dict[str, Any]) -> list[str]:
    """The immutable fields in which ``new`` differs from ``old``."""
    fields = IMMUTABLE.get(str(old.get("kind")), ())
    if old.get("immutable") is True:
        fields = (*fields, "data")
    return [one for one in fields if _at(old, one) is not None and _at(old, one) != _at(new, one)]


def _at(one: Any, path: str) -> Any:
    for word in path.split("."):
        one = one.get(word) if isinstance(one, dict) else None
    return one


def discovery(path: str) -> dict[str, Any] | None:
    """What the server tells of its version, groups and kinds; None for any other path."""
    if path == "version":
        return {"major": "1", "minor": "34", "gitVersion": "v1.34.1-gke.1829001"}
    if path == "api":
        return {"kind": "APIVersions", "versions": ["v1"]}
    if path == "apis":
        groups: dict[str, list[dict[str, str]]] = {}
        for key in KINDS:
            if key != "api/v1":
                _, group, version = key.split("/")
                groups.setdefault(group, []).append({"groupVersion": f"{group}/{version}", "version": version})
        rows = [{"name": group, "versions": found, "preferredVersion": found[0]} for group, found in groups.items()]
        return {"kind": "APIGroupList", "apiVersion": "v1", "groups": rows}
    if path in KINDS:
        verbs = ["create", "delete", "get", "list", "patch", "update", "watch"]
        rows = [
            {"name": plural, "singularName": kind.lower(), "namespaced": namespaced, "kind": kind, "verbs": verbs}
            for kind, (plural, namespaced) in KINDS[path].items()
        ]
        version = path.removeprefix("apis/").removeprefix("api/")
        return {"kind": "APIResourceList", "apiVersion": "v1", "groupVersion": version, "resources": rows}
    return None
