"""A cluster's own API: objects applied by the server's own merge, over the same seam as Google's services."""

from __future__ import annotations

import base64
import json
import urllib.parse
from collections.abc import Iterator, Mapping, MutableSequence, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from muster.backends.gke.kubernetes.http import Call, Reply, Unreachable
from muster.backends.gke.kubernetes.stream import Lines
from muster.backends.gke.provision.resource_names import Site
from muster.backends.gke.provision.resources import Found, differences
from muster.backends.gke.provision.session import Session, refusal
from muster.core.errors import AccessError, BackendError

SERVED_WITHIN_S = 60.0
MANAGER = "fieldManager=muster&force=true&fieldValidation=Strict"
CLUSTER_SCOPED_FIRST = ("CustomResourceDefinition", "Namespace")


@dataclass(kw_only=True)
class Cluster:
    """The API server of one cluster."""

    session: Session
    endpoint: str
    ca_pem: str | None
    _kinds: dict[str, dict[str, tuple[str, bool]]] = field(default_factory=dict)

    def apply(self, manifest: Mapping[str, Any], *, secret: bool = False, dry_run: bool = False) -> Mapping[str, Any]:
        """Server-side apply with strict field checks; the same object twice is one. A dry run is the server's own."""
        self._wait_for_kind(manifest)
        call = self.apply_call(manifest, self._path(manifest), secret=secret)
        if dry_run:
            call = replace(call, url=call.url + "&dryRun=All")
        try:
            reply = self.session.send(call)
        except Unreachable:
            reply = self.session.send(call)
        if reply.status >= 300:
            raise refusal(call, reply)
        return reply.body

    def apply_call(self, manifest: Mapping[str, Any], path: str, *, secret: bool = False) -> Call:
        return Call(
            method="PATCH",
            url=f"{self.endpoint}/{path}?{MANAGER}",
            body=manifest,
            content_type="application/apply-patch+yaml",
            ca_pem=self.ca_pem,
            secret=secret,
        )

    def get(self, manifest: Mapping[str, Any]) -> Mapping[str, Any] | None:
        """The object as it is there; None where it, or its kind, is not."""
        path = self._path(manifest, absent_kind_is_none=True)
        if path is None:
            return None
        call = Call(method="GET", url=f"{self.endpoint}/{path}", ca_pem=self.ca_pem)
        reply = self.session.send(call)
        if reply.status == 404:
            return None
        if reply.status >= 300:
            raise refusal(call, reply)
        return reply.body

    def knows(self, manifest: Mapping[str, Any]) -> bool:
        """Whether the server serves the object's kind."""
        return manifest["kind"] in self._known(manifest["apiVersion"])

    def list(
        self, api: str, plural: str, *, namespace: str | None = None, labels: str = ""
    ) -> Sequence[Mapping[str, Any]]:
        """All objects of a kind; none where the cluster does not know it."""
        folder = f"namespaces/{namespace}/{plural}" if namespace else plural
        query = f"?labelSelector={labels}" if labels else ""
        call = Call(method="GET", url=f"{self.endpoint}/{_root(api)}/{folder}{query}", ca_pem=self.ca_pem)
        reply = self.session.send(call)
        if reply.status == 404:
            return []
        if reply.status >= 300:
            raise refusal(call, reply)
        return list(reply.body.get("items", []))

    def pod_log(self, namespace: str, pod: str, container: str) -> str:
        """All of a container's output so far; empty while it has not started."""
        path = f"api/v1/namespaces/{namespace}/pods/{pod}/log?container={container}"
        reply = self.session.send(Call(method="GET", url=f"{self.endpoint}/{path}", ca_pem=self.ca_pem))
        return reply.text if reply.status < 300 else ""

    def follow_log(self, namespace: str, pod: str, container: str, *, since: str | None = None) -> Lines | None:
        """A container's output so far and as it comes, each line after its time (RFC 3339, nanoseconds) and a space.

        ``since`` is such a time; the server cuts it to the second. None where there is no such output (yet).

        Raises:
            Unreachable: ask again.
            AccessError: not allowed.
        """
        words = {"container": container, "follow": "true", "timestamps": "true"} | (
            {"sinceTime": since} if since else {}
        )
        path = f"api/v1/namespaces/{namespace}/pods/{pod}/log?{urllib.parse.urlencode(words)}"
        return self._lines(path)

    def watch(
        self, api: str, plural: str, *, namespace: str, labels: str, opened: MutableSequence[Lines]
    ) -> Iterator[Mapping[str, Any]]:
        """The objects that are there, then each again whenever it changes or goes; ends after minutes, or at once
        where the cluster does not know the kind. Whoever holds ``opened`` may close what it waits on.

        Raises:
            Unreachable: the connection broke.
            AccessError: not allowed.
        """
        query = urllib.parse.urlencode({"watch": "true", "labelSelector": labels, "timeoutSeconds": 240})
        found = self._lines(f"{_root(api)}/namespaces/{namespace}/{plural}?{query}")
        if found is None:
            return
        opened.append(found)
        try:
            for line in found:
                event = json.loads(line)
                if event.get("type") in ("ADDED", "MODIFIED", "DELETED"):
                    yield event["object"]
        except (OSError, ValueError) as error:
            raise Unreachable(f"the watch on {plural} broke: {error}") from error
        finally:
            opened.remove(found)
            found.close()

    def _lines(self, path: str) -> Lines | None:
        call = Call(method="GET", url=f"{self.endpoint}/{path}", ca_pem=self.ca_pem)
        found = self.session.http.lines(call)
        if not isinstance(found, Reply):
            return found
        if found.status in (401, 403):
            raise AccessError(f"{path.partition('?')[0]}: {found.message}")
        if found.status in (429, 500, 502, 503, 504):
            raise Unreachable(f"{path.partition('?')[0]}: {found.message}")
        return None

    def delete(self, manifest: Mapping[str, Any]) -> None:
        """Remove it with everything it owns; absent is success."""
        path = self._path(manifest, absent_kind_is_none=True)
        if path is None:
            return
        url = f"{self.endpoint}/{path}?propagationPolicy=Background"
        call = Call(method="DELETE", url=url, ca_pem=self.ca_pem)
        reply = self.session.delete(call)
        if reply.status >= 300 and reply.status != 404:
            raise refusal(call, reply)

    def _wait_for_kind(self, manifest: Mapping[str, Any]) -> None:
        """A kind that was defined a moment ago is served a little later."""
        waited_s = 0.0
        while manifest["kind"] not in self._known(manifest["apiVersion"]) and waited_s < SERVED_WITHIN_S:
            self._kinds.pop(manifest["apiVersion"], None)
            self.session.clock.sleep(3.0)
            waited_s += 3.0

    def _path(self, manifest: Mapping[str, Any], *, absent_kind_is_none: bool = False) -> Any:
        api, kind = manifest["apiVersion"], manifest["kind"]
        found = self._known(api).get(kind)
        if found is None:
            if absent_kind_is_none:
                return None
            raise BackendError(
                f"the cluster does not know {kind} of {api}", hint="its controller is not installed, or another version"
            )
        plural, namespaced = found
        metadata = manifest["metadata"]
        scope = f"namespaces/{metadata.get('namespace', 'default')}/" if namespaced else ""
        return f"{_root(api)}/{scope}{plural}/{metadata['name']}"

    def _known(self, api: str) -> Mapping[str, tuple[str, bool]]:
        if not self._kinds.get(api):
            reply = self.session.send(Call(method="GET", url=f"{self.endpoint}/{_root(api)}", ca_pem=self.ca_pem))
            rows = reply.body.get("resources", []) if reply.status < 300 else []
            self._kinds[api] = {row["kind"]: (row["name"], row["namespaced"]) for row in rows if "/" not in row["name"]}
        return self._kinds[api]


