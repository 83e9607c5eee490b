"""A cluster's own API: objects created, applied by the server's own merge, read, watched and deleted."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, MutableSequence, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

from muster.backends.gke.kubernetes.connection import Kind, root_of
from muster.backends.gke.kubernetes.streams import Lines
from muster.backends.google.http import Call, Reply, Unreachable
from muster.backends.google.refusals import refusal
from muster.backends.google.session import twice, with_retries
from muster.core.errors import AccessError, BackendError, ConflictError
from muster.core.protocols import Clock
from muster.core.typed_json import JsonObject, at, child, children, text

if TYPE_CHECKING:
    from muster.backends.gke.kubernetes.connection import Connection

SERVED_WITHIN_S = 60.0


@dataclass(kw_only=True)
class Cluster:
    connection: Connection
    clock: Clock
    _kinds: dict[str, dict[str, Kind]] = field(default_factory=dict)

    def apply(self, manifest: JsonObject, *, dry_run: bool = False) -> JsonObject:
        """Server-side apply with strict field checks; the same object twice is one. A dry run is the server's own."""
        send = partial(self.connection.apply, self._served(manifest), manifest, dry_run=dry_run)
        return twice(lambda: self._ok("PATCH", manifest, send)).body

    def create(self, manifest: JsonObject) -> JsonObject | None:
        """A new object; None where one of its name is there, which may be this one: of a request whose answer was lost.
        However late a request arrives, it changes no object that is there."""
        send = partial(self.connection.create, self._served(manifest), manifest)
        try:
            return twice(lambda: self._ok("POST", manifest, send)).body
        except ConflictError:
            return None

    def get(self, manifest: JsonObject) -> JsonObject | None:
        """The object on the server; None where it, or its kind, is absent."""
        kind = self._kind(manifest)
        if kind is None:
            return None
        reply = self._ok("GET", manifest, partial(self.connection.get, kind, *_name(manifest)), absent=True)
        return reply.body if reply.status != 404 else None

    def knows(self, manifest: JsonObject) -> bool:
        """Whether the server serves the object's kind."""
        return self._kind(manifest) is not None

    def list(
        self, api: str, plural: str, *, namespace: str | None = None, labels: Mapping[str, str] | None = None
    ) -> Sequence[JsonObject]:
        """All objects of a kind; none where the cluster does not know it."""
        kind = Kind(api=api, kind=plural, plural=plural, namespaced=namespace is not None)
        reply = self._ok("GET", plural, partial(self.connection.list, kind, namespace or "", labels or {}), absent=True)
        return children(reply.body, "items") if reply.status != 404 else []

    def delete(self, manifest: JsonObject) -> None:
        """Remove it with everything it owns; absent is success. As it was read (with its uid): no later one of its
        name, however late the request arrives."""
        kind, uid = self._kind(manifest), text(manifest, "metadata", "uid")
        if kind is None:
            return
        send = partial(self.connection.delete, kind, *_name(manifest), uid)
        try:
            twice(lambda: self._ok("DELETE", manifest, send, absent=True))
        except ConflictError:
            if not uid:
                raise

    def pod_log(self, namespace: str, pod: str, container: str) -> str:
        """All of a container's output so far; empty while it has not started."""
        path = f"api/v1/namespaces/{namespace}/pods/{pod}/log"
        reply = self._read(path, {"container": container})
        return reply.text if reply.status < 300 else ""

    def follow_log(self, namespace: str, pod: str, container: str, *, since: str | None = None) -> Lines | None:
        """A container's output so far and as it comes, each line after its time (RFC 3339, nanoseconds) and a space.

        ``since`` is such a time; the server cuts it to the second. None where there is no such output (yet).

        Raises:
            Unreachable: ask again.
            AccessError: not allowed.
        """
        query = {"container": container, "follow": "true", "timestamps": "true"}
        return self._follow(
            f"api/v1/namespaces/{namespace}/pods/{pod}/log", query | ({"sinceTime": since} if since else {})
        )

    def watch(
        self, api: str, plural: str, *, namespace: str, labels: Mapping[str, str], opened: MutableSequence[Lines]
    ) -> Iterator[JsonObject]:
        """The objects that exist, then each again when it changes or is deleted; ends after minutes, or at once
        where the cluster does not know the kind. What it waits on is in ``opened``, where it may be closed.

        Raises:
            Unreachable: the connection broke.
            AccessError: not allowed.
        """
        selector = ",".join(f"{name}={value}" for name, value in labels.items())
        query = {"watch": "true", "labelSelector": selector, "timeoutSeconds": "240"}
        lines = self._follow(f"{root_of(api)}/namespaces/{namespace}/{plural}", query)
        if lines is None:
            return
        opened.append(lines)
        try:
            for line in lines:
                event = json.loads(line)
                # Anything else, an expired resourceVersion (410) included, ends with the watch: it begins again.
                if event.get("type") in ("ADDED", "MODIFIED", "DELETED"):
                    yield event["object"]
        except (OSError, ValueError) as error:
            raise Unreachable(f"the watch on {plural} broke: {error}") from error
        finally:
            opened.remove(lines)
            lines.close()

    def _follow(self, path: str, query: Mapping[str, str]) -> Lines | None:
        lines = self.connection.follow(path, query)
        if not isinstance(lines, Reply):
            return lines
        if lines.status in (401, 403):
            raise AccessError(f"{path}: {lines.message}")
        if lines.status in (429, 500, 502, 503, 504):
            raise Unreachable(f"{path}: {lines.message}")
        return None

    def _served(self, manifest: JsonObject) -> Kind:
        """A kind that was defined a moment ago is served a little later."""
        waited_s = 0.0
        while (kind := self._kind(manifest)) is None and waited_s < SERVED_WITHIN_S:
            self._kinds.pop(text(manifest, "apiVersion"), None)
            self.clock.sleep(3.0)
            waited_s += 3.0
        if kind is None:
            raise BackendError(
                f"the cluster does not know {manifest['kind']} of {manifest['apiVersion']}",
                hint="its controller is not installed, or another version",
            )
        return kind

    def serves(self, api: str) -> bool:
        """Whether the server has kinds of this API (``GROUP/VERSION``)."""
        return self._read(root_of(api)).status < 300

    def _kind(self, manifest: JsonObject) -> Kind | None:
        api = text(manifest, "apiVersion")
        if not self._kinds.get(api):
            path = root_of(api)
            reply = self._read(path)
            if reply.status >= 300 and reply.status != 404:  # not known is not absent: something may be there
                raise refusal(Call(method="GET", url=f"{self.connection.endpoint}/{path}"), reply)
            served = children(reply.body, "resources") if reply.status < 300 else []
            self._kinds[api] = {
                text(row, "kind"): Kind(
                    api=api, kind=text(row, "kind"), plural=text(row, "name"), namespaced=at(row, "namespaced") is True
                )
                for row in served
                if "/" not in text(row, "name")
            }
        return self._kinds[api].get(text(manifest, "kind"))

    def _read(self, path: str, query: Mapping[str, str] | None = None) -> Reply:
        return with_retries(lambda: self.connection.read(path, query), "GET", path, self.clock)

    def _ok(self, method: str, about: JsonObject | str, send: Callable[[], Reply], *, absent: bool = False) -> Reply:
        """Send with retries. Raises the refusal; 404 is none where ``absent``."""
        name = about if isinstance(about, str) else f"{about['kind']}/{text(about, 'metadata', 'name')}"
        url = f"{self.connection.endpoint}/{name}"
        reply = with_retries(send, method, url, self.clock)
        if reply.status == 409:
            raise ConflictError(f"{method} {url}: {reply.message}", hint="it was changed at the same time; try again")
        if reply.status >= 300 and not (absent and reply.status == 404):
            raise refusal(Call(method=method, url=url), reply)
        return reply


def _name(manifest: JsonObject) -> tuple[str, str]:
    metadata = child(manifest, "metadata")
    return text(metadata, "name"), text(metadata, "namespace", default="default")
