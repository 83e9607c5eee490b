"""Programs as the agent's edge runs them. Real processes: their words, their ends, and what they leave behind."""

import errno
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from muster.agent.edge.children import Children, Ended, Output
from muster.agent.values.actions import Program, StopProgram, WriteProgram
from muster.agent.values.events import ProgramEnded, ProgramLine, ProgramStarted
from muster.agent.values.host_identity import HostIdentity
from muster.protocol.pipes import RunOver
from muster.protocol.to_supervisor import StartFailed
from muster.transport.connections import ConnectionPool


class Edge:
    def __init__(self, folder):
        self.pool, self.events = ConnectionPool(token=b"t" * 32), []
        identity = HostIdentity(run_dir=folder, run_id="run", host="host-0", bind="", memory=None)
        self.children = Children(self.pool, identity)

    def start(self, script, *, name="x", **more):
        more.setdefault("reads", "lines")
        argv = (Path(sys.executable).name, "-c", script)
        self.events += self.children.start(Program(name, argv, is_tool=True, **more))

    def turn(self, timeout_s=0.1):
        for event in self.pool.poll(timeout_s):
            of = self.children.on_output if isinstance(event.token, Output) else self.children.on_ended
            assert isinstance(event.token, Output | Ended)
            self.events += of(event.token)
        self.children.flush()

    def until(self, happened):
        until = time.monotonic() + 30
        while not happened():
            assert time.monotonic() < until
            self.turn()

    def ended(self):
        self.until(lambda: self.of(ProgramEnded))
        return self.of(ProgramEnded)[0]

    def of(self, kind):
        return [event for event in self.events if isinstance(event, kind)]

    def lines(self):
        return [event.line for event in self.of(ProgramLine)]


@pytest.fixture
def edge(tmp_path):
    made = Edge(tmp_path)
    yield made
    for name in list(made.children._current):
        list(made.children.stop(StopProgram(name, leave=True)))
    made.children.wait()
    made.pool.shutdown()


def test_lines_come_whole_and_the_last_one_without_its_end(edge):
    edge.start("import time; print('a', end='', flush=True); time.sleep(0.1); print('b\\nc\\nrest', end='')")
    assert edge.ended() == ProgramEnded("x", 0, b"rest") and edge.lines() == [b"ab", b"c", b"rest"]


def test_all_of_its_output_up_to_a_limit(edge):
    edge.start("print('x' * 100_000)", reads="all", most_bytes=1000)
    assert edge.ended() == ProgramEnded("x", 0, b"x" * 1000)


def test_a_child_of_its_own_that_holds_its_pipe_is_not_waited_for(edge, tmp_path):
    code = "import subprocess; print(subprocess.Popen(['sleep', '60']).pid)"
    edge.start(code)
    assert edge.ended().code == 0
    os.kill(int(edge.lines()[0]), signal.SIGKILL)


def test_the_end_of_its_output_counts_where_a_drivers_call_may_hold_it(edge):
    edge.start("import os, time; print('seen', flush=True); os.close(1); time.sleep(600)", reads="all",
               ends_with_output=True)  # fmt: skip
    assert edge.ended() == ProgramEnded("x", None, b"seen\n")


def test_one_that_is_left_answers_at_once_and_is_reaped(edge):
    edge.start("import time; print('seen', flush=True); time.sleep(600)", reads="all")
    pid = edge.of(ProgramStarted)[0].pid
    edge.until(lambda: edge.children._current["x"].output.endswith(b"\n"))
    assert list(edge.children.stop(StopProgram("x", leave=True))) == [ProgramEnded("x", None, b"seen\n")]
    edge.until(lambda: not Path(f"/proc/{pid}").exists())
    assert edge.of(ProgramEnded) == [], "nothing more is heard of it"


def test_one_that_is_stopped_ends_like_any_other(edge):
    edge.start("input()", writes=True)
    assert list(edge.children.stop(StopProgram("x"))) == []
    assert edge.ended().code == -signal.SIGKILL


def test_of_one_that_was_replaced_nothing_is_heard(edge):
    edge.start("import sys; sys.stdin.read(); print('old')", writes=True)
    old = edge.children._current["x"]
    edge.start("print('new')")
    old.popen.stdin.close()
    edge.until(lambda: old.popen.returncode is not None)
    edge.ended()
    assert edge.lines() == [b"new"] and len(edge.of(ProgramEnded)) == 1


def test_what_a_full_pipe_does_not_take_waits_and_a_droppable_message_is_dropped(edge):
    edge.start("import sys, time; time.sleep(1); print(len(sys.stdin.readlines()))", writes=True)
    message = RunOver(outcome="failed")
    for _ in range(5000):
        edge.children.write(WriteProgram("x", message))
    assert edge.children.has_pending
    edge.children.write(WriteProgram("x", message, droppable=True))
    edge.until(lambda: not edge.children.has_pending)
    edge.children._current["x"].popen.stdin.close()
    edge.ended()
    assert edge.lines() == [b"5000"]


def test_one_that_is_absent_or_has_no_descriptor_is_not_started(edge, monkeypatch):
    edge.events += edge.children.start(Program("y", ("no-such-tool",), is_tool=True))
    assert edge.of(ProgramEnded)[-1:] == [
        ProgramEnded("y", None, failure=StartFailed(reason="No such file or directory"))
    ]

    def full(pid):
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    monkeypatch.setattr(os, "pidfd_open", full)
    edge.start("input()", writes=True)
    assert edge.of(ProgramEnded)[-1].failure.reason == "Too many open files" and not edge.of(ProgramStarted)


def test_a_dead_agents_program_is_adopted_and_its_end_seen(edge):
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        edge.children.adopt(Program("x", ()), process.pid)
        process.kill()
        assert edge.ended() == ProgramEnded("x", None)


#: It starts a helper, notes what it reads, then exits, unless it hangs.
TRACKERS = """
import subprocess, sys, time
print(subprocess.Popen(['sleep', '600']).pid, flush=True)
print(sys.stdin.readline().strip(), flush=True)
time.sleep({s})
"""


@pytest.mark.parametrize("hangs", [False, True])
def test_at_the_end_one_is_told_and_waited_for_and_goes_with_its_session(edge, hangs):
    edge.start(TRACKERS.format(s=600 * hangs), name="trackers", writes=True, ends_with_session=True)
    edge.until(lambda: edge.lines())
    helper = int(edge.lines()[0])
    edge.events += edge.children.finish("trackers", RunOver(outcome="failed"), 1.0 if hangs else 20.0)
    assert edge.lines()[1:] == [b'["run_over",{"outcome":"failed"}]']
    edge.until(lambda: not Path(f"/proc/{helper}").exists() or "Z" in Path(f"/proc/{helper}/stat").read_text())


def test_a_host_that_ends_waits_for_what_it_stopped(edge, tmp_path):
    """A setup ends its own programs on SIGTERM."""
    done = f"open({str(tmp_path / 'done')!r}, 'w')"
    script = f"import signal, sys, time\nsignal.signal(15, lambda *_: ({done}, sys.exit()))"
    edge.start(script + "\nprint('ready', flush=True)\ntime.sleep(600)")
    edge.until(lambda: edge.lines())
    list(edge.children.stop(StopProgram("x", number=signal.SIGTERM, leave=True)))
    edge.children.wait()
    assert (tmp_path / "done").exists()
