"""Submits, cancels and hosts that leave an ended run, interleaved: all of a job's processes run, or none is left."""

from __future__ import annotations

import dataclasses
import os
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from launcher_cases import LocalCase
from waiting import eventually

from muster.app.run.revive import LOOK_S, HostRevival
from muster.backends.local import launcher
from muster.backends.local.launcher import LocalLauncher
from muster.core import processes
from muster.core.clock import SystemClock
from muster.core.errors import BackendError
from muster.core.events import Event
from muster.core.types import JobRequest, JobState, TaskSpec
from muster.storage.job_record import SUBMISSION

#: Says that it runs, and outlives SIGTERM.
BODY = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('on', flush=True); time.sleep(60)"
STUBBORN = (sys.executable, "-c", BODY)
TASKS = ("supervisor", "agent-host-0", "agent-host-1")


class Nap(SystemClock):
    """``act`` is called at the first sleep."""

    def __init__(self, act: Callable[[], None]) -> None:
        self.act: Callable[[], None] | None = act

    def sleep(self, seconds: float) -> None:
        act, self.act = self.act, None
        if act is not None:
            act()
        super().sleep(seconds)


def in_thread(act: Callable[[], object]) -> threading.Thread:
    """It has come as far as it can by itself, or to its end."""
    thread = threading.Thread(target=act)
    thread.start()
    thread.join(1.0)
    return thread


@pytest.fixture
def case(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> LocalCase:
    monkeypatch.setenv("MUSTER_HOME", str(tmp_path / "home"))
    return LocalCase(tmp_path)


@pytest.fixture
def request_(case: LocalCase) -> JobRequest:
    keeper = (*STUBBORN, "muster.agent.watchdog", "--host", "host-{index}")
    tasks = (
        TaskSpec(name="supervisor", argv=STUBBORN),
        TaskSpec(name="agent", argv=keeper, count=2),
    )
    return dataclasses.replace(case.request(), tasks=tasks)


def again(request: JobRequest) -> JobRequest:
    return dataclasses.replace(request, labels={**request.labels, SUBMISSION: "2"})


def log_of(request: JobRequest, task: str) -> str:
    path = Path(request.run_dir) / "logs" / f"{task}.log"
    return path.read_text() if path.exists() else ""


def test_a_submit_in_the_midst_of_a_cancel_starts_all_after_it(case: LocalCase, request_: JobRequest) -> None:
    handle = case.launcher.submit(request_)
    for task in TASKS:
        eventually(lambda task=task: "on" in log_of(request_, task))
    threads: list[threading.Thread] = []
    clock = Nap(lambda: threads.append(in_thread(lambda: case.launcher.submit(again(request_)))))
    LocalLauncher(grace_s=0.3, clock=clock).cancel(handle)
    (thread,) = threads
    thread.join(30)
    try:
        status = case.launcher.poll(handle)
        assert status.state is JobState.RUNNING, status.reason
        assert sorted(status.tasks) == sorted(TASKS)
        assert all(text.startswith("running") for text in status.tasks.values()), status.tasks
    finally:
        case.launcher.cancel(handle)


def test_a_cancel_in_the_midst_of_a_submit_leaves_nothing(
    case: LocalCase, request_: JobRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between two of its processes."""
    start, threads = processes.start, list[threading.Thread]()

    def start_and_be_cancelled(*words: object, **more: object) -> processes.Process:
        started = start(*words, **more)  # type: ignore[arg-type]
        if not threads:
            threads.append(in_thread(lambda: LocalLauncher(grace_s=0.3).cancel(case.launcher.find(request_.run_id))))  # type: ignore[arg-type]
        return started

    monkeypatch.setattr(processes, "start", start_and_be_cancelled)
    handle = case.launcher.submit(request_)
    threads[0].join(30)
    assert case.launcher.remaining(handle) == []
    assert case.launcher.poll(handle).state is JobState.STOPPED


def test_a_submit_waits_for_the_supervisor_that_ended_the_run(case: LocalCase, request_: JobRequest) -> None:
    """Its result is written, and it is still on its way out: taken over, it would leave the run without any."""
    handle = case.launcher.submit(request_)
    (leaving,) = (process for process in processes.labelled(request_.run_id) if process.argv == STUBBORN)
    thread = in_thread(lambda: case.launcher.submit(again(request_)))
    try:
        assert thread.is_alive(), "it waits"
        os.kill(leaving.pid, signal.SIGKILL)
        thread.join(30)
        status = case.launcher.poll(handle)
        assert all(text.startswith("running") for text in status.tasks.values()), status.tasks
        assert status.tasks["supervisor"] != f"running (pid {leaving.pid})"
    finally:
        case.launcher.cancel(handle)


def test_a_supervisor_that_does_not_exit_is_named(
    case: LocalCase, request_: JobRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    handle = case.launcher.submit(request_)
    monkeypatch.setattr(launcher, "SEE_OUT_S", 0.2)
    try:
        with pytest.raises(BackendError, match=r"the supervisor that ended .* does not exit") as caught:
            case.launcher.submit(again(request_))
        assert caught.value.hint is not None and caught.value.hint.startswith(f"muster down {request_.run_id}")
        assert case.launcher.submit(request_) == handle, "the same submission once more adopts what runs"
    finally:
        case.launcher.cancel(handle)


def test_a_host_on_its_way_out_that_a_submit_has_taken_for_its_own_comes_back(
    case: LocalCase, request_: JobRequest
) -> None:
    """The run has ended, and one of its hosts gives back its memory while somebody submits the run again."""
    handle = case.launcher.submit(request_)
    before = {process.argv[-1]: process for process in processes.labelled(request_.run_id)}
    supervisor = before[BODY]
    os.kill(supervisor.pid, signal.SIGKILL)
    eventually(lambda: processes.look(supervisor.pid) is None)
    case.launcher.submit(again(request_))
    leaving = before["host-0"]
    assert case.launcher.poll(handle).tasks["agent-host-0"] == f"running (pid {leaving.pid})", "it was taken over"
    said: list[str] = []
    revival = HostRevival(case.launcher, handle, say=said.append, over=lambda: False)
    try:
        started = Event(
            run_id=handle.run_id, attempt=0, seq=0, mono_ns=0, wall_ns=0, host="supervisor", kind="supervisor.started",
            detail={},
        )  # fmt: skip
        revival.event(started)
        assert said == [] and revival.tend_every_s == LOOK_S
        os.kill(leaving.pid, signal.SIGKILL)
        eventually(lambda: processes.look(leaving.pid) is None)
        revival.tend()
        assert said == ["agent-host-0 had ended while the run waits for hosts: it was started again"]
        assert all(text.startswith("running") for text in case.launcher.poll(handle).tasks.values())
    finally:
        case.launcher.cancel(handle)
