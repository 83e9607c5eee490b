"""The run's figures at Cloud Monitoring: held against Google's own description of the API, over real HTTP once."""

from __future__ import annotations

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
from fakes.discovery import Discovery, folder
from fakes.metadata import metadata, token
from fakes.monitoring import API, FakeMonitoring

from muster.app.run import cloud_monitoring as module
from muster.app.run import run_figures
from muster.app.run.cloud_monitoring import CloudMonitoring, cloud_monitoring, series
from muster.app.run.metrics_page import metrics_sinks
from muster.app.run.run_figures import RunFigures
from muster.backends.google.http import Call
from muster.backends.google.metadata import MachineHttp
from muster.config.load import loads
from muster.core.errors import RunFileError
from muster.core.events import Event
from muster.report.exposition import Family

STEP = {
    "loss": 2.5, "grad_norm": 1.0, "learning_rate": 0.1, "step_ns": 10**9, "tokens": 100, "supervised_tokens": 90,
    "padding_tokens": 0,
}  # fmt: skip
USAGE = {
    "steps": 3, "interval_ns": 3 * 10**9, "cpu_ns": 10**9, "received_bytes": 1000, "sent_bytes": 2000,
    "gpu_busy": [0.5, 0.75], "gpu_memory_bytes": [1, 2],
}  # fmt: skip


def event(kind: str, step: int | None = None, *, host: str = "host-0", **detail: Any) -> Event:
    return Event(
        run_id="demo-1", attempt=1, seq=0, mono_ns=0, wall_ns=10**18, host=host, kind=kind, step=step, detail=detail
    )


@pytest.fixture(scope="module")
def discovery() -> Discovery:
    documents = folder()
    if documents is None:
        pytest.skip("google-api-python-client (Google's discovery documents) is not installed")
    return Discovery(documents, (API,))


