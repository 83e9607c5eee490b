"""What the fork server tells of its children without being asked. Real processes, real signals."""

import os
import select
import signal
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest

from muster.protocol.fork_server import ChildExited, ChildStopped
from muster.rank.fork_server import ForkServer


@pytest.fixture
def server():
    """One with two children, which writes down what it tells the agent."""
    handler, told = signal.getsignal(signal.SIGCHLD), []
    server = ForkServer(SimpleNamespace(), run_dir="", bind="", spec=None, term_ignored=False, inject_faults=False)  # type: ignore[arg-type]
    server.connection = SimpleNamespace(send=told.append, sock=SimpleNamespace(close=lambda: None))  # type: ignore[assignment]
    server.told = told
    server.watch_children()
    for _ in range(2):
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
        server.children[os.pidfd_open(child.pid)] = child.pid
    yield server
    for pid in server.children.values():
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    os.close(signal.set_wakeup_fd(-1))
    server._woken.close()
    signal.signal(signal.SIGCHLD, handler)


def turn(server, timeout_s=10.0):
    """One turn of its loop; whether anything woke it."""
    ready, _, _ = select.select([server._woken, *server.children], [], [], timeout_s)
    if server._woken in ready:
        server.tell_stopped()
    for fd in [fd for fd in ready if isinstance(fd, int)]:
        server._reap(fd)
    return bool(ready)


def test_each_stop_is_told_once_and_an_exit_keeps_its_code(server):
    first, second = server.children.values()
    assert not turn(server, 0.1), "nothing has happened"
    os.kill(second, signal.SIGSTOP)
    while not server.told:
        assert turn(server)
    assert server.told == [ChildStopped(pid=second)]
    os.kill(second, signal.SIGCONT)
    time.sleep(0.1)
    while turn(server, 0.1):
        pass
    assert server.told == [ChildStopped(pid=second)], "that it goes on again, its agent sees for itself"
    os.kill(second, signal.SIGSTOP)
    os.kill(first, signal.SIGSTOP)
    while len(server.told) < 3:
        assert turn(server)
    assert sorted(one.pid for one in server.told[1:]) == sorted([first, second])
    os.kill(first, signal.SIGTERM)
    os.kill(first, signal.SIGCONT)
    os.kill(second, signal.SIGKILL)
    while server.children:
        assert turn(server)
    exits = [one for one in server.told[3:] if isinstance(one, ChildExited)]
    assert {one.pid: one.code for one in exits} == {first: -signal.SIGTERM, second: -signal.SIGKILL}
    assert len(exits) == 2 and not [one for one in server.told[3:] if isinstance(one, ChildStopped)]


def test_a_child_that_has_exited_hides_no_other_ones_stop(server):
    first, second = server.children.values()
    os.kill(first, signal.SIGKILL)
    while not select.select(list(server.children), [], [], 1.0)[0]:
        pass
    os.kill(second, signal.SIGSTOP)
    while ChildStopped(pid=second) not in server.told:
        assert select.select([server._woken], [], [], 10.0)[0]
        server.tell_stopped()


def test_a_fork_hears_of_its_own_children_as_usual(server):
    """A user's script, which starts programs, is such a fork."""
    reading, writing = os.pipe()

    def life():
        same = signal.getsignal(signal.SIGCHLD) == signal.SIG_DFL and signal.set_wakeup_fd(-1) == -1
        os.write(writing, b"%d %d" % (same, server._woken.fileno()))
        os._exit(0)

    pid = server._fork(life)
    assert os.read(reading, 100) == b"1 -1"
    assert os.waitpid(pid, 0)[1] == 0
    os.close(reading), os.close(writing)
    assert signal.getsignal(signal.SIGCHLD) != signal.SIG_DFL
