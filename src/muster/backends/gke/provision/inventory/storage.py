"""Buckets, who may write to them, and the image repository."""

from __future__ import annotations

import urllib.parse
from dataclasses import dataclass

from muster.backends.gke.provision.inventory.policies import PROJECTS, STORAGE, Grant, of_bucket
from muster.backends.gke.provision.inventory.resource_names import Site
from muster.backends.gke.provision.inventory.resources import LABEL, Found, Resource, RestResource
from muster.backends.google.http import Call
from muster.backends.google.session import Session, refusal
from muster.core.errors import AccessError, ConflictError
from muster.core.typed_json import JsonObject, children, text

ROLE = "roles/storage.objectUser"


def storage(site: Site) -> list[Resource]:
    """Every bucket of the run file with its binding, and a repository for images."""
    result: list[Resource] = [_repository(site)]
    for name in site.buckets:
        # The workload pool comes into being with the first cluster of the project that has one.
        needs = (f"buckets/{name}", f"clusters/{site.cluster}")
        binding = Binding(key=f"bindings/{name}", needs=needs, policy=of_bucket(name), role=ROLE, site=site)
        result += [_bucket(site, name), binding]
    return result


def _repository(site: Site) -> RestResource:
    folder = f"https://artifactregistry.googleapis.com/v1/projects/{site.project}/locations/{site.region}"
    body: JsonObject = {"format": "DOCKER", "description": "made by muster", "labels": LABEL}
    return RestResource(
        key=f"repositories/{site.prefix}",
        url=f"{folder}/repositories/{site.prefix}",
        create=Call(method="POST", url=f"{folder}/repositories?repositoryId={site.prefix}", body=body),
        owner=("labels", "managed-by"),
        compared={"format": "DOCKER"},
        needs=("services",),
        operations=f"{folder}/operations",
        bills="the bytes of its images",
    )


def _bucket(site: Site, name: str) -> Bucket:
    body: JsonObject = {
        "name": name,
        "location": site.region.upper(),
        "hierarchicalNamespace": {"enabled": True},
        "iamConfiguration": {"uniformBucketLevelAccess": {"enabled": True}, "publicAccessPrevention": "enforced"},
        # Deleted objects would be kept, and billed, for a week.
        "softDeletePolicy": {"retentionDurationSeconds": "0"},
        "labels": LABEL,
    }
    return Bucket(
        key=f"buckets/{name}",
        url=f"{STORAGE}/b/{name}",
        create=Call(method="POST", url=f"{STORAGE}/b?project={site.project}", body=body),
        owner=("labels", "managed-by"),
        needs=("services",),
        foreign="use",
        bills="the bytes in it",
    )


@dataclass(frozen=True, kw_only=True)
class Bucket(RestResource):
    """A bucket in the cluster's region with a hierarchical namespace; one that is there already is used as it is."""

    def look(self, session: Session) -> Found:
        try:
            return super().look(session)
        except AccessError as error:
            raise ConflictError(
                f"bucket {self.key.removeprefix('buckets/')} belongs to another project or user: {error}",
                hint="bucket names are shared by all the world; choose another",
            ) from error

    def remove(self, session: Session) -> None:
        """Empty it and remove it."""
        while rows := self._rows(session, f"{self.url}/o?versions=true"):
            for row in rows:
                name = urllib.parse.quote(text(row, "name"), safe="")
                generation = f"?generation={row['generation']}" if "generation" in row else ""
                session.delete(f"{self.url}/o/{name}{generation}")
        # In a hierarchical namespace folders are things of their own, and go from the inside out.
        while rows := self._rows(session, f"{self.url}/folders"):
            for name in sorted((text(row, "name") for row in rows), key=lambda name: -name.count("/")):
                session.delete(f"{self.url}/folders/{urllib.parse.quote(name, safe='')}")
        super().remove(session)

    def _rows(self, session: Session, url: str) -> list[JsonObject]:
        reply = session.send(Call(method="GET", url=url))
        if reply.status == 404 or reply.status == 409:
            # The bucket is gone, or has no hierarchical namespace and therefore no folders.
            return []
        if reply.status >= 300:
            raise refusal(Call(method="GET", url=url), reply)
        return children(reply.body, "items")


@dataclass(frozen=True, kw_only=True)
class Binding(Grant):
    """The pods' identity may read and write the bucket's objects: by principal, no Google service account."""

    site: Site

    def member(self, session: Session) -> str:
        url = f"{PROJECTS}/{self.site.project}"
        return principal(self.site, str(session.ok(Call(method="GET", url=url)).body["projectNumber"]))

    def shown_member(self) -> str:
        return principal(self.site, "PROJECT_NUMBER")


def principal(site: Site, project_number: str) -> str:
    """The Kubernetes service account as IAM names it (Workload Identity Federation)."""
    pool = f"projects/{project_number}/locations/global/workloadIdentityPools/{site.project}.svc.id.goog"
    options = site.placement.options
    return f"principal://iam.googleapis.com/{pool}/subject/ns/{options.namespace}/sa/{options.service_account}"
