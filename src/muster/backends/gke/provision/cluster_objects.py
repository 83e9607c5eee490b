"""Kubernetes objects as one resource of ``up``: applied in order on the cluster that Google names."""

from __future__ import annotations

import base64
from dataclasses import dataclass
from typing import Literal

from muster.backends.gke.google.http import Call
from muster.backends.gke.google.session import Session
from muster.backends.gke.kubernetes.api import Cluster
from muster.backends.gke.kubernetes.kind import root_of
from muster.backends.gke.provision.inventory.resource_names import Site
from muster.backends.gke.provision.inventory.resources import Found, Resource, differences
from muster.core.errors import BackendError
from muster.core.typed_json import JsonObject, text

APPLY = "fieldManager=muster&force=true&fieldValidation=Strict"
CLUSTER_SCOPED_FIRST = ("CustomResourceDefinition", "Namespace")


def connect(site: Site, session: Session) -> Cluster | None:
    """The cluster's API; None while there is no cluster."""
    reply = session.send(Call(method="GET", url=f"{site.container}/clusters/{site.cluster}"))
    if reply.status >= 300 or not reply.body.get("endpoint"):
        return None
    from muster.backends.gke.kubernetes.config import google_cluster  # lightkube: only once a cluster is contacted

    authority = text(reply.body, "masterAuth", "clusterCaCertificate")
    pem = base64.b64decode(authority).decode() if authority else None
    return google_cluster(f"https://{reply.body['endpoint']}", pem, session)


@dataclass(frozen=True, kw_only=True)
class Objects(Resource):
    """A set of Kubernetes objects, applied in order; they go with the cluster, or one by one where it stays.

    Their controllers are not waited for.
    """

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
        for manifest in self.manifests:
            there = cluster.get(manifest)
            if there is None or list(differences({k: v for k, v in manifest.items() if k != "status"}, there)):
                return Found(state="absent")
        return Found(state="there")

    def make(self, session: Session) -> None:
        cluster = connect(self.site, session)
        if cluster is None:
            raise BackendError(f"cluster {self.site.cluster} has no endpoint yet", hint="run the same command again")
        for manifest in sorted(self.manifests, key=lambda manifest: manifest["kind"] not in CLUSTER_SCOPED_FIRST):
            cluster.apply(manifest)

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
