"""When a waiting run's ended hosts are started again, how often, and what is said of it. No process is started."""

from __future__ import annotations

from collections.abc import Collection
from types import SimpleNamespace

import pytest

from muster.app.run.revive import AGAIN_S, LOOK_S, MOST, WITHIN_S, HostRevival, revivals
from muster.core.errors import BackendError
from muster.core.events import Event
from muster.core.types import JobHandle, JobState, JobStatus

HANDLE = JobHandle(run_id="run-1", backend="local", job_id="run-1", run_dir="/x")


class Hosts:
    """A back end whose tasks a test ends. ``lame``: they end at once."""

    def __init__(self) -> None:
        self.tasks = {"supervisor": "running (pid 1)", "agent-host-0": "running (pid 2)", "agent-host-1": "running"}
        self.started: list[str] = []
        self.lame, self.broken, self.ending = False, False, False
        self.unknown = ""
        self.raises: Exception | None = None

    def poll(self, handle: JobHandle) -> JobStatus:
        if self.raises is not None:
            raise self.raises
        if self.unknown:
            return JobStatus(state=JobState.RUNNING, reason=self.unknown)
        return JobStatus(state=JobState.RUNNING, reason="", tasks=self.tasks)

    def revive(self, handle: JobHandle, tasks: Collection[str]) -> list[str]:
        if self.broken:
            raise BackendError("cannot start python: No such file")
        found = [] if self.ending else [name for name in tasks if self.tasks[name] == "ended"]
        self.started += found
        if not self.lame:
            self.tasks |= dict.fromkeys(found, "running (pid 3)")
        return found

    def end(self, *names: str) -> None:
        self.tasks |= dict.fromkeys(names, "ended")


class Run:
    def __init__(self) -> None:
        self.hosts, self.said, self.ended, self.now_s = Hosts(), list[str](), False, 1000.0
        self.sink = HostRevival(
            self.hosts,  # type: ignore[arg-type]
            HANDLE,
            say=self.said.append,
            over=lambda: self.ended,
            now_s=lambda: self.now_s,
        )

    def see(self, kind: str) -> None:
        event = Event(run_id="run-1", attempt=1, seq=0, mono_ns=0, wall_ns=0, host="supervisor", kind=kind, detail={})
        self.sink.event(event)

    def pass_time(self, seconds: float) -> None:
        """As the writer's thread does."""
        until = self.now_s + seconds
        while self.sink.tend_every_s is not None and self.now_s < until:
            self.now_s += self.sink.tend_every_s
            self.sink.tend()
        self.now_s = max(self.now_s, until)


@pytest.fixture
def run() -> Run:
    return Run()


def test_a_run_that_waits_gets_its_host_back_and_the_log_says_so(run: Run):
    run.hosts.end("agent-host-1")
    run.see("run.waiting")
    assert run.hosts.started == ["agent-host-1"]
    assert run.said == ["agent-host-1 had ended while the run waits for hosts: it was started again"]


def test_a_run_that_does_not_wait_is_left_alone(run: Run):
    """It has a spare, or goes on with fewer hosts."""
    run.see("supervisor.started")
    run.see("attempt.started")
    run.hosts.end("agent-host-1")
    for kind in ("host.lost", "incident.decided", "attempt.started", "step"):
        run.see(kind)
        run.pass_time(5)
    assert run.hosts.started == [] and run.said == [] and run.sink.tend_every_s is None, "nothing polls"


def test_a_host_that_was_on_its_way_out_when_its_run_was_submitted_again_comes_back(run: Run):
    run.see("supervisor.started")
    run.hosts.end("agent-host-0")
    run.pass_time(LOOK_S)
    assert run.hosts.started == ["agent-host-0"]
    run.see("attempt.adopted")
    assert run.sink.tend_every_s is None


def test_an_agent_that_still_ends_is_waited_for(run: Run):
    run.hosts.end("agent-host-0")
    run.hosts.ending = True
    run.see("run.waiting")
    assert run.hosts.started == [] and run.sink.tend_every_s == LOOK_S
    run.hosts.ending = False
    run.pass_time(LOOK_S)
    assert run.hosts.started == ["agent-host-0"]
    run.see("attempt.started")
    assert run.sink.tend_every_s is None


