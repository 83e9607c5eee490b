"""Buckets, who may write to them, and the image repository."""

from __future__ import annotations

from dataclasses import dataclass

from muster.backends.gke.provision.inventory.resource_names import Site
from muster.backends.google.http import Call
from muster.backends.google.project.buckets import bucket
from muster.backends.google.project.policies import PROJECTS, Grant, of_bucket
from muster.backends.google.project.resources import LABEL, Resource, RestResource
from muster.backends.google.session import Session
from muster.core.typed_json import JsonObject

ROLE = "roles/storage.objectUser"


def storage(site: Site) -> list[Resource]:
    """Every bucket of the run file with its binding, and a repository for images."""
    result: list[Resource] = [_repository(site)]
    for name in site.buckets:
        # The workload pool comes into being with the first cluster of the project that has one.
        needs = (f"buckets/{name}", f"clusters/{site.cluster}")
        binding = Binding(key=f"bindings/{name}", needs=needs, policy=of_bucket(name), role=ROLE, site=site)
        result += [bucket(site.project, site.region, name), binding]
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
