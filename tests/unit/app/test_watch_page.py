"""The watching page over HTTP: what another user of the machine, and a page of somebody else's, do not get from it."""

from __future__ import annotations

import contextlib
import http.client
import json
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from waiting import eventually

from muster.app.web.server import MOST_CLIENTS
from muster.app.web.watch_page import WatchPage, shell, watch_page
from muster.cli import main
from muster.config import load
from muster.core.errors import UsageError
from muster.core.event_log import EventLog
from muster.storage import run_registry
from muster.storage.run_registry import RunDir

RUN_FILE = """\
name: demo
model:
  config: {model_type: llama, hidden_size: 32, num_attention_heads: 4}
  tokenizer: {kind: word}
data: {sources: [{type: text2sql}]}
training: {steps: 5}
"""


def made(name: str) -> RunDir:
    place = run_registry.home() / "runs" / name
    found = run_registry.create(name, place, run_file=RUN_FILE, resolved=load.loads(RUN_FILE).spec.model_dump_json())
    (found.path / "job.json").write_text(json.dumps({"run_id": name}))
    log = EventLog(name, found.events, "supervisor", 1)
    log.append("run.submitted", detail={"spec_digest": "0", "backend": "local", "version": "0", "name": "s3cret-name"})
    log.close()
    return found


@pytest.fixture
def told() -> list[str]:
    return []


@pytest.fixture
def page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, told: list[str]) -> Iterator[WatchPage]:
    monkeypatch.setenv("MUSTER_HOME", str(tmp_path / "home"))
    made("demo-1"), made("demo-2")
    found = watch_page(["demo-1", "demo-2"], every_s=0.1, port=0, address=told.append)
    found.begin()
    yield found
    found.end()


def ask(page: WatchPage, method: str, path: str, body: str = "", **headers: str | None) -> tuple[int, str]:
    """As the page's own script does, but for what ``headers`` say otherwise; None: without that one."""
    name = f"127.0.0.1:{page.port}"
    own: dict[str, str | None] = {"Host": name, **({"Origin": f"http://{name}"} if method == "POST" else {})}
    connection = http.client.HTTPConnection("127.0.0.1", page.port, timeout=10)
    try:
        connection.putrequest(method, path, skip_host=True, skip_accept_encoding=True)
        for key, value in {**own, **headers, "Content-Length": str(len(body))}.items():
            if value is not None:
                connection.putheader(key, value)
        connection.endheaders(body.encode())
        answer = connection.getresponse()
        assert answer.getheader("Set-Cookie") is None
        return answer.status, answer.read().decode()
    finally:
        connection.close()


def entered(page: WatchPage) -> str:
    status, text = ask(page, "POST", "/session", page.code)
    assert status == 200
    return str(json.loads(text)["key"])


def test_the_page_itself_holds_nothing_of_a_run_and_no_key(page: WatchPage) -> None:
    status, text = ask(page, "GET", "/")
    assert status == 200 and text == shell()
    assert not any(word in text for word in ("s3cret-name", "demo-1", page.key, page.code))
    assert ask(page, "GET", "/data")[0] == 404


def test_a_code_opens_one_page_and_no_second_one(page: WatchPage, told: list[str]) -> None:
    code = page.code
    assert told == [f"http://127.0.0.1:{page.port}/#{code}"]
    assert ask(page, "POST", "/session", code)[0] == 200
    assert ask(page, "POST", "/session", code)[0] == 403, "whoever finds it in a history has nothing"
    assert len(told) == 2 and page.code != code and page.code in told[1]
    for guess in ("", "x", code[:-1], "\u00e4" * 43):
        assert ask(page, "POST", "/session", guess)[0] == 403
    assert len(told) == 2


def test_runs_are_shown_to_who_has_the_key_alone(page: WatchPage) -> None:
    key = entered(page)
    for wrong in (None, "", f"Bearer {key[:-1]}", f"Bearer {page.code}", f"Basic {key}", key):
        status, text = ask(page, "POST", "/data", "{}", Authorization=wrong)
        assert status == 401 and "demo" not in text

    def shown() -> bool:
        status, text = ask(page, "POST", "/data", "{}", Authorization=f"Bearer {key}")
        runs = json.loads(text)["runs"]
        return status == 200 and [run["run_id"] for run in runs] == ["demo-1", "demo-2"] and all(
            run.get("account", {}).get("report", {}).get("name") == "s3cret-name" for run in runs
        )  # fmt: skip

    eventually(shown, 30)
    versions = {run["run_id"]: run["version"] for run in page.looks.answer({})["runs"]}  # type: ignore[index, union-attr, call-overload]
    again = json.loads(ask(page, "POST", "/data", json.dumps({"have": versions}), Authorization=f"Bearer {key}")[1])
    assert all("account" not in run for run in again["runs"] if run["version"] == versions[run["run_id"]])