class Clock:
    """Of the sink, in seconds after its first look."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_s = 0.0
        monkeypatch.setattr(run_figures.time, "monotonic", lambda: self.now_s)
        monkeypatch.setattr(module.time, "sleep", self.sleep)

    def wall_ns(self) -> int:
        return 2 * 10**18 + int(self.now_s * 1e9)

    def monotonic_ns(self) -> int:
        return int(self.now_s * 1e9)

    def sleep(self, seconds: float) -> None:
        self.now_s += seconds


def sink(tmp_path: Any, service: Any, clock: Any, said: list[str]) -> CloudMonitoring:
    found = cloud_monitoring("example-project", RunFigures(tmp_path, "demo-1"), said.append)
    found.http, found.clock = service, clock
    return found


def test_step_time_gpu_and_network_arrive_once_a_minute_and_at_the_end(discovery, tmp_path, monkeypatch):
    service, clock, said = FakeMonitoring(discovery), Clock(monkeypatch), list[str]()
    export = sink(tmp_path, service, clock, said)
    for number in range(130):  # one step a second
        export.event(event("step", number, **STEP))
        if number % 10 == 0:
            export.event(event("host.usage", number, **USAGE))
        clock.now_s += 1
    assert service.requests == 3 and said == []
    clock.now_s += 0.5
    export.end(0)
    assert said == [] and service.requests == 4, "the last point is not too early for Google"
    found = {}
    for name, points in service.points.items():
        metric, resource = json.loads(name)
        assert resource["type"] == "generic_task" and resource["labels"]["job"] == "demo-1"
        assert metric["labels"].pop("run") == "demo-1"
        found[metric["type"], *metric["labels"].values()] = [value for _, _, value in points]
    custom = "custom.googleapis.com/muster_"
    assert found[custom + "step_seconds",] == [1.0] * 4
    assert found[custom + "step",] == [0, 60, 120, 129]
    assert found[custom + "gpu_utilization_ratio", "1", "host-0"] == [0.75] * 3
    assert found[custom + "host_network_bytes_total", "sent", "host-0"] == [12000, 24000, 26000]
    assert found[custom + "tokens_total",] == [0, 6000, 12000, 12900], "step 0 is the state before the first one"


def test_many_hosts_are_several_requests(discovery, tmp_path, monkeypatch):
    service, clock, said = FakeMonitoring(discovery), Clock(monkeypatch), list[str]()
    export = sink(tmp_path, service, clock, said)
    for number in range(64):
        export.figures.add(event("host.usage", 1, host=f"host-{number}", **USAGE))
    export.event(event("step", 1, **STEP))
    assert said == [] and 2 <= service.requests <= 4
    names = [json.loads(name)[0]["type"] for name in service.points]
    assert sum("gpu_utilization" in name for name in names) == 128


def test_a_refusal_is_said_once_with_the_role_that_is_missing(discovery, tmp_path, monkeypatch):
    service, clock, said = FakeMonitoring(discovery, may_write=False), Clock(monkeypatch), list[str]()
    export = sink(tmp_path, service, clock, said)
    for _ in range(3):
        export.event(event("step", 1, **STEP))
        clock.now_s += 61
    assert len(said) == 1 and "roles/monitoring.metricWriter" in said[0] and "metrics.cloud_monitoring" in said[0]
    service.may_write = True
    export.event(event("step", 2, **STEP))
    assert service.points and len(said) == 1


def test_the_played_service_refuses_what_google_does(discovery):
    service, gauge = FakeMonitoring(discovery), Family("muster_x", "gauge", "X.")

    def write(now_s: float, count: int = 1) -> str:
        samples = [(gauge, {"host": str(number)}, 1.0) for number in range(count)]
        rows = series(samples, run_id="r", project="example-project", began_ns=0, now_ns=int(now_s * 1e9))
        url = f"{module.ROOT}/projects/example-project/timeSeries"
        return service.send(Call(method="POST", url=url, body={"timeSeries": list(rows)})).message

    assert write(100) == "status 200" and "more frequently" in write(103) and "in order" in write(90)
    assert "more than 200" in write(200, count=201) and write(200, count=200) == "status 200"


def test_over_http_with_the_machines_own_token(discovery, tmp_path, monkeypatch):
    service, headers = FakeMonitoring(discovery), list[str]()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            headers.append(self.headers["Authorization"])
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            url = f"https://monitoring.googleapis.com{self.path}"
            reply = service.send(Call(method="POST", url=url, body=body))
            data = json.dumps(reply.body).encode()
            self.send_response(reply.status)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, format: str, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
    monkeypatch.setattr(module, "ROOT", f"http://127.0.0.1:{server.server_address[1]}/v3")
    said: list[str] = []
    with metadata(token()) as (_, url):
        export = cloud_monitoring("example-project", RunFigures(tmp_path, "demo-1"), said.append)
        export.http = MachineHttp(server=url)
        export.event(event("step", 1, **STEP))
    server.shutdown()
    server.server_close()
    assert headers == ["Bearer ya29.fake"] and service.points and said == []
    export._sent_s = float("-inf")
    export.http = MachineHttp(server="http://127.0.0.1:1", timeout_s=1.0)
    export.event(event("step", 2, **STEP))
    assert "metadata server" in said[0], "a machine that is not Google's ends no run"


def test_the_key_needs_a_project():
    text = "name: x\nmodel: {config: {model_type: llama}}\ndata: {sources: [{type: random}]}\ntraining: {steps: 1}\n"
    with pytest.raises(RunFileError, match=r"metrics\.cloud_monitoring"):
        loads(text + "metrics: {cloud_monitoring: true}\n", environment=False)


def test_a_supervisor_sends_them_where_the_run_file_wants_it(tmp_path, monkeypatch):
    spec = loads(
        "name: x\nmodel: {config: {model_type: llama}}\ndata: {sources: [{type: random}]}\ntraining: {steps: 1}\n"
        "resources: {project: p-1}\nmetrics: {cloud_monitoring: true}\n",
        environment=False,
    ).spec
    monkeypatch.setattr("muster.app.run.metrics_page.read_spec", lambda _: spec)
    monkeypatch.setattr("muster.app.run.metrics_page.read_run_id", lambda _: "x-1")

    class Supervisor:
        run_dir = tmp_path
        note = print

    (found,) = metrics_sinks(Supervisor())  # type: ignore[arg-type]
    assert isinstance(found, CloudMonitoring) and found.url.endswith("/projects/p-1/timeSeries")
