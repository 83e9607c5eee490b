"""Programs of a first process, as real processes: their ends, strangers that are collected, and output of threads."""

import os
import signal
import subprocess
import sys
import time

import pytest

from muster.backends.host.children import RealChildren
from muster.core.errors import BackendError

SLEEP = [sys.executable, "-S", "-c", "import time; time.sleep(60)"]


def until(look, limit_s=20.0):
    end = time.monotonic() + limit_s
    while not (found := look()):
        assert time.monotonic() < end
        time.sleep(0.02)
    return found


def test_ends_are_told_once_with_a_shells_codes(tmp_path):
    children = RealChildren()
    log = tmp_path / "a.log"
    children.start("a", [sys.executable, "-S", "-c", "print('hello'); raise SystemExit(7)"], os.environ, log)
    assert until(children.ended) == [("a", 7)] and children.ended() == [] and children.pid("a") is None
    assert log.read_text() == "hello\n"
    pid = children.start("b", SLEEP, os.environ, None)
    assert children.pid("b") == pid
    children.send("b", signal.SIGKILL)
    assert until(children.ended) == [("b", 137)]
    children.send("b", signal.SIGKILL)  # it is gone: nobody is hit


def test_what_cannot_be_started_is_named():
    for start in (
        lambda: RealChildren().start("a", ["/no/such/program"], {}, None),
        lambda: RealChildren().run(["/no/such/program"], {}, line=b"", timeout_s=1),
    ):
        with pytest.raises(BackendError, match="/no/such/program"):
            start()


#: A first process: its child ends and leaves one that becomes its own; that one ends too.
FIRST = """
import ctypes, os, sys, threading, time
from muster.backends.host.children import RealChildren
ctypes.CDLL(None).prctl(36, 1, 0, 0, 0)  # PR_SET_CHILD_SUBREAPER: as process 1 of a container
children, results = RealChildren(collects_strangers=True), []
asked = [sys.executable, "-S", "-c", "import sys; print(sys.stdin.readline().upper()); raise SystemExit(5)"]
def ask():
    for _ in range(10):
        results.append(children.run(asked, os.environ, line=b"word\\n", timeout_s=30))
thread = threading.Thread(target=ask)
thread.start()
orphan = "import os, time; os.fork() or (time.sleep(0.2), os._exit(0))"
for number in range(5):
    children.start(f"p{number}", [sys.executable, "-S", "-c", orphan], os.environ, None)
seen, end = [], time.monotonic() + 60
while thread.is_alive() or len(seen) < 5 or open(f"/proc/self/task/{os.getpid()}/children").read():
    assert time.monotonic() < end, (seen, results)
    seen += children.ended()
    time.sleep(0.01)
assert [(one.code, one.out.strip()) for one in results] == [(5, b"WORD")] * 10, results
assert sorted(seen) == [(f"p{n}", 0) for n in range(5)], seen
print("no zombie, no answer lost")
"""


def test_strangers_are_collected_and_a_threads_program_is_left_to_its_thread():
    done = subprocess.run([sys.executable, "-c", FIRST], capture_output=True, text=True, timeout=120, check=False)
    assert done.stdout == "no zombie, no answer lost\n", done.stderr


def test_a_program_that_does_not_end_is_killed_with_all_that_it_started():
    program = [sys.executable, "-S", "-c", "import os, time; print(os.fork(), flush=True); time.sleep(60)"]
    began = time.monotonic()
    assert RealChildren().run(program, os.environ, line=b"", timeout_s=0.5).code is None
    assert time.monotonic() - began < 10
