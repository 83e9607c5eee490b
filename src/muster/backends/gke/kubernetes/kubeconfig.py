"""Any Kubernetes API server: by a kubeconfig, or by the service account that a pod is given. No Google in it."""

from __future__ import annotations

import base64
import os
import ssl
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from muster.backends.gke.kubernetes.api import Cluster
from muster.backends.gke.kubernetes.http import Call, Reply, exchange, lines, stream
from muster.backends.gke.kubernetes.stream import Lines, Stream
from muster.backends.gke.provision.session import Session
from muster.core.errors import AccessError, UsageError
from muster.core.protocols import Clock

PREFIX = "kubeconfig:"
"""``resources.cluster: kubeconfig:PATH`` or ``kubeconfig:PATH#CONTEXT``."""
ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")


@dataclass(kw_only=True)
class KubernetesHttp:
    """Sends to one API server, with a bearer token or a client certificate."""

    trust: ssl.SSLContext
    token: str | None = None
    token_file: Path | None = None
    """Read anew for each request: a pod's token is exchanged while it runs."""
    timeout_s: float = 60.0

    def send(self, call: Call) -> Reply:
        return exchange(call, self._headers(), self.trust, self.timeout_s)

    def open(self, call: Call) -> Stream:
        return stream(call, self._headers(), self.trust, self.timeout_s)

    def lines(self, call: Call) -> Lines | Reply:
        return lines(call, self._headers(), self.trust, self.timeout_s)

    def _headers(self) -> Mapping[str, str]:
        token = self.token_file.read_text().strip() if self.token_file else self.token
        return {"authorization": f"Bearer {token}"} if token else {}


def named(cluster: str | None) -> bool:
    """Whether the run file names its cluster by a kubeconfig."""
    return bool(cluster) and str(cluster).startswith(PREFIX)


def connect(cluster: str, clock: Clock) -> Cluster:
    """The cluster of ``kubeconfig:PATH[#CONTEXT]``.

    Raises:
        UsageError: no such file or context, or a way of proving oneself that is not known here.
    """
    path, _, context = cluster.removeprefix(PREFIX).partition("#")
    document = _document(Path(path).expanduser())
    wanted = context or str(document.get("current-context", ""))
    chosen = _entry(document, "contexts", wanted, path)["context"]
    server = _entry(document, "clusters", chosen.get("cluster"), path)["cluster"]
    user = _entry(document, "users", chosen.get("user"), path)["user"] if chosen.get("user") else {}
    if unknown := [key for key in ("exec", "auth-provider") if key in user]:
        raise UsageError(
            f"{path} proves its user by {unknown[0]}, which is not known here",
            hint="a token or a client certificate; on GKE drop the kubeconfig and name the project",
        )
    token_file = Path(user["tokenFile"]) if user.get("tokenFile") else None
    http = KubernetesHttp(trust=_trust(server, user), token=user.get("token"), token_file=token_file)
    return Cluster(session=Session(http=http, clock=clock), endpoint=str(server["server"]).rstrip("/"), ca_pem=None)


def own_cluster(clock: Clock, environ: Mapping[str, str], account: Path = ACCOUNT) -> Cluster:
    """The cluster that this pod runs in, as its service account.

    Raises:
        AccessError: this is no pod, or it was given no account.
    """
    host, port = environ.get("KUBERNETES_SERVICE_HOST"), environ.get("KUBERNETES_SERVICE_PORT", "443")
    if not host or not (account / "token").exists():
        raise AccessError("no service account: this is no pod, or it was given none")
    trust = ssl.create_default_context(cafile=str(account / "ca.crt"))
    http = KubernetesHttp(trust=trust, token_file=account / "token")
    at = f"[{host}]" if ":" in host else host
    return Cluster(session=Session(http=http, clock=clock), endpoint=f"https://{at}:{port}", ca_pem=None)


def _document(path: Path) -> dict[str, Any]:
    from ruamel.yaml import YAML
    from ruamel.yaml.error import YAMLError

    try:
        found = YAML(typ="safe", pure=True).load(path.read_text(encoding="utf-8"))
    except (OSError, YAMLError) as error:
        raise UsageError(f"cannot read the kubeconfig {path}: {error}", hint="resources.cluster") from error
    return found if isinstance(found, dict) else {}


def _entry(document: Mapping[str, Any], kind: str, name: object, path: str) -> Any:
    rows = document.get(kind) or []
    for row in rows:
        if row.get("name") == name:
            return row
    known = ", ".join(str(row.get("name")) for row in rows) or "none"
    raise UsageError(f"{path} has no {name!r} among its {kind}", hint=f"there are: {known}")


def _trust(server: Mapping[str, Any], user: Mapping[str, Any]) -> ssl.SSLContext:
    authority = _bytes(server, "certificate-authority")
    context = ssl.create_default_context(cadata=authority.decode() if authority else None)
    if server.get("insecure-skip-tls-verify"):
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    certificate, key = _bytes(user, "client-certificate"), _bytes(user, "client-key")
    if certificate and key:
        # The ssl module takes files alone; this one is the user's own, readable by no one else, and gone at once.
        with tempfile.NamedTemporaryFile("wb", suffix=".pem") as file:
            os.fchmod(file.fileno(), 0o600)
            file.write(certificate + b"\n" + key)
            file.flush()
            context.load_cert_chain(file.name)
    return context


def _bytes(entry: Mapping[str, Any], key: str) -> bytes | None:
    if f"{key}-data" in entry:
        return base64.b64decode(entry[f"{key}-data"])
    return Path(entry[key]).expanduser().read_bytes() if key in entry else None