@pytest.mark.parametrize(
    "headers",
    [
        {"Host": "evil.example"},
        {"Host": "evil.example:{port}"},
        {"Host": "127.0.0.1:1"},
        {"Host": "127.0.0.1"},
        {"Host": None},
        {"Origin": None},
        {"Origin": "null"},
        {"Origin": "http://evil.example"},
        {"Origin": "http://127.0.0.1:1"},
        {"Origin": "https://127.0.0.1:{port}"},
        {"Origin": "http://localhost:{port}"},
    ],
)
def test_other_hosts_and_other_origins_are_refused_even_with_code_and_key(
    page: WatchPage, headers: dict[str, str | None]
) -> None:
    key = entered(page)
    odd = {name: None if value is None else value.format(port=page.port) for name, value in headers.items()}
    code = page.code
    assert ask(page, "POST", "/session", code, **odd)[0] == 403
    assert ask(page, "POST", "/data", "{}", Authorization=f"Bearer {key}", **odd)[0] == 403
    assert page.code == code, "it was not used up"
    if "Host" in odd:
        assert ask(page, "GET", "/", **odd)[0] == 403


def test_nonsense_is_answered_and_nothing_worse(page: WatchPage) -> None:
    key = entered(page)
    for body in ("", "[]", "{", '{"have": 1}', '{"have": {"demo-1": {"a": []}}}', "\x00" * 100, "x" * 70_000):
        assert ask(page, "POST", "/data", body, Authorization=f"Bearer {key}")[0] == 200
    assert ask(page, "POST", "/elsewhere", "")[0] == 404 and ask(page, "PUT", "/data", "{}")[0] == 501


def test_whoever_asks_slowly_keeps_nobody_out(page: WatchPage) -> None:
    """Each of them would have five seconds for every byte: the oldest gives way."""
    with contextlib.ExitStack() as open_:
        for _ in range(3 * MOST_CLIENTS):
            one = open_.enter_context(socket.create_connection(("127.0.0.1", page.port)))
            one.sendall(b"G")
        eventually(lambda: _answered(page), 10)


def _answered(page: WatchPage) -> bool:
    try:
        return ask(page, "GET", "/")[0] == 200
    except (OSError, http.client.HTTPException):
        return False


def test_it_listens_on_loopback_and_no_process_shows_code_or_key(tmp_path: Path) -> None:
    """By the command, as a second user sees it: sockets and /proc."""
    env = {"MUSTER_HOME": str(tmp_path / "home"), "PATH": "/usr/bin:/bin"}
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MUSTER_HOME", env["MUSTER_HOME"])
        made("demo-1")
    command = [sys.executable, "-m", "muster.cli.main", "watch", "--web", "demo-1"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env)
    try:
        assert process.stdout is not None
        address, code = process.stdout.readline().strip().split("/#")
        port = int(address.rpartition(":")[2])
        rows = [row.split() for name in ("tcp", "tcp6") for row in Path(f"/proc/net/{name}").read_text().splitlines()]
        listening = [row[1] for row in rows if row[1].endswith(f":{port:04X}") and row[3] == "0A"]
        assert listening == [f"0100007F:{port:04X}"]
        for name in ("cmdline", "environ"):
            assert code.encode() not in Path(f"/proc/{process.pid}/{name}").read_bytes()
        assert code not in "".join(path.read_text() for path in (tmp_path / "home").rglob("*") if path.is_file())
    finally:
        process.send_signal(2)
        _, said = process.communicate(timeout=20)
    assert process.returncode == 130 and "the run is unchanged" in said


def test_what_makes_no_sense_is_refused(page: WatchPage, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(UsageError, match="demo-1 is named twice"):
        watch_page(["demo-1", "demo-1"], every_s=1, port=0, address=print)
    with pytest.raises(UsageError, match=rf"port {page.port} of 127\.0\.0\.1: "):
        watch_page(["demo-1"], every_s=1, port=page.port, address=print).begin()
    assert main.run(["watch", "demo-1", "demo-2"]) == 2
    assert "muster watch --web demo-1 demo-2" in capsys.readouterr().err
    assert main.run(["watch", "demo-1", "--port", "1234"]) == 2
