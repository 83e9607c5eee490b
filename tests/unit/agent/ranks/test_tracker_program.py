"""The trackers' process on a host: where rank 0 is, started again when it dies, waited for only at the end of a run."""

import math
import os
import signal
import stat
import subprocess
import sys
from types import SimpleNamespace

import pytest

from muster.agent.ranks import tracker_program
from muster.agent.ranks.tracker_program import QUIET_S, RETRY_S, TrackerProgram
from muster.config.spec import RunSpec
from muster.core.errors import AccessError

#: Notes what it reads from stdin, then exits.
PROGRAM = """
import sys
sys.stdout.write("a library's own line\\n")
sys.stdout.write('["tracker_note",{"text":"begun"}]\\n')
sys.stdout.flush()
over = sys.stdin.readline().strip().replace('"', "'")
sys.stdout.write('["tracker_note",{"text":"%s"}]\\n' % over)
"""


class Hub:
    """Calls back by hand."""

    def __init__(self):
        self.exits, self.outputs = [], []

    def watch(self, fd, call):
        (self.outputs if stat.S_ISFIFO(os.fstat(fd).st_mode) else self.exits).append(call)

    def unwatch(self, fd):
        pass


class Host:
    def __init__(self):
        self.spec = RunSpec.model_validate({"name": "case", "output": {"tracker": "mlflow", "tensorboard": False}})
        self.living, self.told, self.children, self.refuses = [], [], [], None
        self.hub = Hub()
        self.program = TrackerProgram(
            host="host-0", hub=self.hub, spec=lambda: self.spec, living=lambda: self.living, tell=self.told.append,
            start=self.start,
        )  # fmt: skip

    def start(self):
        if self.refuses is not None:
            raise self.refuses
        self.children.append(
            subprocess.Popen(
                [sys.executable, "-c", PROGRAM],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True,
            )
        )  # fmt: skip
        return self.children[-1]

    def notes(self):
        assert {event.kind for event in self.told} <= {"run.message"}
        return [event.detail["text"] for event in self.told]

    def die(self, *signals):
        for number in signals:
            self.children[-1].send_signal(number)
        self.children[-1].wait()
        self.hub.exits.pop()()


@pytest.fixture
def host():
    made = Host()
    yield made
    for child in made.children:
        child.kill()
        child.wait()


@pytest.fixture
def now(monkeypatch):
    at = [1000.0]
    monkeypatch.setattr(
        tracker_program, "time", SimpleNamespace(monotonic=lambda: at[0], monotonic_ns=int, time_ns=int)
    )
    return at


def ranks(*numbers, attempt=1):
    return [SimpleNamespace(rank=number, attempt=attempt) for number in numbers]


def test_it_runs_from_rank_0s_first_start_over_all_attempts(host):
    host.program.watch()
    host.living = ranks(1)
    host.program.watch()
    assert not host.children
    for living in (ranks(1, 0), ranks(), ranks(1), ranks(0, 1, attempt=2)):
        host.living = living
        host.program.watch()
    assert len(host.children) == 1 and host.children[0].poll() is None


def test_without_a_tracker_there_is_none(host):
    host.spec = RunSpec.model_validate({"name": "case", "output": {"tensorboard": False}})
    host.living = ranks(0)
    host.program.watch()
    assert not host.children


def test_another_run_file_begins_another(host):
    host.living = ranks(0)
    host.program.watch()
    host.spec = host.spec.model_copy()
    host.program.watch()
    assert len(host.children) == 2 and host.children[0].wait() == -signal.SIGKILL


def test_one_that_dies_is_started_again_and_reported_once(host, now):
    host.living = ranks(0)
    host.program.watch()
    for _ in range(3):
        host.die(signal.SIGKILL)
        host.living = []  # whether or not ranks run just then
        host.program.watch()
        assert host.program.retry_s == now[0] + RETRY_S, "not at once"
        now[0] += RETRY_S
        host.program.watch()
        assert host.program.retry_s == math.inf
    assert len(host.children) == 4
    restart = "the process on host-0 that serves trackers ended with code -9 and is restarted"
    assert [note for note in host.notes() if note != "begun"] == [restart]
    now[0] += 2 * QUIET_S
    host.die(signal.SIGKILL)
    assert [note for note in host.notes() if note != "begun"] == [restart] * 2


def test_one_that_has_nothing_more_to_do_is_not(host, now):
    host.living = ranks(0)
    host.program.watch()
    host.children[0].stdin.write(b"\n")
    host.children[0].stdin.flush()
    host.die()
    host.program.watch()
    now[0] += 1e6
    host.program.watch()
    assert len(host.children) == 1 and host.notes()[0] == "begun"


def test_secrets_that_cannot_be_read_are_reported_and_looked_at_again(host, now):
    host.living, host.refuses = ranks(0), AccessError("others can read secrets.json")
    host.program.watch()
    host.program.watch()
    assert host.notes() == ["no figures for mlflow: others can read secrets.json"]
    host.refuses = None
    now[0] = host.program.retry_s
    host.program.watch()
    assert len(host.children) == 1


def test_the_end_of_the_run_is_passed_on_and_waited_for(host):
    host.living = ranks(0)
    host.program.watch()
    host.program.shutdown("failed")
    assert host.children[0].returncode == 0
    assert host.notes() == ["begun", "['run_over',{'outcome':'failed'}]"]


def test_one_that_does_not_leave_is_killed(host, monkeypatch):
    monkeypatch.setattr(tracker_program, "END_S", 0.0)
    host.living = ranks(0)
    host.program.watch()
    host.children[0].send_signal(signal.SIGSTOP)
    host.program.shutdown("succeeded")
    assert host.children[0].returncode == -signal.SIGKILL


def test_a_process_that_died_just_before_the_end_leaves_a_note(host):
    host.living = ranks(0)
    host.program.watch()
    host.program._child, host.program.retry_s = None, 1e9
    host.program.shutdown("succeeded")
    assert "muster track RUN" in host.notes()[-1]


@pytest.mark.parametrize("reason", ["the watchdog is gone", "preempted"])
def test_where_the_run_goes_on_nothing_is_waited_for(host, reason):
    host.living = ranks(0)
    host.program.watch()
    host.program.shutdown(reason)
    assert host.children[0].returncode == -signal.SIGKILL
