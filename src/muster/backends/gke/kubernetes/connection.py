"""One API server through lightkube: kubeconfigs, credentials, TLS, objects. Imported once a cluster is contacted.

Some requests go over lightkube's HTTP library directly, with the same credentials. Creation and deletion: see there.
Discovery: lightkube has none, and a pod's service account may not list CustomResourceDefinitions. Watches and followed
logs: lightkube's cannot be closed from another thread, never time out on a connection that a load balancer dropped,
split lines at ``\\r``, and resume by seconds instead of by a time. Commands in pods: lightkube sends all input before
it reads any output.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx2
import msgspec
from httpx2.websockets import WebSocketUpgradeError
from lightkube.config.client_adapter import user_auth, verify_cluster
from lightkube.config.kubeconfig import SingleConfig
from lightkube.config.models import Cluster as Server
from lightkube.config.models import User
from lightkube.core.client import Client
from lightkube.core.decoders import decode_list
from lightkube.core.exceptions import ConfigError
from lightkube.generic_resource import GenericGlobalResource, GenericNamespacedResource, create_api_info
from lightkube.types import PatchType

from muster.backends.gke.kubernetes import streams
from muster.backends.gke.kubernetes.streams import Lines, Stream
from muster.backends.google.api_server_transport import network
from muster.backends.google.http import Reply, Unreachable, parse_reply
from muster.core.errors import AccessError, BackendError
from muster.core.typed_json import Json, JsonObject, child, text

_TYPES: dict[Kind, type[Any]] = {}
_TYPES_LOCK = threading.Lock()
TIMEOUT_S = 60.0
SILENCE_S = 300.0
"""A load balancer may drop a connection without notice; asking again after this long costs one request."""


@dataclass(kw_only=True)
class Connection:
    """Sends to one API server. A refusal is a reply; Unreachable: no answer came."""

    config: SingleConfig
    transport: httpx2.BaseTransport | None = None
    """None: the network."""
    _client: Client = field(init=False)
    _http: httpx2.Client = field(init=False)

    def __post_init__(self) -> None:
        user = self.config.user or User()
        config = self.config = self.config._replace(user=user)
        transport = self.transport or network(
            self.endpoint, verify_cluster(config.cluster, user, config.abs_file, trust_env=False)
        )
        timeout = httpx2.Timeout(TIMEOUT_S)
        # The transport has the certificates; lightkube would load them, and a bundle of authorities, once more.
        bare = config._replace(
            cluster=Server(server=self.endpoint, insecure=True),
            user=User(
                exec=user.exec,
                username=user.username,
                password=user.password,
                token=user.token,
                token_file=user.token_file,
            ),
        )
        self._client = Client(config=bare, timeout=timeout, transport=transport, field_manager="muster")
        self._http = httpx2.Client(
            base_url=self.endpoint, timeout=timeout, transport=transport, auth=user_auth(user), trust_env=False,
            event_hooks={"response": [_read_refusal]},
        )  # fmt: skip

    @property
    def endpoint(self) -> str:
        return str(self.config.cluster.server).rstrip("/")

    def get(self, kind: Kind, name: str, namespace: str) -> Reply:
        return _reply(lambda: self._client.get(_resource(kind), name, **_within(kind, namespace)))

    def apply(self, kind: Kind, manifest: JsonObject, *, dry_run: bool) -> Reply:
        name = text(manifest, "metadata", "name")
        where = _within(kind, text(manifest, "metadata", "namespace", default="default"))
        return _reply(
            lambda: self._client.patch(
                _resource(kind), name, dict(manifest), patch_type=PatchType.APPLY, force=True, dry_run=dry_run, **where
            )
        )

    def create(self, kind: Kind, manifest: JsonObject) -> Reply:
        """POST: an object that is there stays as it is (409). lightkube's would need a type for each kind."""
        metadata, root = child(manifest, "metadata"), root_of(kind.api)
        where = f"namespaces/{text(metadata, 'namespace', default='default')}/" if kind.namespaced else ""
        query = {"fieldManager": "muster", "fieldValidation": "Strict"}
        with _translated("the API server"):
            response = self._http.post(f"{root}/{where}{kind.plural}", json=dict(manifest), params=query)
        reply = parse_reply(response.status_code, response.content)
        if reply.status < 300 and not text(reply.body, "metadata", "uid"):
            raise Unreachable("no answer from the API server that can be read")
        return reply

    def list(self, kind: Kind, namespace: str, labels: Mapping[str, str]) -> Reply:
        """All pages, under ``items``."""
        where = _within(kind, namespace)
        return _reply(lambda: {"items": list(self._client.list(_resource(kind), labels=dict(labels), **where))})

    def delete(self, kind: Kind, name: str, namespace: str, uid: str = "") -> Reply:
        """``uid``: that object alone, and no later one of its name (409); lightkube has no such condition."""
        where = f"namespaces/{namespace}/" if kind.namespaced else ""
        options: dict[str, Json] = {"kind": "DeleteOptions", "apiVersion": "v1", "propagationPolicy": "Background"}
        if uid:
            options["preconditions"] = {"uid": uid}
        with _translated("the API server"):
            path = f"{root_of(kind.api)}/{where}{kind.plural}/{name}"
            response = self._http.request("DELETE", path, json=options)
        reply = parse_reply(response.status_code, response.content)
        if reply.status < 300 and not text(reply.body, "kind"):  # the object, or a Status
            raise Unreachable("no answer from the API server that can be read")
        return reply

    def read(self, path: str, query: Mapping[str, str] | None = None) -> Reply:
        """GET of a path that is no object: discovery, a log."""
        with _translated(path):
            response = self._http.get(path, params=query or {})
            return parse_reply(response.status_code, response.content)

    def follow(self, path: str, query: Mapping[str, str]) -> Lines | Reply:
        """A response that goes on, or the refusal."""
        with _translated(path):
            timeout = httpx2.Timeout(TIMEOUT_S, read=SILENCE_S)
            request = self._http.build_request("GET", path, params=query, timeout=timeout)
            response = self._http.send(request, stream=True)
            if response.status_code == 200:
                return streams.HttpLines(response)
            return parse_reply(response.status_code, response.read())

    def open(self, path: str, query: Sequence[tuple[str, str]]) -> Stream:
        """A stream to a command in a pod.

        Raises:
            AccessError, BackendError: the server refuses.
        """
        url = f"{self.endpoint}/{path}"
        try:
            with _translated(path):
                return streams.open_stream(self._http, path, query, TIMEOUT_S)
        except WebSocketUpgradeError as refused:
            reply = parse_reply(refused.response.status_code, refused.response.content)
            if reply.status in (401, 403):
                raise AccessError(f"{url}: {reply.message}", hint="the role needs create on pods/exec") from refused
            raise BackendError(f"{url}: {reply.message}") from refused


