"""The run's figures at an OpenTelemetry receiver over HTTP, which decodes them by the published messages."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from muster.app.run import otlp, run_figures
from muster.app.run.otlp import EVERY_S, headers_of, otlp_export
from muster.app.run.run_figures import RunFigures
from muster.core.errors import install_command
from muster.core.events import Event

service = pytest.importorskip(
    "opentelemetry.proto.collector.metrics.v1.metrics_service_pb2", reason="muster[otlp] is not installed"
)


class Receiver(ThreadingHTTPServer):
    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.got: list[tuple[str, dict[str, str], object]] = []
        self.status, self.rejected = 200, 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class Handler(BaseHTTPRequestHandler):
    server: Receiver

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        message = service.ExportMetricsServiceRequest.FromString(body)
        self.server.got.append((self.path, {name.lower(): value for name, value in self.headers.items()}, message))
        answer = service.ExportMetricsServiceResponse()
        if self.server.rejected:
            answer.partial_success.rejected_data_points = self.server.rejected
            answer.partial_success.error_message = "too old"
        self.send_response(self.server.status)
        if self.server.status == 302:
            self.send_header("Location", self.server.url + "/elsewhere")
        self.end_headers()
        self.wfile.write(answer.SerializeToString())

    do_GET = do_POST

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    found = Receiver()
    thread = threading.Thread(target=found.serve_forever, args=(0.05,))
    thread.start()
    yield found
    found.shutdown()
    thread.join()
    found.server_close()


def event(kind: str, wall_ns: int, step: int | None = None, **detail: object) -> Event:
    return Event(
        run_id="demo-1", attempt=1, seq=0, mono_ns=0, wall_ns=wall_ns, host="supervisor", kind=kind, step=step,
        detail=detail,  # type: ignore[arg-type]
    )  # fmt: skip


STEP = {
    "loss": 2.5, "grad_norm": 1.0, "learning_rate": 0.1, "step_ns": 10**9, "tokens": 100, "supervised_tokens": 90,
    "padding_tokens": 0,
}  # fmt: skip


def sink(receiver: Receiver, tmp_path: Path, said: list[str]) -> otlp.OtlpExport:
    found = otlp_export(receiver.url + "/", RunFigures(tmp_path, "demo-1"), said.append)
    assert isinstance(found, otlp.OtlpExport)
    return found


def test_gauges_and_counters_arrive_as_what_they_are(receiver, tmp_path, monkeypatch):
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "authorization=Bearer%20k1, x-scope = a")
    said = []
    export = sink(receiver, tmp_path, said)
    export.end(0)
    assert receiver.got == [], "before the first event there is nothing to say"
    export.event(event("step", 5, step=1, **STEP))
    export.event(event("incident.detected", 6, incident_id="i1", incident="rank_exit", evidence="x"))
    assert len(receiver.got) == 1, "not with every event"
    export.end(0)
    path, headers, message = receiver.got[-1]
    assert path == "/v1/metrics" and headers["content-type"] == "application/x-protobuf"
    assert (headers["authorization"], headers["x-scope"]) == ("Bearer k1", "a")
    (of_run,) = message.resource_metrics
    resource = {one.key: one.value.string_value for one in of_run.resource.attributes}
    assert resource == {"service.name": "muster", "service.instance.id": "demo-1"}
    metrics = {one.name: one for one in of_run.scope_metrics[0].metrics}
    assert len(metrics) == len(of_run.scope_metrics[0].metrics), "one of each"
    (loss,) = metrics["muster_loss"].gauge.data_points
    assert loss.as_double == 2.5 and loss.time_unix_nano > 10**18
    tokens = metrics["muster_tokens_total"].sum
    assert tokens.is_monotonic and tokens.aggregation_temporality == 2
    assert (tokens.data_points[0].as_double, tokens.data_points[0].start_time_unix_nano) == (100.0, 5)
    incidents = {
        tuple(sorted((one.key, one.value.string_value) for one in point.attributes)): point.as_double
        for point in metrics["muster_incidents_total"].sum.data_points
    }
    assert incidents[("kind", "rank_exit"), ("run", "demo-1")] == 1.0 and sum(incidents.values()) == 1.0 and said == []


def test_where_events_never_stop_it_is_sent_all_the_same(receiver, tmp_path, monkeypatch):
    now_s = [100.0]
    monkeypatch.setattr(run_figures.time, "monotonic", lambda: now_s[0])
    export = sink(receiver, tmp_path, [])
    for number in range(10):
        export.event(event("step", 5 + number, step=number, **STEP))
        now_s[0] += EVERY_S / 4
    assert len(receiver.got) == 3


@pytest.mark.parametrize("status", [302, 400, 503])
def test_what_is_not_taken_is_said_once_until_it_is_taken(receiver, tmp_path, status):
    said = []
    export = sink(receiver, tmp_path, said)
    receiver.status = status
    export.event(event("run.message", 5, text="x"))
    export.end(None)
    assert len(said) == 1 and f"HTTP {status}" in said[0] and "/v1/metrics" in said[0]
    assert all(path == "/v1/metrics" for path, *_ in receiver.got), "a key follows nobody elsewhere"
    receiver.status = 200
    export.end(None)
    receiver.status, receiver.rejected = 200, 3
    export.end(None)
    assert len(said) == 2 and "3 of" in said[1] and "too old" in said[1]


def test_nobody_there_and_no_extra_end_no_run(receiver, tmp_path, monkeypatch):
    said = []
    export = sink(receiver, tmp_path, said)
    export.url = "http://127.0.0.1:1/v1/metrics"
    export.event(event("run.message", 5, text="x"))
    assert "Connection refused" in said[0]
    export = sink(receiver, tmp_path, said)
    monkeypatch.setitem(__import__("sys").modules, service.__name__, None)
    export.event(event("run.message", 5, text="x"))
    assert install_command("otlp") in said[1]


def test_headers_in_words():
    assert headers_of("") == {} and headers_of("a=b=c, d , e=%2C") == {"a": "b=c", "e": ","}
