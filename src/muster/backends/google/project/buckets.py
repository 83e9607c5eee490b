"""Buckets of runs: made in the region of the machines, with a hierarchical namespace, emptied before they go."""

from __future__ import annotations

import urllib.parse
from dataclasses import dataclass

from muster.backends.google.http import Call
from muster.backends.google.project.policies import STORAGE
from muster.backends.google.project.resources import LABEL, Found, RestResource
from muster.backends.google.refusals import refusal
from muster.backends.google.session import Session
from muster.core.errors import AccessError, ConflictError
from muster.core.typed_json import JsonObject, children, text


def bucket(project: str, region: str, name: str) -> Bucket:
    body: JsonObject = {
        "name": name,
        "location": region.upper(),
        "hierarchicalNamespace": {"enabled": True},
        "iamConfiguration": {"uniformBucketLevelAccess": {"enabled": True}, "publicAccessPrevention": "enforced"},
        # Deleted objects would be kept, and billed, for a week.
        "softDeletePolicy": {"retentionDurationSeconds": "0"},
        "labels": LABEL,
    }
    return Bucket(
        key=f"buckets/{name}",
        url=f"{STORAGE}/b/{name}",
        create=Call(method="POST", url=f"{STORAGE}/b?project={project}", body=body),
        owner=("labels", "managed-by"),
        needs=("services",),
        foreign="use",
        bills="the bytes in it",
    )


@dataclass(frozen=True, kw_only=True)
class Bucket(RestResource):
    """A bucket in the machines' region with a hierarchical namespace; one that is there already is used as it is."""

    def look(self, session: Session) -> Found:
        try:
            return super().look(session)
        except AccessError as error:
            raise ConflictError(
                f"bucket {self.key.removeprefix('buckets/')} belongs to another project or user: {error}",
                hint="bucket names are shared by all the world; choose another",
            ) from error

    def remove(self, session: Session) -> None:
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
