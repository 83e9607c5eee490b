"""Buckets, who may write to them, and the image repository."""

from __future__ import annotations

import urllib.parse
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from muster.backends.gke.google.http import Call, Unreachable
from muster.backends.gke.google.session import Session, refusal
from muster.backends.gke.provision.inventory.resource_names import Site
from muster.backends.gke.provision.inventory.resources import LABEL, Found, Resource, RestResource
from muster.core.errors import AccessError, BackendError, ConflictError
from muster.core.typed_json import JsonObject, children, text, texts

STORAGE = "https://storage.googleapis.com/storage/v1"
ROLE = "roles/storage.objectUser"


def storage(site: Site) -> list[Resource]:
    """Every bucket of the run file with its binding, and a repository for images."""
    result: list[Resource] = [_repository(site)]
    for name in site.buckets:
        # The workload pool comes into being with the first cluster of the project that has one.
        needs = (f"buckets/{name}", f"clusters/{site.cluster}")
        result += [_bucket(site, name), Binding(key=f"bindings/{name}", needs=needs, site=site, bucket=name)]
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
class Binding(Resource):
    """The pods' identity may read and write the bucket's objects: by principal, no Google service account."""

    site: Site
    bucket: str
    foreign: Literal["refuse", "use"] = "use"

    def look(self, session: Session) -> Found:
        reply = session.send(Call(method="GET", url=self._url))
        if reply.status >= 300:
            return Found(state="absent")
        there = any(self._ours(row, self._member(session)) for row in children(reply.body, "bindings"))
        return Found(state="there" if there else "absent", body=reply.body)

    def make(self, session: Session) -> None:
        member = self._member(session)

        def with_member(rows: list[JsonObject]) -> list[JsonObject]:
            if any(self._ours(row, member) for row in rows):
                return rows
            return [*rows, {"role": ROLE, "members": [member]}]

        self._change(session, with_member)

    def remove(self, session: Session) -> None:
        member = self._member(session)

        def without(rows: list[JsonObject]) -> list[JsonObject]:
            kept: list[JsonObject] = []
            for row in rows:
                members = [other for other in texts(row, "members") if other != member or text(row, "role") != ROLE]
                if members:
                    kept.append({**row, "members": members})
            return kept

        self._change(session, without)

    def requests(self) -> list[Call]:
        row = {"role": ROLE, "members": [principal(self.site, "PROJECT_NUMBER")]}
        return [Call(method="GET", url=self._url), Call(method="PUT", url=self._url, body={"bindings": ["...", row]})]

    @property
    def _url(self) -> str:
        return f"{STORAGE}/b/{self.bucket}/iam"

    def _change(self, session: Session, change: Callable[[list[JsonObject]], list[JsonObject]]) -> None:
        """Read, change, write back under the policy's etag: a lost race is tried again."""
        for _ in range(5):
            reply = session.find(Call(method="GET", url=f"{self._url}?optionsRequestedPolicyVersion=3"))
            if reply is None:
                return
            policy = dict(reply.body)
            there = children(policy, "bindings")
            changed = change(there)
            if changed == there:
                return
            call = Call(method="PUT", url=self._url, body={**policy, "bindings": changed})
            try:
                answer = session.send(call)
            except Unreachable:
                continue
            if answer.status < 300:
                return
            if answer.status != 412:
                raise refusal(call, answer)
        raise BackendError(f"the policy of bucket {self.bucket} keeps changing", hint="run the same command again")

    def _member(self, session: Session) -> str:
        url = f"https://cloudresourcemanager.googleapis.com/v1/projects/{self.site.project}"
        return principal(self.site, str(session.ok(Call(method="GET", url=url)).body["projectNumber"]))

    def _ours(self, row: JsonObject, member: str) -> bool:
        return text(row, "role") == ROLE and member in texts(row, "members") and "condition" not in row


def principal(site: Site, project_number: str) -> str:
    """The Kubernetes service account as IAM names it (Workload Identity Federation)."""
    pool = f"projects/{project_number}/locations/global/workloadIdentityPools/{site.project}.svc.id.goog"
    options = site.placement.options
    return f"principal://iam.googleapis.com/{pool}/subject/ns/{options.namespace}/sa/{options.service_account}"
