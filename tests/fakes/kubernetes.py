"""A small Kubernetes API server in memory: discovery, create, server-side apply, read, list, delete.

It keeps what it is given and checks nothing (schemas are checked elsewhere). ``serve`` puts it on a loopback port for
clients that insist on a socket (Helm).
"""

from __future__ import annotations

import contextlib
import http.server
import json
import threading
import urllib.parse
from collections.abc import Callable, Iterator
from typing import Any

import pytest

pytest.importorskip("lightkube", reason="muster[gke] is not installed")

import httpx2
from fakes.clock import VirtualClock
from lightkube.config.kubeconfig import KubeConfig

from muster.backends.gke.google.api_server_transport import ServerTransport
from muster.backends.gke.kubernetes.api import Cluster
from muster.backends.gke.kubernetes.connection import Connection

KINDS = {
    "api/v1": {
        "Namespace": ("namespaces", False),
        "Node": ("nodes", False),
        "ConfigMap": ("configmaps", True),
        "Secret": ("secrets", True),
        "Service": ("services", True),
        "ServiceAccount": ("serviceaccounts", True),
        "Pod": ("pods", True),
        "Event": ("events", True),
    },
    "apis/apps/v1": {"DaemonSet": ("daemonsets", True), "Deployment": ("deployments", True)},
    "apis/rbac.authorization.k8s.io/v1": {"Role": ("roles", True), "RoleBinding": ("rolebindings", True)},
    "apis/batch/v1": {"Job": ("jobs", True)},
    "apis/policy/v1": {"PodDisruptionBudget": ("poddisruptionbudgets", True)},
    "apis/scheduling.k8s.io/v1": {"PriorityClass": ("priorityclasses", False)},
    "apis/jobset.x-k8s.io/v1alpha2": {"JobSet": ("jobsets", True)},
    "apis/resource.k8s.io/v1": {"ResourceClaimTemplate": ("resourceclaimtemplates", True)},
    "apis/networking.gke.io/v1": {
        "Network": ("networks", False),
        "GKENetworkParamSet": ("gkenetworkparamsets", False),
    },
    "apis/kueue.x-k8s.io/v1beta2": {
        "Topology": ("topologies", False),
        "ResourceFlavor": ("resourceflavors", False),
        "ProvisioningRequestConfig": ("provisioningrequestconfigs", False),
        "AdmissionCheck": ("admissionchecks", False),
        "ClusterQueue": ("clusterqueues", False),
        "LocalQueue": ("localqueues", True),
        "Workload": ("workloads", True),
    },
    "apis/autoscaling.x-k8s.io/v1": {"ProvisioningRequest": ("provisioningrequests", True)},
}


class FakeKubernetes:
    """Objects by path, and a log of (method, path) for every request."""

    def __init__(self) -> None:
        self.objects: dict[str, dict[str, Any]] = {}
        self.log: list[tuple[str, str]] = []
        self.late: dict[str, int] = {}
        """Group and version -> how often it is asked for before it is served."""
        self.queues: set[str] = set()
        """Local queues that are there without being listed among the objects: an administrator's."""

    def of_kind(self, kind: str) -> list[dict[str, Any]]:
        return [one for one in self.objects.values() if one.get("kind") == kind]

    def handle(self, method: str, target: str, body: bytes = b"") -> tuple[int, dict[str, Any]]:
        """Answer one request."""
        url = urllib.parse.urlsplit(target)
        path = url.path.strip("/")
        self.log.append((method, path))
        if (found := self._discovery(path)) is not None:
            return 200, found
        sent = _parsed(body) if body else None
        if method == "POST":
            path = f"{path}/{sent['metadata']['name']}"
            if path in self.objects:
                return _status(409, "AlreadyExists", f"{path} already exists")
            return 201, self._put(path, sent)
        assert method != "PATCH" or "fieldValidation=Strict" in url.query
        if method == "PATCH" and "dryRun=All" in url.query:
            return 200, sent
        if method == "PATCH":
            return (200 if path in self.objects else 201), self._put(path, _merged(self.objects.get(path, {}), sent))
        if method == "PUT":
            return 200, self._put(path, sent)
        if method == "DELETE":
            gone = self.objects.pop(path, None)
            return (200, gone) if gone else _status(404, "NotFound", f"{path} not found")
        if path in self.objects:
            return 200, self.objects[path]
        if method == "GET" and path.rpartition("/localqueues/")[2] in self.queues:
            return 200, {"kind": "LocalQueue", "metadata": {"name": path.rpartition("/")[2]}}
        if path.rsplit("/", 1)[-1] in {plural for kinds in KINDS.values() for plural, _ in kinds.values()}:
            return 200, self._list(path, urllib.parse.parse_qs(url.query))
        return _status(404, "NotFound", f"{path} not found")

    def _put(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        metadata = body.setdefault("metadata", {})
        metadata.setdefault("uid", f"uid-{len(self.log)}")
        metadata["resourceVersion"] = str(len(self.log))
        self.objects[path] = body
        return body

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

    def _discovery(self, path: str) -> dict[str, Any] | None:
        if path == "version":
            return {"major": "1", "minor": "34", "gitVersion": "v1.34.1-gke.1829001"}
        if path == "api":
            return {"kind": "APIVersions", "versions": ["v1"]}
        if path == "apis":
            groups: dict[str, list[dict[str, str]]] = {}
            for key in KINDS:
                if key != "api/v1":
                    _, group, version = key.split("/")
                    groups.setdefault(group, []).append({"groupVersion": f"{group}/{version}", "version": version})
            rows = [{"name": group, "versions": found, "preferredVersion": found[0]} for group, found in groups.items()]
            return {"kind": "APIGroupList", "apiVersion": "v1", "groups": rows}
        if self.late.get(path, 0) > 0:
            self.late[path] -= 1
            return {"resources": []}
        if path in KINDS:
            verbs = ["create", "delete", "get", "list", "patch", "update", "watch"]
            rows = [
                {"name": plural, "singularName": kind.lower(), "namespaced": namespaced, "kind": kind, "verbs": verbs}
                for kind, (plural, namespaced) in KINDS[path].items()
            ]
            version = path.removeprefix("apis/").removeprefix("api/")
            return {"kind": "APIResourceList", "apiVersion": "v1", "groupVersion": version, "resources": rows}
        return None


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
        result[key] = _merged(inner, value) if isinstance(inner, dict) and isinstance(value, dict) else value
    return result


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
