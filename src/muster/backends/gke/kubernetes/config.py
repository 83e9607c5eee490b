"""Which API server, and with whose credentials: a kubeconfig, a pod's service account, or Google's for its clusters."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from lightkube.config.client_adapter import user_auth
from lightkube.config.kubeconfig import KubeConfig, SingleConfig
from lightkube.config.models import Cluster as Server
from lightkube.config.models import User
from lightkube.core.exceptions import ConfigError

from muster.backends.gke.kubernetes.api import Cluster
from muster.backends.gke.kubernetes.connection import Connection
from muster.backends.google.session import Session
from muster.core.errors import AccessError, UsageError
from muster.core.protocols import Clock

ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")


def connect(cluster: str, clock: Clock) -> Cluster:
    """The cluster of ``kubeconfig:PATH[#CONTEXT]``: with a token, a client certificate, or a credential program.

    Raises:
        UsageError: no such file or context, or credentials of an unknown kind.
    """
    path, _, context = cluster.removeprefix("kubeconfig:").partition("#")
    try:
        config = KubeConfig.from_file(path)
        name = context or config.current_context
        if name not in config.contexts:
            known = ", ".join(config.contexts) or "none"
            raise UsageError(f"{path} has no {name!r} among its contexts", hint=f"there are: {known}")
        chosen = config.get(name)
        assert chosen is not None
        user_auth(chosen.user)
        return Cluster(connection=Connection(config=chosen), clock=clock)
    except UsageError:
        raise
    except (ConfigError, OSError, ValueError, TypeError, KeyError) as error:
        raise UsageError(f"cannot read the kubeconfig {path}: {error}", hint="resources.cluster") from error


def own_cluster(clock: Clock, environ: Mapping[str, str], account: Path = ACCOUNT) -> Cluster:
    """The cluster that this pod runs in, as its service account.

    Raises:
        AccessError: this is no pod, or it was given no account.
    """
    host, port = environ.get("KUBERNETES_SERVICE_HOST"), environ.get("KUBERNETES_SERVICE_PORT", "443")
    if not host or not (account / "token").exists():
        raise AccessError("no service account: not running in a pod, or the pod has none")
    endpoint = f"https://[{host}]:{port}" if ":" in host else f"https://{host}:{port}"
    server = Server(server=endpoint, certificate_auth=str(account / "ca.crt"))
    return Cluster(connection=Connection(config=_one(server, User(token_file=str(account / "token")))), clock=clock)


def google_cluster(endpoint: str, ca_pem: str | None, session: Session) -> Cluster:
    """A cluster of Google's, with the session's credentials."""
    transport = session.http.transport(endpoint, ca_pem)
    connection = Connection(config=_one(Server(server=endpoint)), transport=transport)
    return Cluster(connection=connection, clock=session.clock)


def _one(server: Server, user: User | None = None) -> SingleConfig:
    config = KubeConfig.from_one(cluster=server, user=user).get()
    assert config is not None
    return config
