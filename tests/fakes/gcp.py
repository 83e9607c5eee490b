"""A Google Cloud in memory: checks each request against Google's discovery documents, keeps state, and can fail.

What it knows of semantics: a network with subnets, rules or a cluster cannot go; a subnet needs its network; a node
pool needs its cluster, and a cluster does one thing at a time; a bucket has to be empty; names are taken once;
operations take a few looks; a failed operation leaves its resource in ERROR. Everything else is shapes.
"""

from __future__ import annotations

import json
import threading
import urllib.parse
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import httpx2
from fakes import gcp_services
from fakes.discovery import Discovery, Match
from fakes.gcp_operations import Operations
from fakes.gcp_services import error as _error
from fakes.google_wire import Killed
from fakes.kubernetes import FakeKubernetes
from fakes.stream import FakePodStream

from muster.backends.gce.inventory import NEEDED as ON_MACHINES
from muster.backends.gke.provision.access import MAKING_ACCOUNTS, PERMISSIONS, ROUTERS
from muster.backends.google.api_server_transport import ServerTransport
from muster.backends.google.http import Call, Reply, Unreachable

HOST = "10.0.0.2"
KNOWN_PERMISSIONS = PERMISSIONS.keys() | MAKING_ACCOUNTS.keys() | ROUTERS.keys() | ON_MACHINES.keys()
ZONES = ("us-central1-b", "europe-west1-b")


