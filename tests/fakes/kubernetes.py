"""A small Kubernetes API server in memory: discovery, create, server-side apply, merge patch, read, list, delete.

It refuses what admission webhooks refuse (``admission``), what is immutable, and a write that names an older
``resourceVersion`` (409). What has a finalizer stays after its deletion, with ``deletionTimestamp``; a pod that runs
stays until somebody ends it (grace period 0); what is owned goes with its owner, a moment later. Schemas are checked
elsewhere. ``serve`` puts it on a loopback port for clients that insist on a socket (Helm).
"""

from __future__ import annotations

import contextlib
import copy
import http.server
import json
import secrets
import threading
import urllib.parse
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pytest

pytest.importorskip("lightkube", reason="muster[gke] is not installed")

import httpx2
from fakes import admission
from fakes.clock import VirtualClock
from fakes.kubernetes_kinds import KINDS, changed_for_good, discovery
from lightkube.config.kubeconfig import KubeConfig

from muster.backends.gke.kubernetes.api import Cluster
from muster.backends.gke.kubernetes.connection import Connection
from muster.backends.google.api_server_transport import ServerTransport

Answer = tuple[int, dict[str, Any]]
IN_USE = "kueue.x-k8s.io/resource-in-use"
HELD = {"ClusterQueue", "ResourceFlavor", "AdmissionCheck", "Topology"}
"""Kinds to which Kueue gives its finalizer, and takes it off again where nothing uses the object."""
WEBHOOKS = {
    "JobSet": ("mjobset.kb.io", "jobset-webhook-service.jobset-system"),
    "Workload": ("mworkload.kb.io", "kueue-webhook-service.kueue-system"),
    "ClusterQueue": ("mclusterqueue.kb.io", "kueue-webhook-service.kueue-system"),
    "ResourceFlavor": ("mresourceflavor.kb.io", "kueue-webhook-service.kueue-system"),
}
FOREGROUND = "foregroundDeletion"


