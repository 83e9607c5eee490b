"""``notify``: what is told, when, and that whoever is told can neither hold a run up nor see its secrets."""

import contextlib
import json
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from muster.app.run import notifications
from muster.app.run.event_writer import EventWriter
from muster.app.run.notifications import News, Notifications, program, webhook
from muster.config.load import loads
from muster.core.errors import RunFileError
from muster.core.events import Event

RUN_FILE = """\
name: told
command: [{command}]
resources: {{device: cpu}}
{more}
"""
SECOND = 10**9
NEWS = News(kind="ended", text="r: succeeded", run_id="r", name="told", wall_ns=0, step=3)


class Clock:
    def __init__(self):
        self.now_s = 0.0

    def wall_ns(self):
        return int(self.now_s * SECOND)

    def monotonic_ns(self):
        return self.wall_ns()


def spec(tmp_path, more=""):
    (tmp_path / "train.py").touch()
    return loads(RUN_FILE.format(command=tmp_path / "train.py", more=more)).spec


def event(kind, at_s, detail, **other):
    return Event(
        run_id="r", attempt=1, seq=0, mono_ns=0, wall_ns=int(at_s * SECOND), host=other.pop("host", "supervisor"),
        kind=kind, detail=detail, **other,
    )  # fmt: skip


def notifier(run, deliver, clock):
    return Notifications(name="notify.command", spec=run, run_id="r", deliver=deliver, say=lambda _: None, clock=clock)


STARTED = {"world_size": 4, "layout": {}, "hosts": {"host-0": [0, 1, 2, 3]}}
ALLOCATED = {"gpus": 4, "role": "active", "usd_per_hour": 3600.0}
FINISHED = {"outcome": "failed", "exit_code": 1, "reason": "out of eggs"}


@pytest.fixture
def told(tmp_path):
    """The sink of a run with every limit, its clock, and what it has told."""
    found, clock = [], Clock()
    run = spec(tmp_path, "notify: {command: [mail], waiting_s: 60}\nlimits: {max_usd: 100}\nrecovery: {grace_s: 5}")
    sink = notifier(run, lambda news: found.append(news) or "", clock)
    return sink, clock, found


def at(told, seconds):
    sink, clock, found = told
    clock.now_s = seconds
    sink.tend()
    return [(news.kind, news.text) for news in found]


def test_a_run_that_waits_long_is_told_once_and_so_is_the_end_of_the_wait(told):
    sink, _, found = told
    sink.event(event("host.requested", 10, {"count": 1}))
    assert at(told, 69) == []
    assert at(told, 71) == at(told, 500) == [("waiting", "r: it has waited for hosts for 61 s")]
    sink.event(event("attempt.started", 700, STARTED))
    sink.event(event("attempt.started", 800, STARTED))  # a restart that waited for nobody
    assert [news.text for news in found][1:] == ["r: its hosts came after 12 min: 4 ranks start"]


def test_a_limit_is_near_with_a_tenth_of_the_time_left_and_once(told):
    sink, _, _ = told
    sink.event(event("host.allocated", 0, ALLOCATED, host="host-0"))  # a dollar a second, and it stops 5 s early
    assert at(told, 80) == []
    assert at(told, 90) == at(told, 94) == [("limit", "r: limits.max_usd 100 is near: it saves and stops in 5 s")]


def test_the_end_is_told_with_its_step_at_the_very_end(told):
    sink, _, found = told
    sink.event(event("run.finished", 5, FINISHED))
    assert found == []
    sink.end(1)
    assert (found[0].text, found[0].outcome, found[0].exit_code) == ("r: failed: out of eggs", "failed", 1)


def test_what_was_not_asked_for_is_not_told(tmp_path):
    run, found = spec(tmp_path, "notify: {command: [mail], on: [limit]}"), []
    sink = notifier(run, lambda news: found.append(news) or "", Clock())
    sink.event(event("run.finished", 5, FINISHED))
    sink.end(1)
    assert found == []


def test_a_program_gets_the_news_as_json_and_its_failure_is_said(tmp_path):
    code = "import os, pathlib, sys; pathlib.Path('got').write_text(sys.stdin.read() + os.environ['TO'])"
    assert program([sys.executable, "-c", code], {"TO": "me"}, tmp_path, NEWS) == ""
    got = (tmp_path / "got").read_text()
    assert got.endswith("me") and json.loads(got[:-2])["text"] == "r: succeeded"
    failed = program([sys.executable, "-c", "import sys; sys.exit('no such address')"], {}, tmp_path, NEWS)
    assert failed.endswith("ended with code 1: no such address")
    assert (
        program(["/nowhere/mail"], {}, tmp_path, NEWS) == "/nowhere/mail cannot be started: No such file or directory"
    )


