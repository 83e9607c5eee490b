"""Kubernetes objects as one resource of ``up``: applied in order on the cluster that Google names.

Controllers among them are waited for: what the next objects need is their webhooks. Quotas of a queue are never
lowered: another run file of the same machines may need what is there.
"""

from __future__ import annotations

import base64
from dataclasses import dataclass
from typing import Literal

from muster.backends.gke.kubernetes.api import Cluster
from muster.backends.gke.kubernetes.connection import root_of
from muster.backends.gke.manifests.kueue_objects import keeping_quota
from muster.backends.gke.provision.inventory.resource_names import Site
from muster.backends.google.http import Call
from muster.backends.google.project.resources import Found, Resource, differences
from muster.backends.google.session import Session
from muster.core.errors import BackendError, ConflictError, MusterError
from muster.core.typed_json import JsonObject, changed, children, text, whole

APPLY = "fieldManager=muster&force=true&fieldValidation=Strict"
CLUSTER_SCOPED_FIRST = ("CustomResourceDefinition", "Namespace")
READY_WITHIN_S = 300.0
"""A controller's image is small; a node for it may have to be made first."""
LOOK_EVERY_S = 5.0
TRIES = 5
"""Of a change that collides with another one."""
PROBES: dict[str, JsonObject] = {
    "kueue-controller-manager": {
        "apiVersion": "kueue.x-k8s.io/v1beta2",
        "kind": "ResourceFlavor",
        "metadata": {"name": "muster-probe"},
    },
    "jobset-controller-manager": {
        "apiVersion": "jobset.x-k8s.io/v1alpha2",
        "kind": "JobSet",
        "metadata": {"name": "muster-probe", "namespace": "default"},
        "spec": {"replicatedJobs": []},
    },
}
"""Deployment -> an object that its webhooks look at, sent as the server's dry run: an answer of any kind but the API
server's own complaint about the webhook shows that it is reached."""


def connect(site: Site, session: Session) -> Cluster | None:
    """The cluster's API; None while there is no cluster.

    Raises:
        AccessError, BackendError: whether there is one is not said.
    """
    reply = session.find(Call(method="GET", url=f"{site.container}/clusters/{site.cluster}"))
    if reply is None or not reply.body.get("endpoint"):
        return None
    from muster.backends.gke.kubernetes.config import google_cluster  # lightkube: only once a cluster is contacted

    authority = text(reply.body, "masterAuth", "clusterCaCertificate")
    pem = base64.b64decode(authority).decode() if authority else None
    return google_cluster(f"https://{reply.body['endpoint']}", pem, session)