class FakeKubernetes:
    """Objects by path, and a log of (method, path) for every request."""

    def __init__(self) -> None:
        self.objects: dict[str, dict[str, Any]] = {}
        self.log: list[tuple[str, str]] = []
        self.late: dict[str, int] = {}
        """Group and version -> how often it is asked for before it is served."""
        self.queues: set[str] = set()
        """Local queues that are there without being listed among the objects: an administrator's."""
        self.gates: Mapping[str, bool] = admission.DEFAULT
        self.unready: dict[str, int] = {}
        """Kind -> how many writes of it fail because no webhook answers yet."""
        self.faults: list[int] = []
        """Statuses of the next answers, whatever is asked: 429, 503, ..."""
        self.lingers = 2
        """Requests for which Kueue keeps its finalizer on an object that is to go."""
        self.stuck: set[str] = set()
        """Kinds whose finalizer nobody takes off: their controller is gone."""
        self._leaving: dict[str, int] = {}

    def of_kind(self, kind: str) -> list[dict[str, Any]]:
        return [one for one in self.objects.values() if one.get("kind") == kind]

    def handle(self, method: str, target: str, body: bytes = b"") -> Answer:
        """Answer one request."""
        url = urllib.parse.urlsplit(target)
        path = url.path.strip("/")
        self.log.append((method, path))
        if self.faults:
            return _fault(self.faults.pop(0))
        self._collect()
        if self.late.get(path, 0) > 0:
            self.late[path] -= 1
            return 200, {"resources": []}
        if (found := discovery(path)) is not None:
            return 200, found
        sent = _parsed(body) if body else None
        if method in ("POST", "PATCH", "PUT"):
            return self._write(method, path, sent, urllib.parse.parse_qs(url.query))
        if method == "DELETE":
            return self._delete(path, sent or {}, urllib.parse.parse_qs(url.query))
        if path in self.objects:
            return 200, self.objects[path]
        if method == "GET" and path.rpartition("/localqueues/")[2] in self.queues:
            return 200, {"kind": "LocalQueue", "metadata": {"name": path.rpartition("/")[2]}}
        if path.rsplit("/", 1)[-1] in {plural for kinds in KINDS.values() for plural, _ in kinds.values()}:
            return 200, self._list(path, urllib.parse.parse_qs(url.query))
        return _status(404, "NotFound", f"{path} not found")

    # ---------------------------------------------------------------- writing

    def _write(self, method: str, path: str, sent: dict[str, Any], query: Mapping[str, list[str]]) -> Answer:
        whole = path.removesuffix("/status")
        if method == "POST" and path.endswith("/binding"):
            self.objects[path.removesuffix("/binding")]["spec"]["nodeName"] = sent["target"]["name"]
            return 201, sent
        if method == "POST":
            metadata = sent["metadata"]
            metadata.setdefault("namespace", _namespace(path))
            if "name" not in metadata:
                metadata["name"] = metadata["generateName"] + secrets.token_hex(3)[:5]
            whole = path = f"{path}/{metadata['name']}"
            if path in self.objects:
                return _status(409, "AlreadyExists", f"{path} already exists")
        old = self.objects.get(whole)
        applied = "fieldManager" in query
        assert query.get("fieldManager") != ["muster"] or query.get("fieldValidation") == ["Strict"], "ours are strict"
        if method == "PATCH" and not applied and old is None:
            return _status(404, "NotFound", f"{whole} not found")
        if path != whole:  # the status is written by itself
            sent = {"status": sent["status"], "metadata": {**sent.get("metadata", {})}}
        elif method == "PATCH":
            sent = {key: value for key, value in sent.items() if key != "status"}
        new = _merged(old or {}, sent) if method == "PATCH" else sent
        if old is None and applied and new.get("kind") == "JobSet":
            new = admission.defaulted(new)
        if (refused := self._refused(whole, old, new, sent)) is not None:
            return refused
        if query.get("dryRun") == ["All"]:
            return 200, new
        return (200 if old is not None else 201), self._put(whole, new)

    def _refused(
        self, path: str, old: dict[str, Any] | None, new: dict[str, Any], sent: dict[str, Any]
    ) -> Answer | None:
        kind, name = str(new.get("kind")), path.rpartition("/")[2]
        if self.unready.get(kind, 0) > 0:
            self.unready[kind] -= 1
            hook, service = WEBHOOKS[kind]
            words = f'failed calling webhook "{hook}": failed to call webhook: Post "https://{service}.svc:443/": '
            return _status(500, "InternalError", words + f'no endpoints available for service "{service}"')
        version = sent.get("metadata", {}).get("resourceVersion")
        if old is not None and version is not None and version != old["metadata"]["resourceVersion"]:
            words = f'Operation cannot be fulfilled on {kind.lower()} "{name}": the object has been modified'
            return _status(409, "Conflict", words)
        why = changed_for_good(old, new) if old is not None else []
        why = [f"{one}: Invalid value: field is immutable" for one in why]
        # A whole object that is put is a test's own: it may stand for one that was taken long ago.
        why += admission.refusals(new, old=old, gates=self.gates) if sent is not new or old is None else []
        return _status(422, "Invalid", f'{kind} "{name}" is invalid: {"; ".join(why)}') if why else None

    def _put(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        body = copy.deepcopy(body)
        metadata = body.setdefault("metadata", {})
        metadata.setdefault("uid", f"uid-{len(self.log)}")
        metadata["resourceVersion"] = str(len(self.log))
        if body.get("kind") in HELD and "deletionTimestamp" not in metadata:
            metadata.setdefault("finalizers", [IN_USE])
        self.objects[path] = body
        return body

    # ---------------------------------------------------------------- deleting

    def _delete(self, path: str, options: dict[str, Any], query: Mapping[str, list[str]]) -> Answer:
        found = self.objects.get(path)
        if found is None:
            return _status(404, "NotFound", f"{path} not found")
        metadata = found["metadata"]
        if (options.get("preconditions") or {}).get("uid", metadata["uid"]) != metadata["uid"]:
            return _status(409, "Conflict", f"{path}: the UID in the precondition is another")
        how = options.get("propagationPolicy") or query.get("propagationPolicy", ["Background"])[0]
        if how == "Foreground":
            metadata.setdefault("finalizers", []).append(FOREGROUND)
        runs = found.get("kind") == "Pod" and found["spec"].get("nodeName") is not None
        if metadata.get("finalizers") or (runs and options.get("gracePeriodSeconds") != 0):
            metadata.setdefault("deletionTimestamp", "2026-01-01T00:00:00Z")
            metadata["resourceVersion"] = str(len(self.log))
            self._leaving.setdefault(path, self.lingers)
            return 200, found
        return 200, self.objects.pop(path)

    def _collect(self) -> None:
        """The garbage collector and Kueue, between two requests."""
        for path, left in list(self._leaving.items()):
            found = self.objects.get(path)
            if found is None or "deletionTimestamp" not in found["metadata"]:
                del self._leaving[path]
                continue
            self._leaving[path] = left - 1
            finalizers, uid = found["metadata"].get("finalizers", []), found["metadata"]["uid"]
            if left <= 0 and found["kind"] in HELD - self.stuck and IN_USE in finalizers:
                finalizers.remove(IN_USE)
            if FOREGROUND in finalizers and not self._owned_by(uid):
                finalizers.remove(FOREGROUND)
            if not finalizers and found["kind"] != "Pod":
                del self.objects[path], self._leaving[path]
        uids = {one.get("metadata", {}).get("uid"): one for one in self.objects.values()}
        for path, one in list(self.objects.items()):
            for owner in one.get("metadata", {}).get("ownerReferences", []):
                if "uid" not in owner:  # a test wrote it by hand
                    continue
                held = uids.get(owner["uid"])
                going = held is None or FOREGROUND in held["metadata"].get("finalizers", [])
                if going and path in self.objects and "deletionTimestamp" not in one["metadata"]:
                    self._delete(path, {"propagationPolicy": "Background" if held is None else "Foreground"}, {})

    def _owned_by(self, uid: str) -> bool:
        owners = (one.get("metadata", {}).get("ownerReferences", []) for one in self.objects.values())
        return any(owner.get("uid") == uid for row in owners for owner in row)

    def _list(self, path: str, query: dict[str, list[str]]) -> dict[str, Any]:
        group, _, plural = path.rpartition("/")
        group, _, namespace = group.partition("/namespaces/")
        items = [
            one
            for key, one in sorted(self.objects.items())
            if key.startswith(group)
            and key.split("/")[-2] == plural
            and (not namespace or f"/namespaces/{namespace}/" in key)
        ]
        for term in query.get("labelSelector", [""])[0].split(","):
            if "=" in term and " " not in term:
                name, _, value = term.partition("=")
                items = [one for one in items if one["metadata"].get("labels", {}).get(name) == value.lstrip("=")]
        return {"kind": "List", "apiVersion": "v1", "metadata": {"resourceVersion": "1"}, "items": items}


def _parsed(body: bytes) -> Any:
    try:
        return json.loads(body)
    except json.JSONDecodeError:
        from ruamel.yaml import YAML

        return YAML(typ="safe", pure=True).load(body.decode())


def _merged(old: dict[str, Any], new: dict[str, Any]) -> dict[str, Any]:
    result = dict(old)
    for key, value in new.items():
        inner = result.get(key)
        if value is None:
            result.pop(key, None)
        else:
            result[key] = _merged(inner, value) if isinstance(inner, dict) and isinstance(value, dict) else value
    return result


def _namespace(path: str) -> str:
    return path.partition("/namespaces/")[2].partition("/")[0]


def _fault(status: int) -> Answer:
    reasons = {429: "TooManyRequests", 503: "ServiceUnavailable", 500: "InternalError", 504: "Timeout"}
    return _status(status, reasons[status], "the server is currently unable to handle the request")


def _status(code: int, reason: str, message: str) -> tuple[int, dict[str, Any]]:
    status = {"kind": "Status", "apiVersion": "v1", "status": "Failure"}
    return code, {**status, "reason": reason, "message": message, "code": code}


def in_memory(fake: FakeKubernetes, handle: Callable[[httpx2.Request], httpx2.Response] | None = None) -> Cluster:
    """A client of it without a socket; ``handle`` answers in its place."""

    def answer(request: httpx2.Request) -> httpx2.Response:
        code, found = fake.handle(request.method, request.url.raw_path.decode(), request.content)
        return httpx2.Response(code, json=found)

    transport = ServerTransport(httpx2.MockTransport(handle or answer))
    config = KubeConfig.from_server("https://k").get()
    return Cluster(connection=Connection(config=config, transport=transport), clock=VirtualClock())


@contextlib.contextmanager
def serve(fake: FakeKubernetes) -> Iterator[str]:
    """Answer on a loopback port; yields a kubeconfig."""

    class Handler(http.server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *_: object) -> None:
            pass

        def answer(self) -> None:
            body = self.rfile.read(int(self.headers.get("content-length") or 0))
            kind = self.headers.get("content-type") or ""
            if "protobuf" in kind:
                # Helm's own record of a release (a Secret): handed back as it came, kept by nobody.
                code, data = 200 if self.command == "PUT" else 201, body
            else:
                code, found = fake.handle(self.command, self.path, body)
                data, kind = json.dumps(found).encode(), "application/json"
            self.send_response(code)
            self.send_header("content-type", kind)
            self.send_header("content-length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        do_GET = do_POST = do_PUT = do_PATCH = do_DELETE = answer

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        cluster = {"name": "c", "cluster": {"server": f"http://127.0.0.1:{server.server_port}"}}
        context = {"name": "x", "context": {"cluster": "c", "user": "u"}}
        config = {"apiVersion": "v1", "kind": "Config", "current-context": "x"}
        yield json.dumps({**config, "clusters": [cluster], "users": [{"name": "u", "user": {}}], "contexts": [context]})
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