def test_a_program_that_hangs_is_ended_with_what_it_started(tmp_path, monkeypatch):
    monkeypatch.setattr(notifications, "PROGRAM_S", 0.5)
    code = (
        "import subprocess, time; print(subprocess.Popen(['sleep', '60']).pid, file=open('pid', 'w')); time.sleep(60)"
    )
    began = time.monotonic()
    assert "did not end within" in program([sys.executable, "-c", code], {}, tmp_path, NEWS)
    assert time.monotonic() - began < 20
    pid = (tmp_path / "pid").read_text().strip()
    with contextlib.suppress(FileNotFoundError):
        while "State:\tZ" not in Path(f"/proc/{pid}/status").read_text():
            assert time.monotonic() - began < 20
            time.sleep(0.02)


@pytest.fixture
def server():
    """Answers with the codes of ``codes``, the last one for ever; keeps what it got."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            got.append((self.path, json.loads(self.rfile.read(int(self.headers["Content-Length"])))))
            self.send_response(codes.pop(0) if len(codes) > 1 else codes[0])
            self.send_header("Location", "http://127.0.0.1:1/elsewhere")
            self.end_headers()

        def log_message(self, *_):
            pass

    got, codes = [], [200]
    found = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=found.serve_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{found.server_port}/services/T0/SECRET", got, codes
    found.shutdown()
    found.server_close()


def test_a_webhook_gets_the_text_alone_and_a_server_that_is_away_is_asked_again(server, monkeypatch):
    monkeypatch.setattr(notifications.time, "sleep", lambda _: None)
    url, got, codes = server
    codes[:] = [503, 200]
    assert webhook(url, NEWS) == ""
    assert got == [("/services/T0/SECRET", {"text": "r: succeeded"})] * 2


@pytest.mark.parametrize("code, asked", [(404, 1), (302, 1), (500, 3)])
def test_what_a_webhook_refuses_is_said_without_its_address(server, monkeypatch, code, asked):
    monkeypatch.setattr(notifications.time, "sleep", lambda _: None)
    url, got, codes = server
    codes[:] = [code]
    assert webhook(url, NEWS) == f"127.0.0.1: HTTP {code}"
    assert len(got) == asked
    assert "SECRET" not in webhook("http://127.0.0.1:1/SECRET", NEWS)


def test_who_takes_no_news_holds_up_neither_the_run_nor_its_end(tmp_path, monkeypatch):
    monkeypatch.setattr("muster.app.run.event_writer.WORDS_PATIENCE_S", 0.3)
    monkeypatch.setattr("muster.app.run.event_writer.PATIENCE_S", 0.3)
    stuck, run = threading.Event(), spec(tmp_path, "notify: {command: [mail]}")
    sink = notifier(run, lambda _: str(stuck.wait(60)), Clock())
    writer = EventWriter([sink], on_gone=lambda *_: None)
    began = time.monotonic()
    for _ in range(3000):
        writer.put(event("host.requested", 0, {"count": 1}))
        writer.put(event("attempt.started", 1, STARTED))
    assert writer.close(0) and time.monotonic() - began < 10
    stuck.set()


@pytest.mark.parametrize(
    "notify, said",
    [
        ("{command: []}", "names no program"),
        ("{command: [mail, --password=hunter2hunter2]}", "looks like a secret"),
        ("{webhook: SLACK}", "is neither a URL"),
        ("{webhook: 'https://hooks.slack.com/services/T000/B000/XXXX'}", "anyone with this address at hooks.slack.com"),
        ("{webhook: 'https://user:pw@example.com/'}", "anyone with this address"),
        ("{webhook: 'https://me.webhook.office.com/x'}", "anyone with this address"),
        ("{webhook: 'http://example.com/hook', on: []}", "is empty"),
        ("{webhook: 'http://example.com/hook', on: [started]}", "notify.on.0"),
        ("{mail: me}", "unknown key"),
    ],
)
def test_a_mistake_is_one_line_that_shows_no_secret(tmp_path, notify, said):
    with pytest.raises(RunFileError) as caught:
        spec(tmp_path, f"notify: {notify}")
    (problem,) = caught.value.problems
    line = problem.render()
    assert said in line and "hunter2" not in line and "XXXX" not in line and ":pw@" not in line


def test_the_name_of_a_secret_stands_for_its_address(tmp_path):
    run = spec(tmp_path, "notify: {webhook: HOOK}\nsecrets: {HOOK: env}")
    assert run.notify.webhook == "HOOK"