def test_one_that_ends_at_once_is_started_three_times_a_minute_and_named_once(run: Run):
    run.hosts.lame = True
    run.hosts.end("agent-host-0")
    run.see("run.waiting")
    run.pass_time(WITHIN_S - 5)
    assert len(run.hosts.started) == MOST
    (named,) = [text for text in run.said if "3 times within 60 s" in text]
    assert "logs/agent-host-0.log" in named and "muster stop run-1" in named
    run.pass_time(WITHIN_S)
    assert len(run.hosts.started) == 2 * MOST
    assert len([text for text in run.said if "3 times" in text]) == 1


def test_that_it_was_started_again_is_said_once_while_the_run_waits(run: Run):
    run.hosts.lame = True
    run.hosts.end("agent-host-0")
    run.see("run.waiting")
    run.pass_time(3 * WITHIN_S)
    again = [text for text in run.said if "it was started again" in text]
    assert len(run.hosts.started) > MOST and len(again) == 1
    run.see("attempt.started")
    run.see("run.waiting")
    run.pass_time(WITHIN_S)
    assert [text for text in run.said if "it was started again" in text] == again * 2, "it waits anew"


def test_a_host_that_cannot_be_started_is_said_now_and_then_and_tried_all_the_time(run: Run):
    run.hosts.broken = True
    run.hosts.end("agent-host-0")
    run.see("run.waiting")
    run.pass_time(5)
    (said,) = run.said
    assert "could not be started again: cannot start python: No such file" in said and "muster recover run-1" in said
    run.pass_time(AGAIN_S)
    assert run.said == [said, said], "again after a while"
    run.hosts.broken = False
    run.pass_time(LOOK_S)
    assert run.hosts.started == ["agent-host-0"], "it was tried all the time"


def test_a_record_that_cannot_be_read_is_said_once_and_read_again(run: Run):
    run.hosts.end("agent-host-0")
    run.hosts.unknown = "job.json is damaged; muster down ends what runs"
    run.see("run.waiting")
    run.pass_time(5)
    (said,) = run.said
    assert "none is started again" in said and run.hosts.unknown in said
    run.hosts.unknown = ""
    run.pass_time(LOOK_S)
    assert run.hosts.started == ["agent-host-0"]
    run.hosts.unknown = "job.json is damaged; muster down ends what runs"
    run.pass_time(5)
    assert run.said[2:] == [said], "it is damaged again"


@pytest.mark.parametrize("error", [BackendError("no answer"), PermissionError(13, "Permission denied"), KeyError("x")])
def test_a_look_that_fails_is_not_the_last_one(run: Run, error: Exception):
    run.hosts.raises = error
    run.hosts.end("agent-host-0")
    run.see("run.waiting")
    run.pass_time(5)
    assert len(run.said) == 1 and str(error) in run.said[0]
    run.hosts.raises = None
    run.pass_time(LOOK_S)
    assert run.hosts.started == ["agent-host-0"]


@pytest.mark.parametrize("end", ["stop.requested", "run.ending", "run.finished", "result"])
def test_nothing_is_started_for_a_run_that_ends(run: Run, end: str):
    run.see("run.waiting")
    if end == "result":
        run.ended = True
    else:
        run.see(end)
    run.hosts.end("agent-host-0")
    run.pass_time(5)
    assert run.hosts.started == []


@pytest.mark.parametrize("backend, expected", [("local", 1), ("slurm", 0)])
def test_only_where_hosts_are_processes_of_this_machine(tmp_path, backend: str, expected: int):
    (tmp_path / "job.json").write_text('{"run_id": "run-1"}')
    (tmp_path / "resolved.json").write_text(f'{{"name": "x", "backend": "{backend}", "command": ["x.py"]}}')
    supervisor = SimpleNamespace(run_dir=tmp_path, own_limits=None, note=print, result=None)
    assert len(revivals(supervisor)) == expected  # type: ignore[arg-type]


def test_a_folder_without_a_record_is_the_supervisor_s_to_report(tmp_path):
    assert revivals(SimpleNamespace(run_dir=tmp_path)) == ()  # type: ignore[arg-type]
