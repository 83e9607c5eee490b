"""What every back end promises. A back end joins by adding a case to ``launcher_cases``.

The jobs here are trivial programs: the contract is about starting, finding, watching and ending them.
"""

from __future__ import annotations

import dataclasses
import errno
import fcntl
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from launcher_cases import CASES, SLEEP, Case
from waiting import eventually

from muster.core import processes
from muster.core.errors import AccessError, BackendError, CapacityError, ConflictError, MusterError, UsageError
from muster.core.types import JobHandle, JobState, TaskSpec


@pytest.fixture(params=sorted(CASES))
def case(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Case]:
    yield from _case(request.param, tmp_path, monkeypatch)


@pytest.fixture
def local(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Case]:
    """For promises about processes that a scheduler makes in our place."""
    yield from _case("local", tmp_path, monkeypatch)


def _case(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Case]:
    monkeypatch.setenv("MUSTER_HOME", str(tmp_path / "home"))
    found = CASES[name](tmp_path)
    yield found
    for folder in tmp_path.iterdir():
        if folder.is_dir():
            handle = JobHandle(run_id=folder.name, backend=name, job_id="", run_dir=str(folder))
            found.launcher.cancel(handle)


# ---------------------------------------------------------------- render

_touched: list[str] | None = None
_TOUCHES = re.compile(r"^(open|os\.(?!putenv)|socket\.|subprocess\.|shutil\.|tempfile\.|ctypes\.)")


def _audit(event: str, arguments: tuple[object, ...]) -> None:
    if _touched is not None and _TOUCHES.match(event):
        _touched.append(f"{event} {arguments}")


sys.addaudithook(_audit)


@contextmanager
def audited() -> Iterator[list[str]]:
    global _touched
    _touched = found = []
    try:
        yield found
    finally:
        _touched = None


def test_render_touches_neither_disk_nor_network(case: Case) -> None:
    spec = case.spec(hosts=3)
    case.launcher.render(spec, run_id="warm-up", run_dir="/nowhere")  # imports are not render's
    with audited() as touched:
        found = case.launcher.render(spec, run_id="r-1", run_dir="/nowhere/r-1")
    assert touched == []
    assert found == case.launcher.render(spec, run_id="r-1", run_dir="/nowhere/r-1")
    json.dumps(dataclasses.asdict(found))  # a dry run prints it


def test_the_audit_would_have_seen_a_touch(tmp_path: Path) -> None:
    with audited() as touched:
        (tmp_path / "x").exists()
        (tmp_path / "x").write_text("")
    assert touched


def test_render_names_the_run_and_counts_hosts_and_spares(case: Case) -> None:
    spec = case.spec(hosts=2, spares=1)
    found = case.launcher.render(spec, run_id="r-1", run_dir="/d")
    tasks = {task.name: task for task in found.tasks}
    assert tasks["supervisor"].count == 1
    assert tasks["agent"].count == 3
    assert all("r-1" in task.argv for task in found.tasks), "the label stands in the argument list"


# ---------------------------------------------------------------- submit


def test_submitting_twice_is_one_run(case: Case) -> None:
    request = case.request(SLEEP, SLEEP)
    first = case.launcher.submit(request)
    eventually(lambda: len(case.living(request.run_id)) == 2)
    living = case.living(request.run_id)
    assert case.launcher.submit(request) == first
    assert case.living(request.run_id) == living


def test_a_lost_answer_is_no_second_run(case: Case) -> None:
    request = case.request(SLEEP, SLEEP)
    case.submit_without_answer(request)
    eventually(lambda: len(case.living(request.run_id)) == 2)
    living = case.living(request.run_id)
    handle = case.launcher.submit(request)
    assert case.living(request.run_id) == living
    assert handle.job_id and case.launcher.poll(handle).state is JobState.RUNNING


def test_refusals_are_the_right_errors(case: Case) -> None:
    codes = {AccessError: 5, BackendError: 6, CapacityError: 4, UsageError: 2}
    for kind, request in case.refusals():
        with pytest.raises(MusterError) as caught:
            case.launcher.submit(request)
        assert isinstance(caught.value, kind) and caught.value.exit_code == codes[kind], repr(caught.value)
        assert str(caught.value) and "\n" not in str(caught.value)
        assert case.living(request.run_id) == []


def test_submit_returns_at_once(case: Case) -> None:
    before = time.monotonic()
    case.launcher.submit(case.request())
    assert time.monotonic() - before < 5


