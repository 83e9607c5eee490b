"""A damaged ``job.json`` of this machine: neither a result nor a process is lost by it."""

from __future__ import annotations

import dataclasses
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


def ended(request: JobRequest, *, submission: str | None, wall_ns: int) -> None:
    """A supervisor's log that says the run is done."""
    place = {"run_id": request.run_id, "attempt": 1, "mono_ns": 1, "wall_ns": wall_ns, "host": "supervisor"}
    started = {"term": 1, "pid": 1, **({"submission": submission} if submission else {})}
    done = {"outcome": "succeeded", "exit_code": 0, "reason": "done after step 56", "final_step": 56}
    lines = [
        Event(**place, seq=0, kind="supervisor.started", detail=started).to_json(),
        Event(**place, seq=1, kind="run.finished", detail=done).to_json(),
    ]
    events = Path(request.run_dir) / "events"
    events.mkdir(exist_ok=True)
    (events / "supervisor.1.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


# The clock was set back during the run; it was right; an older version, which knew its time alone.
@pytest.mark.parametrize(("submission", "wall_ns"), [("1", 1), ("1", 2**62), (None, 2**62)])
def test_an_end_is_that_of_its_submission_whatever_the_clock_showed(
    case: LocalCase, submission: str | None, wall_ns: int
) -> None:
    request = case.request()
    handle = case.launcher.submit(request)
    ended(request, submission=submission, wall_ns=wall_ns)
    end(case, request.run_id)
    assert case.launcher.poll(handle).state is JobState.SUCCEEDED


@pytest.mark.parametrize("number", ["1", None])
def test_a_good_end_stays_visible_where_what_was_started_since_never_held_the_run(
    case: LocalCase, number: str | None
) -> None:
    request = case.request()
    case.launcher.submit(request)
    end(case, request.run_id)
    ended(request, submission=number, wall_ns=1)
    handle = case.launcher.submit(dataclasses.replace(request, labels={**request.labels, "submission": "2"}))
    assert case.launcher.poll(handle).state is JobState.RUNNING
    end(case, request.run_id)
    status = case.launcher.poll(handle)
    assert status.state is JobState.SUCCEEDED and status.exit_code == 0
    assert status.reason == "done after step 56; what was started since then ended at once"
