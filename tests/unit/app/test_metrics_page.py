"""The page over HTTP: for who shows the token, from the first event of this supervisor on, until the run's end."""

from __future__ import annotations

import http.client
import json
import os
import socket
from pathlib import Path
from types import SimpleNamespace

import pytest
from waiting import eventually

from muster.app.run import metrics_page
from muster.app.run.metrics_page import MetricsPage, metrics_sinks
from muster.app.run.otlp import OtlpExport
from muster.app.run.run_figures import RunFigures
from muster.app.web.server import MOST_CLIENTS
from muster.cli import main
from muster.config import load
from muster.config.spec import Metrics
from muster.core.event_log import EventLog
from muster.core.events import Event
from muster.report.exposition import CONTENT_TYPE
from muster.storage import run_registry
from muster.storage.run_registry import RunDir
from muster.transport.secure_session import run_token, token_for_pages

RUN_FILE = """\
name: demo
model:
  config: {model_type: llama, hidden_size: 32, num_attention_heads: 4}
  tokenizer: {kind: word}
data: {sources: [{type: text2sql}]}
training: {steps: 5}
metrics: {port: 0}
"""


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunDir:
    monkeypatch.setenv("MUSTER_HOME", str(tmp_path / "home"))
    place = run_registry.home() / "runs" / "demo-1"
    found = run_registry.create(
        "demo-1", place, run_file="name: demo\n", resolved=load.loads(RUN_FILE).spec.model_dump_json()
    )
    (found.path / "job.json").write_text(json.dumps({"run_id": "demo-1"}))
    return found


def supervisor(run: RunDir) -> SimpleNamespace:
    said: list[str] = []
    return SimpleNamespace(run_dir=run.path, note=said.append, said=said)


def incident(number: int, wall_ns: int) -> Event:
    detail = {"incident_id": f"i{number}", "incident": "rank_exit", "evidence": "x"}
    return Event(
        run_id="demo-1",
        attempt=1,
        seq=number,
        mono_ns=0,
        wall_ns=wall_ns,
        host="supervisor",
        kind="incident.detected",
        detail=detail,
    )


@pytest.fixture
def page(run: RunDir):
    (found,) = metrics_sinks(supervisor(run))  # type: ignore[arg-type]
    yield found
    found.end(0)


def get(page: MetricsPage, path: str = "/metrics", token: str | None = None) -> tuple[int, str, str]:
    connection = http.client.HTTPConnection("127.0.0.1", port_of(page), timeout=10)
    headers = {} if token is None else {"Authorization": f"Bearer {token}"}
    connection.request("GET", path, headers=headers)
    answer = connection.getresponse()
    try:
        return answer.status, answer.getheader("Content-Type", ""), answer.read().decode()
    finally:
        connection.close()


def port_of(page: MetricsPage) -> int:
    return int(json.loads((page.figures.run_dir / "metrics.json").read_text())["port"])


def test_earlier_and_present_events_are_in_it_once(run: RunDir, page: MetricsPage) -> None:
    log = EventLog("demo-1", run.events, "supervisor", 1)
    earlier = log.append("incident.detected", detail={"incident_id": "i1", "incident": "rank_exit", "evidence": "x"})
    log.close()
    page.event(incident(2, earlier.wall_ns + 1))
    status, kind, text = get(page, token=token_for_pages(run_token(run.path)))
    assert (status, kind) == (200, CONTENT_TYPE)
    assert 'muster_incidents_total{run="demo-1",kind="rank_exit"} 2.0' in text.splitlines()


def test_what_it_was_too_slow_for_is_read_in_the_log(run: RunDir, page: MetricsPage) -> None:
    page.event(incident(1, 1))
    log = EventLog("demo-1", run.events, "supervisor", 1)
    for number in (1, 2, 3):
        detail = {"incident_id": f"i{number}", "incident": "rank_exit", "evidence": "x"}
        last = log.append("incident.detected", detail=detail)
    log.close()
    page.left_out(2)
    page.event(incident(4, last.wall_ns + 1))
    assert 'muster_incidents_total{run="demo-1",kind="rank_exit"} 4.0' in get(page, token=page.token)[2].splitlines()