def _resource(kind: Kind) -> type[Any]:
    """A class of lightkube's that keeps every field as it is, also of kinds that lightkube has models for.

    Its list model is used here once: msgspec builds a type at its first use, and two threads that do so at the same
    time crash the interpreter (msgspec 0.22).
    """
    with _TYPES_LOCK:
        if kind not in _TYPES:
            group, _, version = kind.api.rpartition("/")
            base = GenericNamespacedResource if kind.namespaced else GenericGlobalResource
            info = create_api_info(group, version, kind.kind, kind.plural)
            resource = type(kind.kind, (base,), {"_api_info": info})
            decode_list(b'{"items": [], "metadata": {}}', resource)
            _TYPES[kind] = resource
        return _TYPES[kind]


def _within(kind: Kind, namespace: str) -> Any:
    """As keyword arguments: lightkube's overloads tell a namespaced kind from one of the cluster by them."""
    return {"namespace": namespace} if kind.namespaced else {}


def _reply(send: Callable[[], Any]) -> Reply:
    """What lightkube returned or refused, as a reply."""
    try:
        with _translated("the API server"):
            return Reply(status=200, body=send())
    except httpx2.HTTPStatusError as error:
        return parse_reply(error.response.status_code, error.response.content)
    except msgspec.DecodeError as error:  # half a document, or a proxy's page
        raise Unreachable(f"no answer from the API server that can be read: {error}") from error


@contextlib.contextmanager
def _translated(path: str) -> Iterator[None]:
    try:
        yield
    except httpx2.HTTPStatusError:
        raise
    except httpx2.HTTPError as error:
        raise Unreachable(f"no answer from {path}: {error!r}") from error
    except ConfigError as error:
        raise AccessError(f"the kubeconfig's credentials do not work: {error}", hint="kubectl get pods") from error


def _read_refusal(response: httpx2.Response) -> None:
    """A streamed response is read only where it is a refusal: what asked for a stream shows its message."""
    if response.status_code >= 300:
        response.read()


@dataclass(frozen=True, kw_only=True)
class Kind:
    """Enough to address its objects."""

    api: str
    kind: str
    plural: str
    namespaced: bool


def root_of(api: str) -> str:
    """Path of a group and version."""
    return f"apis/{api}" if "/" in api else f"api/{api}"