@dataclass
class FakeGoogleCloud(Operations):
    """Answers calls. Faults are set as attributes; ``log`` holds every request that arrived."""

    discovery: Discovery
    kubernetes: FakeKubernetes = field(default_factory=FakeKubernetes)
    kill_at: int | None = None
    """The program dies after this request has been carried out (numbered from 1)."""
    lose: set[int] = field(default_factory=set)
    """Requests that are carried out, and whose answer never comes."""
    drop: set[int] = field(default_factory=set)
    """Requests that never arrive."""
    refuse: dict[int, tuple[int, str]] = field(default_factory=dict)
    """Request number -> (status, reason), without being carried out."""
    fail: dict[str, tuple[str, str]] = field(default_factory=dict)
    """Part of a resource's name -> (code, message): creating it begins and fails. Used once."""
    billing: bool = True
    denied: set[str] = field(default_factory=set)
    zones: tuple[str, ...] = ("us-central1-a", *ZONES)
    acts_as: set[str] = field(default_factory=set)
    """Service accounts that the caller may act as by a role on each, whatever the project's roles are."""
    lacking: dict[str, set[str]] = field(default_factory=dict)
    """Zone -> machine types that it does not have."""
    slow: dict[str, int] = field(default_factory=dict)
    """Part of kind/name -> looks before it is made, in place of ``looks``. Used once."""
    foreign_buckets: set[str] = field(default_factory=set)
    store: dict[str, dict[str, Any]] = field(default_factory=dict)
    enabled: set[str] = field(default_factory=set)
    policies: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Path of a resource -> who may do what with it."""
    new: dict[str, int] = field(default_factory=dict)
    """Address of a service account -> requests that other services refuse because they do not know it yet."""
    new_for: int = 1
    """How many such requests after an account's creation."""
    logs: dict[str, str] = field(default_factory=dict)
    """Path of a pod's log on the cluster -> its text."""
    commands: Callable[[str, list[str], bytes], tuple[int, bytes, bytes]] | None = None
    """Pod, argv and what is typed -> exit code, output, errors."""
    quotas: dict[str, dict[tuple[tuple[str, str], ...], int]] = field(default_factory=dict)
    """Metric -> dimensions -> limit; a metric that is not here is not known."""
    sizes: dict[str, int] = field(default_factory=dict)
    """Name of a pool -> nodes that its instance group has or is making."""
    partly: set[str] = field(default_factory=set)
    """Pools whose nodes are there although the pool is in error; those of others have not come."""
    limits: dict[str, tuple[float, float]] = field(default_factory=dict)
    """Metric of a region's or the project's own table -> (limit, in use)."""
    builds: dict[str, dict[str, Any]] = field(default_factory=dict)
    build_ends: str = "SUCCESS"
    images: set[str] = field(default_factory=set)
    removed_roles: dict[str, dict[str, Any]] = field(default_factory=dict)
    uploads: dict[str, bytes] = field(default_factory=dict)
    log: list[tuple[str, str]] = field(default_factory=list)
    creations: list[str] = field(default_factory=list)
    _one_at_a_time: Any = field(default_factory=threading.RLock, repr=False)

    def send(self, call: Call) -> Reply:
        with self._one_at_a_time:
            return self._send(call)

    def _send(self, call: Call) -> Reply:
        number = len(self.log) + 1
        self.log.append((call.method, call.url))
        if number in self.drop:
            raise Unreachable(f"no route for request {number}")
        if number in self.refuse:
            status, reason = self.refuse[number]
            return _error(status, reason)
        reply = self._answer(call)
        if self.kill_at == number:
            raise Killed(f"after request {number}: {call.method} {call.url}")
        if number in self.lose:
            raise Unreachable(f"the answer to request {number} was lost")
        # A copy, as from a wire: what the caller holds does not change when the cloud does.
        return Reply(status=reply.status, body=json.loads(json.dumps(reply.body)), text=reply.text)

    def transport(self, endpoint: str, ca_pem: str | None) -> httpx2.BaseTransport:
        return ServerTransport(httpx2.MockTransport(self._on_cluster))

    def _on_cluster(self, request: httpx2.Request) -> httpx2.Response:
        if request.url.path.endswith("/exec"):
            return self._exec(request)
        body = json.loads(request.content) if request.content else None
        try:
            reply = self.send(Call(method=request.method, url=str(request.url), body=body))
        except Unreachable as error:
            raise httpx2.ConnectError(str(error)) from error
        content = {"text": reply.text} if reply.text else {"json": reply.body}
        return httpx2.Response(reply.status, **content)

    def _exec(self, request: httpx2.Request) -> httpx2.Response:
        """A command in a pod: ``commands`` says what it does."""
        argv = request.url.params.get_list("command")
        self.log.append((request.method, str(request.url)))
        assert self.commands is not None, f"no command is expected: {argv}"
        pod = request.url.path.split("/")[6]
        reads = request.url.params["stdin"] == "true"
        return FakePodStream(lambda line: self.commands(pod, argv, line), reads=reads).response()

    def names(self) -> set[str]:
        """Kind/name of everything that exists."""
        return {"/".join(path.split("/")[-2:]) for path in self.store if "/o/" not in path and "/folders/" not in path}

    def _answer(self, call: Call) -> Reply:
        url = urllib.parse.urlsplit(call.url)
        if url.netloc == HOST:
            body = json.dumps(call.body).encode() if call.body is not None else b""
            if url.path in self.logs:
                return Reply(status=200, text=self.logs[url.path])
            query = f"?{url.query}" if url.query else ""
            status, found = self.kubernetes.handle(call.method, url.path + query, body)
            return Reply(status=status, body=found)
        match = self.discovery.match(call.method, url.netloc, url.path)
        if match is None:
            raise AssertionError(f"no documented method: {call.method} {call.url}")
        if complaints := self.discovery.complaints(match, url.query, call.body):
            raise AssertionError(f"{match.id}: {complaints}")
        query = dict(urllib.parse.parse_qsl(url.query))
        special = self._special(match, query, call)
        return special or self._generic(match, url.path.lstrip("/").split(":")[0], query, call)

    def _special(self, match: Match, query: dict[str, str], call: Call) -> Reply | None:
        if handler := gcp_services.BY_ID.get(match.id):
            return handler(self, match, query)
        constant = {
            "cloudbilling.projects.getBillingInfo": {"billingEnabled": self.billing},
            "cloudresourcemanager.projects.get": {"projectNumber": "123456789", "projectId": "example-project"},
            "compute.networkProfiles.list": {"items": [{"name": f"{zone}-vpc-roce"} for zone in ZONES]},
            "compute.advice.capacity": {
                "recommendations": [{"scores": {"obtainability": 0.9, "estimatedUptime": "3600s"}}]
            },
        }
        if match.id in constant:
            return Reply(status=200, body=constant[match.id])
        if match.id == "cloudresourcemanager.projects.testIamPermissions":
            assert call.body is not None and set(call.body["permissions"]) <= KNOWN_PERMISSIONS
            granted = [one for one in call.body["permissions"] if one not in self.denied]
            return Reply(status=200, body={"permissions": granted})
        if match.id == "serviceusage.services.batchGet":
            names = [value for _, value in urllib.parse.parse_qsl(urllib.parse.urlsplit(call.url).query)]
            rows = [
                {"name": n, "state": "ENABLED" if n.rpartition("/")[2] in self.enabled else "DISABLED"} for n in names
            ]
            return Reply(status=200, body={"services": rows})
        if match.id == "serviceusage.services.batchEnable":
            wanted = set(call.body["serviceIds"]) if call.body else set()
            return self.begin("op", {}, lambda _: self.enabled.update(wanted), name="operations/services")
        if match.id.endswith("perations.get"):
            return self.look(match)
        if match.id == "container.projects.locations.operations.list":
            rows = [one.body for one in self.operations.values() if one.body.get("operationType") == "CREATE_NODE_POOL"]
            return Reply(status=200, body={"operations": rows})
        if match.id == "container.projects.locations.operations.cancel":
            return self.cancel(match)
        if match.id == "compute.networkProfiles.get":
            zone = match.path["networkProfile"].rpartition("-vpc")[0]
            return Reply(status=200, body={"name": "profile"}) if zone in ZONES else _error(404, "notFound")
        if match.id.startswith("iam.projects.roles.") and "iam.googleapis.com" in self.enabled:
            return gcp_services.role(self, match, urllib.parse.urlsplit(call.url).path.lstrip("/"), call)
        if match.id.endswith(gcp_services.SIZES):
            return gcp_services.node_pool(self, match, urllib.parse.urlsplit(call.url).path.lstrip("/"), call)
        if match.id.startswith("cloudbuild.") or match.id.endswith(".upload") or ".tags." in match.id:
            return gcp_services.build(self, match, query, call)
        if match.verb in ("getIamPolicy", "setIamPolicy", "testIamPermissions"):
            return gcp_services.policy(self, match, call)
        if (
            match.api in ("compute.v1", "container.v1", "iam.v1", "artifactregistry.v1")
            and f"{match.api.split('.')[0]}.googleapis.com" not in self.enabled
        ):
            return _error(403, "SERVICE_DISABLED")
        return None

    def _generic(self, match: Match, path: str, query: dict[str, str], call: Call) -> Reply:
        if match.verb == "aggregatedList":
            kind = path.rpartition("/")[2]
            items = [body for key, body in self.store.items() if key.split("/")[-2] == kind]
            return Reply(status=200, body={"items": {"regions/somewhere": {kind: items}}})
        if match.verb == "list":
            return self._list(match, path)
        if call.method == "GET":
            if path.rpartition("/")[2] in self.foreign_buckets:
                return _error(403, "forbidden")
            if self.store.get(path, {}).get("status") in ("PROVISIONING", "STOPPING"):
                self.advance(lambda one: one.busy == "/".join(path.split("/")[:7]))
            found = self.store.get(path)
            return Reply(status=200, body=found) if found else _error(404, "notFound")
        if call.method == "DELETE":
            return self._delete(match, path)
        return self._create(match, path, query, call)

    def _list(self, match: Match, path: str) -> Reply:
        inside_a_bucket = match.id in ("storage.objects.list", "storage.folders.list")
        if inside_a_bucket and f"storage/v1/b/{match.path['bucket']}" not in self.store:
            return _error(404, "notFound")
        kind = path.rpartition("/")[2]
        depth = path.count("/") + 1
        items = [one for key, one in self.store.items() if key.split("/")[-2] == kind and key.count("/") == depth]
        if match.api in ("artifactregistry.v1", "compute.v1"):
            items = [one for key, one in self.store.items() if key.startswith(path + "/") and key.count("/") == depth]
        if inside_a_bucket:
            items = [one for key, one in self.store.items() if key.startswith(path + "/")]
        names = {"container.v1": kind, "artifactregistry.v1": "repositories", "iam.v1": "accounts"}
        field_name = names.get(match.api, "items")
        return Reply(status=200, body={field_name: items} if items else {})

    def _create(self, match: Match, folder: str, query: dict[str, str], call: Call) -> Reply:
        assert call.body is not None and match.verb in ("insert", "create"), match.id
        if match.api == "iam.v1":
            return gcp_services.create_account(self, folder, call.body)
        body = dict(next((call.body[key] for key in ("cluster", "nodePool") if key in call.body), call.body))
        name = query.get("repositoryId") or body["name"]
        path = f"{folder}/{name}"
        if name in self.foreign_buckets:
            return _error(409, "conflict")
        if path in self.store:
            return _error(409, "alreadyExists")
        if trouble := self._refusal(match, path, body):
            return trouble
        self.creations.append(f"{folder.rpartition('/')[2]}/{name}")
        body["name"] = f"{folder}/{name}".removeprefix("v1/") if match.api.startswith("artifact") else name
        self.store[path] = body
        if match.api == "storage.v1":
            # Something in it, so that removing it has to empty it first.
            self.store[f"{path}/o/checkpoints%2Fa"] = {"name": "checkpoints/a", "generation": "1"}
            self.store[f"{path}/folders/checkpoints%2F"] = {"name": "checkpoints/"}
            return Reply(status=200, body=body)
        failing = next((key for key in self.fail if key in name), None)
        error = self.fail.pop(failing) if failing else None
        busy = "/".join(path.split("/")[:7]) if match.api == "container.v1" else None
        if match.api == "container.v1":
            body |= {"status": "PROVISIONING", "location": path.split("/")[4]}
        gcp_services.begin_nodes(self, match, path, body)
        if "nodePools" in body:
            for pool in body["nodePools"]:
                self.store[f"{path}/nodePools/{pool['name']}"] = {**pool, "status": "RUNNING"}

        def finish(cancelled: bool = False) -> None:
            if match.api == "container.v1":
                body["status"] = "ERROR" if error or cancelled else "RUNNING"
                if error:
                    body["statusMessage"] = error[1]
            elif error:
                self.store.pop(path, None)
            if folder.endswith("clusters") and not error:
                body["endpoint"] = HOST

        late = next((part for part in self.slow if part in f"{folder.rpartition('/')[2]}/{name}"), None)
        looks = self.slow.pop(late) if late else None
        return self.begin(folder, body, finish, error=error, busy=busy, api=match.api, looks=looks)

    def _refusal(self, match: Match, path: str, body: dict[str, Any]) -> Reply | None:
        """What Google says before it begins."""
        network = body.get("network")
        if network and match.api == "compute.v1":
            key = "compute/v1/" + network.split("/compute/v1/")[-1]
            if key not in self.store:
                return _error(404, "notFound")
            if self.pending(key):
                self.advance(lambda one: one.body.get("targetLink", "").endswith(key))
                return _error(400, "resourceNotReady")
        if "/routers/" in path and (trouble := gcp_services.second_way_out(self.store, path, body)):
            return _error(400, "invalid", trouble)
        management = gcp_services.management(self.store, match, path, body)
        if trouble := management or gcp_services.identity(self, body) or gcp_services.slice_pool(match, body):
            return _error(400, "badRequest", trouble)
        if match.id.endswith("nodePools.create"):
            cluster = path.rpartition("/nodePools/")[0]
            if self.store.get(cluster, {}).get("status") != "RUNNING":
                return _error(404, "notFound")
            if any(one.busy == cluster for one in self.operations.values()):
                self.advance(lambda one: one.busy == cluster)
                return _error(400, "CLUSTER_ALREADY_HAS_OPERATION")
        return None

    def _delete(self, match: Match, path: str) -> Reply:
        if path not in self.store:
            return _error(404, "notFound")
        name = path.rpartition("/")[2]
        if match.api == "container.v1":
            cluster = "/".join(path.split("/")[:7])
            if any(one.busy == cluster for one in self.operations.values()):
                self.advance(lambda one: one.busy == cluster)
                return _error(400, "CLUSTER_ALREADY_HAS_OPERATION")
        users = [
            key for key, body in self.store.items()
            if key != path and any(str(body.get(at, "")).rpartition("/")[2] == name for at in ("network", "subnetwork"))
        ]  # fmt: skip
        nodes = [key for key, body in list(self.store.items()) if f'"subnetwork": "{name}"' in json.dumps(body)]
        if match.api == "compute.v1" and (users or nodes):
            return _error(400, "resourceInUseByAnotherResource")
        if match.id == "storage.buckets.delete" and any(key.startswith(f"{path}/") for key in self.store):
            return _error(409, "conflict")
        if match.api in ("storage.v1", "iam.v1"):
            del self.store[path]
            gcp_services.forget(self, path)
            return Reply(status=204)

        def finish(cancelled: bool = False) -> None:
            for key in [key for key in self.store if key == path or key.startswith(path + "/")]:
                del self.store[key]
                gcp_services.forget(self, key)

        busy = "/".join(path.split("/")[:7]) if match.api == "container.v1" else None
        if busy:
            self.store[path]["status"] = "STOPPING"
        return self.begin(path.rpartition("/")[0], {}, finish, busy=busy, api=match.api, target=path)
