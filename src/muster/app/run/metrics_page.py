"""The Prometheus page of a run (``metrics`` of the run file): served in the supervisor's process, by own threads.

Events are folded as they come, a few microseconds each; the page is made on request. A request shows a token
that is derived from the run's, and from which the run's cannot be derived: it opens nothing else.
"""

from __future__ import annotations

import contextlib
import hmac
import http.client
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler

from muster.app.run.cloud_monitoring import cloud_monitoring
from muster.app.run.event_writer import Sink
from muster.app.run.otlp import otlp_export
from muster.app.run.run_figures import RunFigures
from muster.app.web.server import CLIENT_S, BoundedServer
from muster.config.spec import Metrics
from muster.core.clock import SystemClock
from muster.core.errors import BackendError, MusterError, UsageError
from muster.core.events import Event
from muster.core.processes import read_plain
from muster.core.protocols import Clock
from muster.report.exposition import CONTENT_TYPE
from muster.storage import run_registry
from muster.storage.run_registry import RunDir, replace_text
from muster.supervise.process.run_file import read_run_id, read_spec
from muster.supervise.process.supervisor import Supervisor
from muster.transport.secure_session import run_token, token_for_pages

ADDRESS = "metrics.json"
"""File in the run's folder: where the page is served now."""
PATH = "/metrics"


@dataclass
class MetricsPage(Sink):
    """Serves from the first event on."""

    figures: RunFigures
    settings: Metrics
    token: str
    supervisor: Supervisor
    clock: Clock = field(default_factory=SystemClock)
    name = "the metrics page"
    _server: _Server | None = None
    _begun: bool = False

    def event(self, event: Event) -> None:
        self.figures.add(event)
        if not self._begun:
            self._begun = True
            self._begin()

    def left_out(self, count: int) -> None:
        self.figures.missed()

    def _begin(self) -> None:
        bind, port = self.settings.bind, self.settings.port or 0
        try:
            self._server = _Server(self, bind, port)
        except OSError as error:
            self.supervisor.note(f"no metrics page: {bind} port {port}: {error.strerror or error} (metrics.port)")
            return
        self._server.begin("muster-metrics")
        where = {"host": bind, "port": self._server.server_address[1]}
        with contextlib.suppress(OSError):  # a full disk: the page is served all the same
            replace_text(self.figures.run_dir / ADDRESS, json.dumps(where))

    def page(self) -> str:
        """At this moment. From any thread."""
        return self.figures.page(self.clock.wall_ns())

    def gone(self, why: str) -> bool:
        """A page that no longer follows the run would mislead: it is taken away."""
        self.end(None)
        return False

    def end(self, code: int | None) -> None:
        server, self._server = self._server, None
        if server is not None:
            server.end()
            with contextlib.suppress(OSError):
                (self.figures.run_dir / ADDRESS).unlink(missing_ok=True)


class _Server(BoundedServer):
    def __init__(self, owner: MetricsPage, bind: str, port: int) -> None:
        self.owner, self._failed = owner, False
        super().__init__(bind, port, _Handler)

    def handle_error(self, request: object, client_address: object) -> None:
        """As a rule the client is gone; an error of our own is reported, once."""
        error = sys.exc_info()[1]
        if not isinstance(error, OSError) and not self._failed:
            self._failed = True
            self.owner.supervisor.note(f"the metrics page could not be made: {type(error).__name__}: {error}")


class _Handler(BaseHTTPRequestHandler):
    timeout = CLIENT_S
    server_version, sys_version = "muster", ""
    server: _Server

    def do_GET(self) -> None:
        owner = self.server.owner
        given = self.headers.get("Authorization", "").encode()
        if not hmac.compare_digest(given, f"Bearer {owner.token}".encode()):
            self._answer(401, "the run's metrics need its token: muster metrics RUN --scrape-config\n")
        elif self.path.partition("?")[0] != PATH:
            self._answer(404, f"{PATH} is all there is\n")
        else:
            self._answer(200, owner.page())

    def _answer(self, status: int, text: str) -> None:
        body = text.encode()
        self.send_response(status)
        self.send_header("Content-Type", CONTENT_TYPE if status == 200 else "text/plain; charset=utf-8")
        self.send_header("Content-Length", str(len(body)))
        if status == 401:
            self.send_header("WWW-Authenticate", "Bearer")
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """A scrape is no news."""


def metrics_sinks(supervisor: Supervisor) -> Sequence[Sink]:
    """What carries this run's figures to where its run file wants them."""
    run_dir = supervisor.run_dir.resolve()
    try:
        run_id, spec = read_run_id(run_dir), read_spec(run_dir)
        settings = spec.metrics
        token = token_for_pages(run_token(run_dir)) if settings.port is not None else ""
    except (MusterError, OSError, ValueError, KeyError):
        return ()  # ``serve`` says so
    sinks: list[Sink] = []
    if settings.port is not None:
        sinks.append(MetricsPage(RunFigures(run_dir, run_id), settings, token, supervisor))
    if settings.otlp is not None:
        sinks.append(otlp_export(settings.otlp, RunFigures(run_dir, run_id), supervisor.note))
    if settings.cloud_monitoring and spec.resources.project:
        sinks.append(cloud_monitoring(spec.resources.project, RunFigures(run_dir, run_id), supervisor.note))
    return sinks


def fetch(reference: str) -> str:
    """The page of a run that is supervised on this machine.

    Raises:
        UsageError: no such run, or it serves no page here.
        BackendError: the page does not answer.
    """
    run = run_registry.find(reference)
    host, port = _address(run)
    connection = http.client.HTTPConnection(host, port, timeout=CLIENT_S)
    headers = {"Authorization": f"Bearer {token_for_pages(run_token(run.path))}"}
    try:
        connection.request("GET", PATH, headers=headers)
        answer = connection.getresponse()
        text = answer.read().decode()
    except (OSError, http.client.HTTPException) as error:
        raise BackendError(
            f"the metrics page of {run.run_id} at {host} port {port} does not answer: {error}"
        ) from error
    finally:
        connection.close()
    if answer.status != 200:
        raise BackendError(f"the metrics page of {run.run_id} says {answer.status}: {text.strip()[:200]}")
    return text


def scrape_config(reference: str) -> str:
    """What a Prometheus on this machine adds to its configuration to scrape the run. Holds a secret."""
    run = run_registry.find(reference)
    host, port = _address(run)
    target = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    return "\n".join(
        (
            "scrape_configs:",
            f"- job_name: {json.dumps('muster-' + run.run_id)}",
            f"  static_configs: [{{targets: [{json.dumps(target)}]}}]",
            "  authorization:",
            f"    credentials: {json.dumps(token_for_pages(run_token(run.path)))}",
        )
    )


def _address(run: RunDir) -> tuple[str, int]:
    try:
        found = json.loads(read_plain(run.path / ADDRESS))
        host, port = str(found["host"]), int(found["port"])
    except (OSError, ValueError, KeyError, TypeError):
        raise UsageError(
            f"{run.run_id} serves no metrics page on this machine",
            hint="metrics.port=0 in the run file, while it trains; on GKE the cluster's collector reads it",
        ) from None
    return {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host), port