def test_a_submit_killed_half_way_is_completed_by_the_next(local: Case) -> None:
    request = local.request(SLEEP, (*SLEEP, "second"))
    program = (
        "import json, os, sys\n"
        "from muster.backends.local.launcher import LocalLauncher\nfrom muster.core import processes\n"
        "from muster.core.types import JobRequest, TaskSpec\n"
        "given = json.loads(sys.argv[1])\n"
        "given['tasks'] = tuple(TaskSpec(name=t['name'], argv=tuple(t['argv'])) for t in given['tasks'])\n"
        "start = processes.start\n"
        "def killed(*a, **k):\n"
        "    start(*a, **k)\n"
        "    os.kill(os.getpid(), 9)\n"
        "processes.start = killed\n"
        "LocalLauncher().submit(JobRequest(**given))\n"
    )
    done = subprocess.run([sys.executable, "-c", program, json.dumps(dataclasses.asdict(request))], check=False)
    assert done.returncode == -9
    eventually(lambda: len(local.living(request.run_id)) == 1)
    orphan = local.living(request.run_id)
    handle = local.launcher.submit(request)
    living = local.living(request.run_id)
    assert len(living) == 2 and orphan[0] in living, "the orphan is adopted, the other one started"
    assert local.launcher.poll(handle).state is JobState.RUNNING


def test_a_folder_of_another_run_is_refused(case: Case) -> None:
    request = case.request()
    case.launcher.submit(request)
    with pytest.raises(ConflictError):
        case.launcher.submit(dataclasses.replace(request, run_id="another"))


def test_a_program_that_does_not_exist_is_named(local: Case) -> None:
    request = local.request(("/no/such/program",))
    with pytest.raises(BackendError, match="/no/such/program"):
        local.launcher.submit(request)
    assert local.living(request.run_id) == []


def test_a_new_submission_starts_again_and_adopts_what_lives(local: Case) -> None:
    request = local.request((sys.executable, "-c", "pass"), SLEEP)
    local.launcher.submit(request)
    eventually(lambda: len(local.living(request.run_id)) == 1)
    survivor = local.living(request.run_id)
    local.launcher.submit(request)  # the same request: what ended stays ended
    assert local.living(request.run_id) == survivor
    again = dataclasses.replace(
        request,
        labels={**request.labels, "submission": "2"},
        tasks=(TaskSpec(name="task0", argv=SLEEP), request.tasks[1]),
    )
    local.launcher.submit(again)
    assert survivor[0] in local.living(request.run_id)


@pytest.mark.parametrize(
    "name",
    [
        "../../etc/passwd",
        "-rf",
        "--help",
        "name with spaces",
        "ünïcødé 漢字 🚀",
        "a" * 63,
        "UPPER_case.and.dots",
        "7",
        "'; rm -rf ~; '",
        "$(touch /tmp/owned)",
        "new\nline",
        "{index}",
        ".",
    ],
)
def test_hostile_run_names_become_harmless_ids(case: Case, name: str) -> None:
    request = case.request(name=name)
    assert re.fullmatch(r"[a-z]([a-z0-9-]{0,48}[a-z0-9])?", request.run_id)
    handle = case.launcher.submit(request)
    assert case.launcher.poll(handle).state is JobState.RUNNING
    found = case.launcher.find(request.run_id)
    assert found is not None and found.run_dir == request.run_dir
    case.launcher.cancel(handle)
    assert case.living(request.run_id) == []


# ---------------------------------------------------------------- find and poll


def test_an_orphan_is_found_by_its_label(case: Case) -> None:
    request = case.request()
    case.launcher.submit(request)
    case.lose_record(request)
    handle = case.launcher.find(request.run_id)
    assert handle is not None and handle.run_dir == request.run_dir
    case.launcher.cancel(handle)
    assert case.living(request.run_id) == []
    assert case.launcher.find(request.run_id) is None


def test_polling_the_absent_says_so(case: Case) -> None:
    handle = JobHandle(run_id="no-such", backend=case.launcher.name, job_id="", run_dir=str(case.folder / "no-such"))
    found = case.launcher.poll(handle)
    assert found.state is JobState.ABSENT
    assert found.reason


def test_poll_never_blocks(case: Case) -> None:
    request = case.request()
    handle = case.launcher.submit(request)
    eventually(lambda: case.living(request.run_id))
    pid = case.living(request.run_id)[0]
    os.kill(pid, signal.SIGSTOP)  # it answers nobody
    try:
        with open(Path(request.run_dir) / ".job.lock", "a+b") as file:
            fcntl.flock(file, fcntl.LOCK_EX)  # a submit or a cancel is under way
            before = time.monotonic()
            found = case.launcher.poll(handle)
            assert time.monotonic() - before < 1.0
    finally:
        os.kill(pid, signal.SIGCONT)
    assert found.state is JobState.RUNNING
    assert found.reason and "\n" not in found.reason


def test_poll_sees_the_end(case: Case) -> None:
    request = case.request((sys.executable, "-c", "pass"))
    handle = case.launcher.submit(request)
    eventually(lambda: case.launcher.poll(handle).state.ended)


def test_offers_are_of_this_back_end(case: Case) -> None:
    offers = case.launcher.offers(case.spec())
    assert offers and all(offer.backend == case.launcher.name for offer in offers)