def connect(site: Site, session: Session) -> Cluster | None:
    """The cluster's API; None while there is no cluster."""
    reply = session.send(Call(method="GET", url=f"{site.container}/clusters/{site.cluster}"))
    if reply.status >= 300 or not reply.body.get("endpoint"):
        return None
    authority = reply.body.get("masterAuth", {}).get("clusterCaCertificate")
    pem = base64.b64decode(authority).decode() if authority else None
    return Cluster(session=session, endpoint=f"https://{reply.body['endpoint']}", ca_pem=pem)


@dataclass(frozen=True, kw_only=True)
class Objects:
    """A set of Kubernetes objects, applied in order; they go with the cluster, or one by one where it stays."""

    site: Site
    key: str
    needs: tuple[str, ...]
    manifests: tuple[Mapping[str, Any], ...]
    secret: bool = False
    removed_with_cluster: bool = True
    foreign: Literal["refuse", "use"] = "use"
    bills: str | None = None

    def look(self, session: Session) -> Found:
        cluster = connect(self.site, session)
        if cluster is None:
            return Found(state="absent")
        if not self.removed_with_cluster:
            # To be removed: any one of them counts, whatever it looks like by now.
            return Found(state="there" if any(cluster.get(one) for one in self.manifests) else "absent")
        for manifest in self.manifests:
            there = cluster.get(manifest)
            if there is None or list(differences({k: v for k, v in manifest.items() if k != "status"}, there)):
                return Found(state="absent")
        return Found(state="there")

    def make(self, session: Session) -> None:
        cluster = connect(self.site, session)
        if cluster is None:
            raise BackendError(f"cluster {self.site.cluster} has no endpoint yet", hint="run the same again")
        first = [one for one in self.manifests if one["kind"] in CLUSTER_SCOPED_FIRST]
        for manifest in [*first, *(one for one in self.manifests if one["kind"] not in CLUSTER_SCOPED_FIRST)]:
            cluster.apply(manifest, secret=self.secret)

    def settle(self, session: Session) -> None:
        """Objects are there at once; their controllers are not waited for."""

    def remove(self, session: Session) -> None:
        cluster = None if self.removed_with_cluster else connect(self.site, session)
        if cluster is not None:
            for manifest in reversed(self.manifests):
                cluster.delete(manifest)

    def requests(self) -> list[Call]:
        shown = Cluster(session=None, endpoint="https://CLUSTER", ca_pem=None)  # type: ignore[arg-type]
        return [
            shown.apply_call(one, f"{_root(one['apiVersion'])}/.../{one['metadata']['name']}", secret=self.secret)
            for one in self.manifests
        ]


def _root(api: str) -> str:
    return f"apis/{api}" if "/" in api else f"api/{api}"
