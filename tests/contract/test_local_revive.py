"""Hosts of this machine that ended are started again as they were: real processes, found by their records."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import sys
from pathlib import Path

import pytest
from launcher_cases import SLEEP, LocalCase, local_case
from waiting import eventually

from muster.core import processes
from muster.core.types import JobHandle, JobRequest, JobState, TaskSpec

NAMES = ("--run-dir", "x", "--host", "host-{index}")
KEEPER = (sys.executable, "-c", "import time; time.sleep(60)", "muster.agent.watchdog", *NAMES)
AGENT = (sys.executable, "-c", "import time; time.sleep(60)", "muster.agent.host_agent", *NAMES)


case = pytest.fixture(local_case)


@pytest.fixture
def job(case: LocalCase) -> tuple[JobRequest, JobHandle]:
    """A supervisor and two hosts."""
    tasks = (
        TaskSpec(name="supervisor", argv=SLEEP),
        TaskSpec(name="agent", argv=KEEPER, count=2, env={"MUSTER_DRILL": "1"}),
    )
    request = dataclasses.replace(case.request(), tasks=tasks)
    return request, case.launcher.submit(request)


def pids(handle: JobHandle) -> dict[str, int]:
    record = json.loads((Path(handle.run_dir) / "job.json").read_text())
    return {name: task["pid"] for name, task in record["tasks"].items()}


def kill(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)
    eventually(lambda: processes.look(pid) is None)


def started(pid: int) -> processes.Process:
    """The process once it runs its program: in the midst of ``execve`` its arguments and environment read as empty."""
    eventually(lambda: (found := processes.look(pid)) is not None and bool(found.argv))
    found = processes.look(pid)
    assert found is not None
    return found


def test_a_host_that_ended_is_started_as_it_was(case: LocalCase, job: tuple[JobRequest, JobHandle]) -> None:
    _, handle = job
    before = pids(handle)
    old = started(before["agent-host-1"])
    kill(before["agent-host-1"])
    assert case.launcher.poll(handle).tasks["agent-host-1"] == "ended"
    assert case.launcher.revive(handle, ["agent-host-0", "agent-host-1"]) == ["agent-host-1"]
    after = pids(handle)
    assert {**after, "agent-host-1": 0} == {**before, "agent-host-1": 0}, "what lives is left alone"
    new = started(after["agent-host-1"])
    assert new.argv == old.argv
    status = case.launcher.poll(handle)
    assert status.state is JobState.RUNNING and status.tasks["agent-host-1"] == f"running (pid {new.pid})"
    environ = Path(f"/proc/{new.pid}/environ").read_bytes().split(b"\0")
    assert b"MUSTER_DRILL=1" in environ and f"MUSTER_RUN_ID={handle.run_id}".encode() in environ
    case.launcher.cancel(handle)
    assert case.launcher.remaining(handle) == [], "the new one is taken down as well"


def test_neither_the_supervisor_nor_an_unnamed_task_is_started(
    case: LocalCase, job: tuple[JobRequest, JobHandle]
) -> None:
    _, handle = job
    for pid in pids(handle).values():
        kill(pid)
    assert case.launcher.revive(handle, ["supervisor", "agent-host-0", "other"]) == ["agent-host-0"]


def test_a_host_whose_agent_still_ends_waits_for_it(case: LocalCase, job: tuple[JobRequest, JobHandle]) -> None:
    """Two agents of one name would share its folder in memory."""
    request, handle = job
    env = processes.environment(os.environ, run_id=handle.run_id, run_dir=handle.run_dir, extra={})
    argv = tuple(word.replace("host-{index}", "host-1") for word in AGENT)
    agent = processes.start(argv, env=env, log=Path(handle.run_dir) / "logs" / "x.log", cwd=Path(handle.run_dir))
    before = pids(handle)
    kill(before["agent-host-0"])
    kill(before["agent-host-1"])
    assert case.launcher.revive(handle, ["agent-host-0", "agent-host-1"]) == ["agent-host-0"]
    kill(agent.pid)
    assert case.launcher.revive(handle, ["agent-host-0", "agent-host-1"]) == ["agent-host-1"]
    assert request.run_id == handle.run_id


def test_a_cancelled_job_is_left_alone(case: LocalCase, job: tuple[JobRequest, JobHandle]) -> None:
    _, handle = job
    case.launcher.cancel(handle)
    assert case.launcher.revive(handle, ["agent-host-0", "agent-host-1"]) == []
    assert case.launcher.remaining(handle) == []


def test_the_absent_have_no_hosts(case: LocalCase, tmp_path: Path) -> None:
    (tmp_path / "absent-1").mkdir()
    handle = JobHandle(run_id="absent-1", backend="local", job_id="", run_dir=str(tmp_path / "absent-1"))
    assert case.launcher.revive(handle, ["agent-host-0"]) == []
