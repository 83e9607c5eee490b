"""Reaching into pods: stop, restart, status, rank logs, events and exec, over a command that a fake pod answers."""

import base64
import json

import pytest
from cases import spec
from fakes import supervisor_words
from fakes.clock import VirtualClock
from fakes.project import cloud_with_cluster

from muster.app import remote_entrypoint as pod_side
from muster.app.inspect import logs as logs_app
from muster.app.inspect import status as status_app
from muster.app.inspect.supervisor_client import SupervisorUnreachable
from muster.app.run import exec as execute_app
from muster.app.run import stop as stop_app
from muster.backends.gke.launcher import GkeLauncher
from muster.backends.gke.manifests.placement import Options
from muster.backends.gke.operate.exec_stream import exit_code
from muster.backends.protocols import Terminal
from muster.core.errors import BackendError, UsageError
from muster.core.event_log import EventLog
from muster.protocol.client import AskStatus, RestartRun, StopRun
from muster.protocol.codec import encode
from muster.protocol.pipes import ReadFolder
from muster.storage import run_registry

RECOVERY = {"keep_hosts_after_failure_s": 600.0}
SPEC = spec("a4-highgpu-8g", "flex_start_queued", project="example-project", recovery=RECOVERY)

NUMBERS = ("loss", "grad_norm", "learning_rate", "step_ns", "supervised_tokens", "padding_tokens", "tokens")
STEP = dict.fromkeys(NUMBERS, 1)


@pytest.fixture
def google(tmp_path, monkeypatch):
    monkeypatch.setenv("MUSTER_HOME", str(tmp_path / "home"))
    return cloud_with_cluster()


@pytest.fixture
def run(google, monkeypatch, tmp_path):
    """A submitted run whose pods run: the folder of its supervisor's pod is a folder here."""
    launcher = GkeLauncher(http=google, clock=VirtualClock(), options=Options(run_claim="runs"))
    monkeypatch.setattr("muster.backends.load", lambda _: launcher)
    run_id = run_registry.new_run_id("llama")
    run = run_registry.create(run_id, run_registry.place(run_id, None), run_file="x", resolved=SPEC.model_dump_json())
    launcher.submit(launcher.render(SPEC, run_id=run_id, run_dir=str(run.path)))
    for role, count in (("supervisor", 1), ("host", 3)):
        for index in range(count):
            pod = pod_of(google, run_id, role, index)
            google.kubernetes.handle(
                "PUT", f"/api/v1/namespaces/default/pods/{pod['metadata']['name']}", json.dumps(pod).encode()
            )
    inside = run_registry.RunDir(path=tmp_path / "in-pod", run_id=run_id)
    inside.logs.mkdir(parents=True)
    inside.events.mkdir()
    (inside.path / "run_id").write_text(run_id)
    (inside.path / "format").write_text(f"{run_registry.FORMAT}\n")
    google.commands = answers(inside)
    return run, inside


def pod_of(google, run_id, role, index):
    (jobset,) = google.kubernetes.of_kind("JobSet")
    roles = {one["name"]: one for one in jobset["spec"]["replicatedJobs"]}
    labels = {
        "app.kubernetes.io/instance": run_id,
        "jobset.sigs.k8s.io/replicatedjob-name": role,
        "jobset.sigs.k8s.io/job-index": str(index),
    }
    return {
        "kind": "Pod",
        "metadata": {"name": f"llama-{role}-{index}", "namespace": "default", "labels": labels},
        "spec": roles[role]["template"]["spec"]["template"]["spec"],
        "status": {"phase": "Running"},
    }


def answers(inside):
    """What a pod does with a command: our own program, or a word of the user's."""

    def command(pod, argv, line):
        if argv[:3] != ["python", "-m", "muster.app.remote_entrypoint"]:
            return 3, b"out of " + pod.encode(), b"to err"
        assert argv[3:5] == ["--run-dir", f"/muster-runs/{inside.run_id}"]
        return 0, encode(pod_side.reply(inside, line.strip())) + b"\n", b""

    return command


