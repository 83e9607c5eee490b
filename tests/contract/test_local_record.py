"""A damaged ``job.json`` of this machine: neither a result nor a process is lost by it."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest
from launcher_cases import LocalCase, local_case
from waiting import eventually

from muster.core.errors import BackendError
from muster.core.events import Event
from muster.core.types import JobHandle, JobRequest, JobState

case = pytest.fixture(local_case)


@pytest.fixture
def torn(case: LocalCase) -> tuple[JobRequest, JobHandle, bytes]:
    """A living job whose record has lost its end."""
    request = case.request()
    handle = case.launcher.submit(request)
    record = Path(request.run_dir) / "job.json"
    rest = record.read_bytes()[:-30]
    record.write_bytes(rest)
    return request, handle, rest


def end(case: LocalCase, run_id: str) -> None:
    for pid in case.living(run_id):
        os.kill(pid, signal.SIGKILL)
    eventually(lambda: not case.living(run_id))


def test_the_runs_own_log_says_how_it_ended(case: LocalCase, torn: tuple[JobRequest, JobHandle, bytes]) -> None:
    request, handle, _ = torn
    assert case.launcher.poll(handle).state is JobState.RUNNING
    end(case, request.run_id)
    status = case.launcher.poll(handle)
    assert status.state is JobState.FAILED and "muster recover begins a new one" in status.reason
    event = Event(
        run_id=request.run_id, attempt=1, seq=1, mono_ns=1, wall_ns=1, host="supervisor", kind="run.finished",
        detail={"outcome": "succeeded", "exit_code": 0, "reason": "done after step 56", "final_step": 56},
    )  # fmt: skip
    events = Path(request.run_dir) / "events"
    events.mkdir()
    (events / "supervisor.1.jsonl").write_text(json.dumps(event.to_json()) + "\n")
    status = case.launcher.poll(handle)
    assert (status.state, status.reason, status.exit_code) == (JobState.SUCCEEDED, "done after step 56", 0)


def test_a_submission_begins_a_new_one_once_nothing_lives(
    case: LocalCase, torn: tuple[JobRequest, JobHandle, bytes]
) -> None:
    request, handle, rest = torn
    with pytest.raises(BackendError, match="cannot read"):
        case.launcher.submit(request)  # other processes would be started beside those that live
    end(case, request.run_id)
    case.launcher.submit(request)
    assert case.launcher.poll(handle).state is JobState.RUNNING and len(case.living(request.run_id)) == 1
    assert (Path(request.run_dir) / "job.json.damaged").read_bytes() == rest
