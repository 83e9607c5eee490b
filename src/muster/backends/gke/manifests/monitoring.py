"""What has Managed Service for Prometheus read a run's metrics page: only where ``metrics.port`` is given. Pure.

https://github.com/GoogleCloudPlatform/prometheus-engine (doc/api.md): ``PodMonitoring``, and a collector that may read
the one Secret that it names.
"""

from __future__ import annotations

from muster.backends.gke.manifests.placement import Placement
from muster.core.typed_json import Json, JsonObject

API = "monitoring.googleapis.com/v1"
RBAC = "rbac.authorization.k8s.io/v1"
#: Kinds that a run with a metrics page has more than others: (api, kind, plural).
KINDS = ((API, "PodMonitoring", "podmonitorings"), (RBAC, "RoleBinding", "rolebindings"), (RBAC, "Role", "roles"))
KEY = "token"
#: The collector's account: of GKE's managed collection, and of an operator that was installed by hand.
COLLECTOR, NAMESPACES = "collector", ("gke-gmp-system", "gmp-system")
INTERVAL = "30s"


def secret_name(jobset: str) -> str:
    """Of the Secret with what a scrape shows; made at submission: it is in no file."""
    return f"{jobset}-metrics"


def monitoring_objects(placement: Placement, selector: JsonObject) -> list[dict[str, Json]]:
    """None where the run has no page. ``selector``: of the supervisors' pods; the one that stands by serves none."""
    port = placement.metrics_port
    if port is None:
        return []
    name = secret_name(placement.name)
    metadata: JsonObject = {
        "name": name,
        "namespace": placement.options.namespace,
        "labels": dict(placement.labels),
    }
    reads: JsonObject = {
        "apiGroups": [""],
        "resources": ["secrets"],
        "resourceNames": [name],
        "verbs": ["get", "list", "watch"],
    }
    role: JsonObject = {"apiGroup": "rbac.authorization.k8s.io", "kind": "Role", "name": name}
    subjects: list[Json] = [{"kind": "ServiceAccount", "name": COLLECTOR, "namespace": place} for place in NAMESPACES]
    credentials: JsonObject = {"secret": {"name": name, "key": KEY}}
    endpoint: JsonObject = {
        "port": port,
        "path": "/metrics",
        "interval": INTERVAL,
        "authorization": {"type": "Bearer", "credentials": credentials},
    }
    spec: JsonObject = {"selector": selector, "endpoints": [endpoint], "targetLabels": {"metadata": ["pod", "node"]}}
    return [
        {"apiVersion": RBAC, "kind": "Role", "metadata": metadata, "rules": [reads]},
        {"apiVersion": RBAC, "kind": "RoleBinding", "metadata": metadata, "roleRef": role, "subjects": subjects},
        {"apiVersion": API, "kind": "PodMonitoring", "metadata": metadata, "spec": spec},
    ]