def test_stop_reaches_the_supervisor_and_waits_for_the_end(run, google, monkeypatch):
    here, _ = run
    asked = []

    def supervisor(_run, message, timeout_s):
        asked.append(message)
        google.kubernetes.of_kind("JobSet")[0]["status"] = {"conditions": [{"type": "Failed", "status": "True"}]}
        return supervisor_words.status("stopping")

    monkeypatch.setattr(pod_side, "request_here", supervisor)
    found = stop_app.stop(here.run_id, clock=VirtualClock())
    assert asked == [StopRun(save=True, force=False)] and found.was_running


def test_a_supervisor_that_does_not_answer_is_said(run):
    here, _ = run
    with pytest.raises(SupervisorUnreachable, match="no supervisor holds"):
        stop_app.stop(here.run_id, clock=VirtualClock())


def test_without_a_supervisor_pod(run, google):
    here, _ = run
    for path in [path for path in google.kubernetes.objects if "/pods/" in path and "supervisor" in path]:
        google.kubernetes.objects[path]["status"]["phase"] = "Pending"
    with pytest.raises(SupervisorUnreachable, match="has no running pod"):
        stop_app.stop(here.run_id, clock=VirtualClock())


def test_restart_puts_the_corrected_file_into_the_pods(run, monkeypatch):
    here, inside = run
    seen = []

    def supervisor(_run, message, timeout_s):
        text = inside.resolved.read_text() if inside.resolved.exists() else None
        seen.append((message, text))
        return supervisor_words.status("hold")

    monkeypatch.setattr(pod_side, "request_here", supervisor)
    stop_app.restart(here.run_id, ["training.steps=7"])
    assert [message for message, _ in seen] == [AskStatus(), RestartRun()]
    assert json.loads(seen[-1][1])["training"]["steps"] == 7, "there before the supervisor is told"
    assert json.loads(here.resolved.read_text())["training"]["steps"] == 7


def test_restart_ships_the_code_as_it_is_now(run, monkeypatch, tmp_path):
    here, inside = run
    script = tmp_path / "project" / "train.py"
    script.parent.mkdir()
    script.write_text("old")
    own = SPEC.model_copy(update={"model": None, "data": None, "command": [str(script)]})
    here.resolved.write_text(own.model_dump_json())
    seen = []

    def supervisor(_run, message, timeout_s):
        code = inside.path / "code" / "train.py"
        seen.append(code.read_text() if code.exists() else None)
        return supervisor_words.status("hold")

    monkeypatch.setattr(pod_side, "request_here", supervisor)
    script.write_text("corrected")
    stop_app.restart(here.run_id)
    assert seen == [None, "corrected"]
    assert json.loads(inside.resolved.read_text())["command"][0].endswith(f"{here.run_id}/code/train.py")
    assert json.loads(here.resolved.read_text())["command"] == [str(script)], "this machine's file names its own"


def test_status_has_the_supervisors_words_and_the_events_of_the_pods(run, monkeypatch):
    here, inside = run
    monkeypatch.setattr(pod_side, "request_here", lambda *_, **__: supervisor_words.status("run", step=12))
    log = EventLog(here.run_id, inside.events, "host-0", 1)
    log.append("attempt.started", detail={"world_size": 1, "layout": {}, "hosts": {"host-0": [0]}})
    for step in (1, 2):
        log.append("step", step=step, detail=STEP)
    log.sync()
    found = status_app.status(here.run_id)
    assert found.live.phase == "run" and found.summary.last_step == 2
    log.append("step", step=3, detail=STEP)
    log.close()
    assert status_app.status(here.run_id).summary.last_step == 3
    assert (here.events / "host-0.1.jsonl").read_bytes() == (inside.events / "host-0.1.jsonl").read_bytes()


def test_logs_of_one_rank(run):
    here, inside = run
    (inside.logs / "rank-3.a1.log").write_text("from rank 3 ä\n")
    (inside.logs / "rank-0.a1.log").write_text("from rank 0\n")
    assert [(one.task, one.text) for one in logs_app.logs(here.run_id, rank=3)] == [("rank-3.a1", "from rank 3 ä\n")]
    with pytest.raises(UsageError, match="no log of rank 7"):
        list(logs_app.logs(here.run_id, rank=7))