# ---------------------------------------------------------------- logs


def test_logs_resume_where_they_stopped(case: Case) -> None:
    program = "import sys, time\nfor n in range(200): print('zeile ä€🚀', n, flush=True); time.sleep(0.005)"
    request = case.request((sys.executable, "-c", program))
    handle = case.launcher.submit(request)
    text, positions = "", {}
    until = time.monotonic() + 20
    while time.monotonic() < until and "199\n" not in text:
        for chunk in case.launcher.logs(handle, after=positions):
            text += chunk.text
            positions[chunk.task] = chunk.next_offset
        time.sleep(0.01)
    assert text == "".join(f"zeile ä€🚀 {n}\n" for n in range(200)), "nothing lost, nothing twice, no half character"
    assert list(case.launcher.logs(handle, after=positions)) == []


def test_half_a_character_waits_for_its_rest(case: Case) -> None:
    request = case.request()
    handle = case.launcher.submit(request)
    path = Path(request.run_dir) / "logs" / "extra.log"
    path.write_bytes("a€".encode()[:-1])
    (chunk,) = [each for each in case.launcher.logs(handle) if each.task == "extra"]
    assert (chunk.text, chunk.next_offset) == ("a", 1)
    path.write_bytes("a€b".encode())
    (chunk,) = [each for each in case.launcher.logs(handle, after={"extra": 1}) if each.task == "extra"]
    assert chunk.text == "€b"


def test_logs_of_the_absent_are_empty(case: Case) -> None:
    handle = JobHandle(run_id="no-such", backend=case.launcher.name, job_id="", run_dir=str(case.folder / "no-such"))
    assert list(case.launcher.logs(handle)) == []


# ---------------------------------------------------------------- cancel


def test_cancel_of_the_absent_is_success(case: Case) -> None:
    handle = JobHandle(run_id="no-such", backend=case.launcher.name, job_id="", run_dir=str(case.folder / "no-such"))
    case.launcher.cancel(handle)
    request = case.request()
    handle = case.launcher.submit(request)
    case.launcher.cancel(handle)
    case.launcher.cancel(handle)
    assert case.living(request.run_id) == []
    assert case.launcher.poll(handle).state is JobState.STOPPED


def test_cancel_ends_descendants_in_their_own_sessions_that_ignore_sigterm(local: Case) -> None:
    program = (
        "import os, signal, time\n"
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "if os.fork() == 0:\n"
        "    os.setsid()\n"
        "    if os.fork() == 0: os.setsid()\n"
        "time.sleep(60)\n"
    )
    request = local.request((sys.executable, "-c", program))
    handle = local.launcher.submit(request)
    eventually(lambda: len(local.living(request.run_id)) == 3)
    local.launcher.cancel(handle)
    assert local.living(request.run_id) == []


def test_cancel_ends_processes_though_the_disk_is_full(local: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    request = local.request()
    handle = local.launcher.submit(request)

    def full(path: Path, text: str) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("muster.storage.run_registry.replace_text", full)
    local.launcher.cancel(handle)
    assert local.living(request.run_id) == []


def test_cancel_needs_no_record_that_this_version_reads(case: Case) -> None:
    request = case.request()
    handle = case.launcher.submit(request)
    eventually(lambda: case.living(request.run_id))
    (Path(request.run_dir) / "job.json").write_text('{"jobs": {"of": "another version"}}')
    case.launcher.cancel(dataclasses.replace(handle, job_id=""))
    assert case.living(request.run_id) == []


def test_a_cancelled_request_is_not_started_by_repeating_it(case: Case) -> None:
    request = case.request()
    case.launcher.cancel(case.launcher.submit(request))
    case.launcher.submit(request)
    assert case.living(request.run_id) == []


def test_a_used_again_pid_is_left_alone(local: Case) -> None:
    request = local.request()
    handle = local.launcher.submit(request)
    innocent = subprocess.Popen(SLEEP)
    try:
        path = Path(request.run_dir) / "job.json"
        record = json.loads(path.read_text())
        record["tasks"]["stale"] = {"pid": innocent.pid, "start_ticks": 1}
        path.write_text(json.dumps(record))
        local.launcher.cancel(handle)
        assert innocent.poll() is None
    finally:
        innocent.kill()
        innocent.wait()


def test_a_run_gets_no_more_of_the_environment_than_it_needs(local: Case) -> None:
    environ = {"PATH": os.environ["PATH"], "MY_BANK_PASSWORD": "hunter2", "OMP_NUM_THREADS": "1", "MUSTER_RUN_ID": "x"}
    found = processes.environment(environ, run_id="r", run_dir="/d", extra={})
    assert found == {"PATH": os.environ["PATH"], "OMP_NUM_THREADS": "1", "MUSTER_RUN_ID": "r", "MUSTER_RUN_DIR": "/d"}