def test_nobody_reads_it_without_the_token_and_the_token_is_not_the_runs(run: RunDir, page: MetricsPage) -> None:
    page.event(incident(1, 1))
    secret = run_token(run.path).decode()
    assert secret not in token_for_pages(secret.encode())
    for token in (None, "", "x", secret):
        status, _, text = get(page, token=token)
        assert status == 401 and "muster_" not in text
    assert get(page, path="/", token=page.token)[0] == 404


def test_a_page_of_a_run_of_no_port_costs_nothing(run: RunDir) -> None:
    without = load.loads(RUN_FILE.replace("metrics: {port: 0}\n", "")).spec
    run.resolved.write_text(without.model_dump_json())
    assert not metrics_sinks(supervisor(run))  # type: ignore[arg-type]


def test_a_receiver_is_sent_to_where_the_run_file_names_one(run: RunDir) -> None:
    named = load.loads(RUN_FILE.replace("{port: 0}", "{otlp: 'http://there:4318'}")).spec
    run.resolved.write_text(named.model_dump_json())
    (export,) = metrics_sinks(supervisor(run))  # type: ignore[arg-type]
    assert isinstance(export, OtlpExport) and export.url == "http://there:4318/v1/metrics"


def test_a_port_that_is_taken_stops_no_run(run: RunDir) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        boss = supervisor(run)
        page = MetricsPage(RunFigures(run.path, "demo-1"), Metrics(port=port), "t", boss)  # type: ignore[arg-type]
        page.event(incident(1, 1))
        page.event(incident(2, 2))
        page.end(0)
    (sentence,) = boss.said
    assert f"no metrics page: 127.0.0.1 port {port}" in sentence
    assert not (run.path / "metrics.json").exists()


def test_whoever_asks_and_says_nothing_keeps_nobody_out_for_long(
    page: MetricsPage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(metrics_page._Handler, "timeout", 0.5)
    page.event(incident(1, 1))
    silent = [socket.create_connection(("127.0.0.1", port_of(page))) for _ in range(MOST_CLIENTS + 4)]

    def answered() -> bool:
        try:
            return get(page, token=page.token)[0] == 200
        except (OSError, http.client.HTTPException):
            return False

    eventually(answered, 20)
    for one in silent:
        one.close()


def test_the_verb_prints_the_page_and_what_prometheus_needs(
    run: RunDir, page: MetricsPage, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main.run(["metrics", "demo-1"]) == 2
    assert "serves no metrics page on this machine" in capsys.readouterr().err
    page.event(incident(1, 1))
    assert main.run(["metrics", "demo-1"]) == 0
    assert 'muster_incidents_total{run="demo-1",kind="rank_exit"} 1.0' in capsys.readouterr().out
    assert main.run(["metrics", "demo-1", "--scrape-config"]) == 0
    told = capsys.readouterr().out
    assert f'targets: ["127.0.0.1:{port_of(page)}"]' in told and page.token in told
    assert os.stat(run.path / "metrics.json").st_mode & 0o077 == 0
    page.end(0)
    assert not (run.path / "metrics.json").exists()


def test_a_page_that_can_no_longer_follow_is_taken_away(page: MetricsPage) -> None:
    page.event(incident(1, 1))
    port = port_of(page)
    assert page.gone("its log was edited") is False
    with pytest.raises(OSError):
        socket.create_connection(("127.0.0.1", port), timeout=5).close()


def test_a_mistake_in_the_page_is_told_once(page: MetricsPage, monkeypatch: pytest.MonkeyPatch) -> None:
    page.event(incident(1, 1))
    monkeypatch.setattr(page.figures.metrics, "page", lambda wall_ns: 1 / 0)
    for _ in range(2):
        with pytest.raises((http.client.HTTPException, OSError)):
            get(page, token=page.token)
    said = page.supervisor.said  # type: ignore[attr-defined]
    eventually(lambda: said)
    assert said == ["the metrics page could not be made: ZeroDivisionError: division by zero"]
