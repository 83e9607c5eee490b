"""What a worker of a custom job can reach: services under its identity, its metadata, other workers by name."""

from __future__ import annotations

import contextlib
import errno
import re
import socket
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from fakes.google_wire import refuse
from fakes.secrets import FakeSecrets
from fakes.vertex.jobs import Job
from fakes.vertex.service import NUMBER, FakeVertex
from fakes.vertex.workers import Worker

from muster.backends.google.http import Call, Reply

TENANT = "a1b2c3d4e5f6a7b8-tp"
"""The project that the code runs in: Google's, not ours."""
AGENT = f"service-{NUMBER}@gcp-sa-aiplatform-cc.iam.gserviceaccount.com"
"""Who runs the code where the job names no account of its own."""
SCOPES = ("https://www.googleapis.com/auth/devstorage.full_control", "https://www.googleapis.com/auth/bigquery")
CLOUD_PLATFORM = "https://www.googleapis.com/auth/cloud-platform"


@dataclass
class FromWorker:
    """Google's services as one worker's default credentials reach them."""

    vertex: FakeVertex
    job: Job
    secrets: FakeSecrets

    @property
    def account(self) -> str:
        return str(self.job.spec.get("serviceAccount", AGENT))

    def send(self, call: Call) -> Reply:
        named = re.search(r"/projects/([^/:]+)", call.url)
        if named and named[1] == TENANT:
            return refuse(403, "PERMISSION_DENIED", f"Permission denied on resource project {TENANT}.")
        if call.url.startswith("https://secretmanager."):
            if self.account == AGENT:
                words = "Request had insufficient authentication scopes."
                return refuse(403, "ACCESS_TOKEN_SCOPE_INSUFFICIENT", words)
            return self.secrets.as_account(self.account, call)
        return self.vertex.send(call)

    def metadata(self) -> dict[str, str]:
        """Below ``/computeMetadata/v1/``: no ``preempted``, no maintenance; no identity where one replica runs as an
        own account."""
        own = self.account != AGENT
        base = "instance/service-accounts/default"
        found = {
            "project/project-id": TENANT,
            "project/numeric-project-id": "987654321098",
            "instance/zone": f"projects/987654321098/zones/{self.job.region}-a",
            f"{base}/email": self.account,
            f"{base}/scopes": "\n".join((CLOUD_PLATFORM,) if own else SCOPES) + "\n",
            f"{base}/token": '{"access_token":"ya29.worker","expires_in":240,"token_type":"Bearer"}',
        }
        if not (own and len(self.job.workers) == 1):
            found[f"{base}/identity"] = "header.payload.signature"
        return found


@dataclass
class Names:
    """Who reaches whom: a worker's name is a service's address, which passes on the listed ports alone."""

    job: Job
    open_ports: tuple[int, ...] = (3333,)
    services: dict[str, str] = field(default_factory=dict)

    def resolve(self, host: str) -> str:
        """Address of the service of that name. Raises gaierror until its worker is up."""
        worker = next((one for one in self.job.workers if one.host == host), None)
        if worker is None or not worker.running:
            raise socket.gaierror(socket.EAI_NONAME, f"Name or service not known: {host}")
        return self.services.setdefault(host, f"10.12.0.{80 + len(self.services)}")

    def connect(self, asking: Worker | None, address: str, port: int) -> Worker:
        """The worker that a connection ends at. Raises OSError: no route (asked from outside), or refused."""
        if asking is None:
            raise OSError(errno.ENETUNREACH, "Network is unreachable")
        name = next((host for host, service in self.services.items() if service == address), None)
        for worker in self.job.workers:
            if not worker.running:
                continue
            if worker.address == address:
                return worker
            if worker.host == name and worker is not asking and port in (2222, 6000, *self.open_ports):
                return worker
        raise ConnectionRefusedError(errno.ECONNREFUSED, f"Connection refused: {address}:{port}")


@contextlib.contextmanager
def forwarder(service: str, target: str, ports: tuple[int, ...]) -> Iterator[None]:
    """A service's address on this machine (all of 127.0.0.0/8 is): the listed ports are passed on to the target's,
    but not to the target itself; every other port is refused."""
    listeners = [socket.create_server((service, port)) for port in ports]
    for listener in listeners:
        threading.Thread(target=_accept, args=(listener, target), daemon=True).start()
    try:
        yield
    finally:
        for listener in listeners:
            listener.shutdown(socket.SHUT_RDWR)
            listener.close()


def _accept(listener: socket.socket, target: str) -> None:
    port = listener.getsockname()[1]
    while True:
        try:
            near, (source, _) = listener.accept()
        except OSError:
            return
        try:
            if source == target:
                raise ConnectionRefusedError("not by its own name")
            far = socket.create_connection((target, port), timeout=10)
        except OSError:
            near.close()
            continue
        far.settimeout(None)
        for one, other in ((near, far), (far, near)):
            threading.Thread(target=_copy, args=(one, other), daemon=True).start()


def _copy(source: socket.socket, sink: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while data := source.recv(1 << 16):
            sink.sendall(data)
    with contextlib.suppress(OSError):
        sink.shutdown(socket.SHUT_WR)


def spec_of(job: Job) -> dict[str, Any]:
    """Everything that anybody who may read the job can read in it."""
    return {"job": job.body, "environments": [job.environment(worker) for worker in job.workers]}