@dataclass(frozen=True, kw_only=True)
class Objects(Resource):
    """A set of Kubernetes objects, applied in order; they go with the cluster, or one by one where it stays."""

    site: Site
    manifests: tuple[JsonObject, ...]
    secret: bool = False
    removed_with_cluster: bool = True
    foreign: Literal["refuse", "use"] = "use"

    def look(self, session: Session) -> Found:
        cluster = connect(self.site, session)
        if cluster is None:
            return Found(state="absent")
        if not self.removed_with_cluster:
            # To be removed: any one of them counts, even if it differs.
            return Found(state="there" if any(cluster.get(manifest) for manifest in self.manifests) else "absent")
        waiting = False
        for manifest in self.manifests:
            there = cluster.get(manifest)
            if there is None:
                return Found(state="absent")
            wanted = {key: value for key, value in keeping_quota(manifest, there).items() if key != "status"}
            if list(differences(wanted, there)):
                return Found(state="absent")
            waiting = waiting or (manifest["kind"] == "Deployment" and not _available(there))
        return Found(state="changing" if waiting else "there")

    def make(self, session: Session) -> None:
        cluster = self._cluster(session)
        for manifest in sorted(self.manifests, key=lambda manifest: manifest["kind"] not in CLUSTER_SCOPED_FIRST):
            if manifest["kind"] == "ClusterQueue":
                raise_quota(cluster, manifest)
            else:
                cluster.apply(manifest)
        self._wait_for_controllers(cluster)

    def settle(self, session: Session) -> None:
        """See ``Resource``: the controllers among the objects are available, and their webhooks answer."""
        self._wait_for_controllers(self._cluster(session))

    def give_up(self, session: Session) -> str | None:
        """See ``Resource``: nothing has to end before they can be removed."""
        return None

    def _cluster(self, session: Session) -> Cluster:
        cluster = connect(self.site, session)
        if cluster is None:
            raise BackendError(f"cluster {self.site.cluster} has no endpoint yet", hint="run the same command again")
        return cluster

    def _wait_for_controllers(self, cluster: Cluster) -> None:
        """Raises BackendError with the name and the reason of the one that is not ready in time."""
        until_ns = cluster.clock.monotonic_ns() + int(READY_WITHIN_S * 1e9)
        for manifest in self.manifests:
            while manifest["kind"] == "Deployment" and (trouble := _not_ready(cluster, manifest)):
                if cluster.clock.monotonic_ns() >= until_ns:
                    namespace, name = text(manifest, "metadata", "namespace"), text(manifest, "metadata", "name")
                    raise BackendError(
                        f"{namespace}/{name} is not ready after {READY_WITHIN_S / 60:.0f} minutes: {trouble}",
                        hint=f"kubectl -n {namespace} describe pods shows why; then the same command again",
                    )
                cluster.clock.sleep(LOOK_EVERY_S)

    def remove(self, session: Session) -> None:
        cluster = None if self.removed_with_cluster else connect(self.site, session)
        if cluster is not None:
            for manifest in reversed(self.manifests):
                cluster.delete(manifest)

    def requests(self) -> list[Call]:
        return [
            Call(
                method="PATCH",
                url=f"https://CLUSTER/{root_of(text(manifest, 'apiVersion'))}/.../"
                f"{text(manifest, 'metadata', 'name')}?{APPLY}",
                body=manifest,
                content_type="application/apply-patch+yaml",
                secret=self.secret,
            )
            for manifest in self.manifests
        ]


def raise_quota(cluster: Cluster, manifest: JsonObject) -> None:
    """Read, raise the quotas, write over just that version: another ``up`` may do the same now."""
    for _ in range(TRIES):
        there = cluster.get(manifest)
        if there is None:
            cluster.apply(manifest)
            return
        version = text(there, "metadata", "resourceVersion")
        try:
            cluster.apply(changed(keeping_quota(manifest, there), version, "metadata", "resourceVersion"))
        except ConflictError:
            continue
        return
    name = text(manifest, "metadata", "name")
    raise BackendError(f"ClusterQueue {name} changes all the time", hint="run the same command again")


def _not_ready(cluster: Cluster, manifest: JsonObject) -> str | None:
    """What a controller is not ready for; None: its pods are available, and its webhooks answer."""
    there = cluster.get(manifest) or {}
    if not _available(there):
        rows = children(there, "status", "conditions")
        said = [text(row, "message") for row in rows if text(row, "type") == "Available"]
        return (said[-1] if said else "").rstrip(".") or "its pods have not started"
    probe = PROBES.get(text(manifest, "metadata", "name"))
    try:
        if probe is not None:
            cluster.apply(probe, dry_run=True)
    except MusterError as error:
        return str(error) if "failed calling webhook" in str(error) else None
    return None


def _available(deployment: JsonObject) -> bool:
    """Its newest pods, all of them: those of an older Configuration do not count."""
    seen = whole(deployment, "status", "observedGeneration") >= whole(deployment, "metadata", "generation")
    wanted = whole(deployment, "spec", "replicas", default=1)
    updated = whole(deployment, "status", "updatedReplicas") >= wanted
    rows = children(deployment, "status", "conditions")
    available = any(text(row, "type") == "Available" and text(row, "status") == "True" for row in rows)
    return seen and updated and available and whole(deployment, "status", "replicas", default=wanted) <= wanted