def test_the_copy_in_a_pods_output_counts_once_no_pod_can_be_asked(run, google):
    here, inside = run
    path = "/api/v1/namespaces/default/pods/llama-host-2/log"
    google.logs[path] = "agent up\nrank-3.a1 | from rank 3\n"
    (inside.logs / "rank-3.a1.log").write_text("from rank 3, whole\n")
    told = {one.task: one.text for one in logs_app.logs(here.run_id)}
    assert told == {"host-2": "agent up\n", "rank-3.a1": "from rank 3, whole\n"}
    for key in [key for key in google.kubernetes.objects if "/pods/" in key]:
        google.kubernetes.objects[key]["status"]["phase"] = "Succeeded"
    assert [(one.task, one.text) for one in logs_app.logs(here.run_id, rank=3)] == [("rank-3.a1", "from rank 3\n")]


def test_a_large_log_comes_in_parts(run, monkeypatch):
    here, inside = run
    monkeypatch.setattr(pod_side, "LARGEST_BYTES", 1000)
    monkeypatch.setattr("muster.backends.gke.operate.pod_exec.ENOUGH", 1000)
    text = "".join(f"line {number} ä\n" for number in range(400))
    (inside.logs / "rank-0.a1.log").write_text(text)
    assert "".join(one.text for one in logs_app.logs(here.run_id, rank=0)) == text


def test_exec_runs_on_a_host_and_returns_its_code(run):
    here, _ = run
    out, err = bytearray(), bytearray()
    terminal = Terminal(out=out.extend, err=err.extend)
    assert execute_app.execute(here.run_id, ["nvidia-smi"], terminal, host=2) == 3
    assert (out, err) == (b"out of llama-host-2", b"to err")
    with pytest.raises(UsageError, match="no host 9"):
        execute_app.execute(here.run_id, ["true"], terminal, host=9)
    with pytest.raises(UsageError, match="no command"):
        execute_app.execute(here.run_id, [], terminal)


def test_every_word_of_a_command_is_a_parameter_of_its_own(run, google):
    here, _ = run
    words = ["sh", "-c", "echo a&b; $(x) 'q' ü"]
    execute_app.execute(here.run_id, words, Terminal(out=len, err=len))
    (url,) = [url for _, url in google.log if "/exec?" in url]
    import urllib.parse

    assert [value for name, value in urllib.parse.parse_qsl(url.partition("?")[2]) if name == "command"] == words


def test_a_back_end_without_exec_says_so(monkeypatch, tmp_path):
    monkeypatch.setenv("MUSTER_HOME", str(tmp_path / "home"))
    resolved = spec("a4-highgpu-8g", "spot").model_copy(update={"backend": "local"}).model_dump_json()
    run_registry.create("here", run_registry.place("here", None), run_file="x", resolved=resolved)
    with pytest.raises(UsageError, match="cannot reach hosts of the back end 'local'"):
        execute_app.execute("here", ["true"], Terminal(out=len, err=len))


def test_how_a_stream_ends():
    assert exit_code({"status": "Success"}) == 0
    assert exit_code({"status": "Failure", "details": {"causes": [{"reason": "ExitCode", "message": "7"}]}}) == 7
    with pytest.raises(BackendError, match="no such file"):
        exit_code({"status": "Failure", "message": "exec: no such file"})


def test_the_pods_program_reads_what_is_new_and_no_more(tmp_path):
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "rank-0.a1.log").write_text("one\ntwo\n")
    (tmp_path / "token").write_text("a secret")
    run = run_registry.RunDir(path=tmp_path, run_id="r")

    def beyond(offset):
        return pod_side.answer(run, ReadFolder(folder="logs", after={"rank-0.a1.log": offset})).files

    (part,) = beyond(4)
    assert (part.offset, base64.b64decode(part.data)) == (4, b"two\n")
    assert beyond(8) == ()
    assert beyond(99)[0].offset == 0, "a shorter file begins anew"
    for folder in ("..", "", "token"):
        assert "folder" in pod_side.reply(run, json.dumps(["read_folder", {"folder": folder}]).encode()).error
