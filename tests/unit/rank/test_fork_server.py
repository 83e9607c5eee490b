"""What the fork server tells of its children without being asked. Real processes, real signals."""

import os
import select
import signal
import socket
import sys
import time
from types import SimpleNamespace

import psutil
import pytest
from waiting import eventually

from muster.protocol.fork_server import ChildExited, ChildStopped
from muster.protocol.values import StoreAddress
from muster.rank import fork_server
from muster.rank.fork_server import ForkServer


class Agent:
    """The agent's end of a connection: ``told`` is what it has received."""

    def __init__(self):
        self.sock, self.far_end = socket.socketpair()
        self.told, self.refuses = [], False

    def send(self, message):
        if self.refuses:
            raise BrokenPipeError
        self.told.append(message)


@pytest.fixture
def server():
    """One with two children, connected to an agent."""
    handler = signal.getsignal(signal.SIGCHLD)
    server = ForkServer(SimpleNamespace(), run_dir="", bind="", spec=None, term_ignored=False, inject_faults=False)  # type: ignore[arg-type]
    server.connection = Agent()  # type: ignore[assignment]
    server.watch_children()
    for _ in range(2):
        argv = [sys.executable, "-c", "import time; time.sleep(600)"]
        pid = os.posix_spawn(sys.executable, argv, os.environ)
        server.children[os.pidfd_open(pid)] = pid
    yield server
    for pid in server.children.values():
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    os.close(signal.set_wakeup_fd(-1))
    server._woken.close()
    signal.signal(signal.SIGCHLD, handler)


def turns(server, until):
    """Turns of its loop, each for something that has happened."""
    while not until():
        assert is_woken(server), "it would wait for ever"
        server.turn()


def is_woken(server, timeout_s=10.0):
    return bool(select.select([server._woken, *server.children, *server.stores], [], [], timeout_s)[0])


def test_each_stop_is_told_once_and_an_exit_keeps_its_code(server):
    first, second = server.children.values()
    told = server.connection.told
    assert not is_woken(server, 0.1), "nothing has happened"
    os.kill(second, signal.SIGSTOP)
    turns(server, lambda: told)
    assert told == [ChildStopped(pid=second)] and not is_woken(server, 0.1), "and it sleeps again"
    os.kill(second, signal.SIGCONT)
    time.sleep(0.1)
    while is_woken(server, 0.1):
        server.turn()
    assert told == [ChildStopped(pid=second)], "that it goes on again, its agent sees for itself"
    os.kill(second, signal.SIGSTOP)
    os.kill(first, signal.SIGSTOP)
    turns(server, lambda: len(told) == 3)
    assert sorted(one.pid for one in told[1:]) == sorted([first, second])
    os.kill(first, signal.SIGTERM)
    os.kill(first, signal.SIGCONT)
    os.kill(second, signal.SIGKILL)
    turns(server, lambda: not server.children)
    assert {(type(one), one.pid, one.code) for one in told[3:]} == {
        (ChildExited, first, -signal.SIGTERM),
        (ChildExited, second, -signal.SIGKILL),
    }


def test_a_child_that_has_exited_hides_no_other_ones_stop(server):
    first, second = server.children.values()
    os.kill(first, signal.SIGKILL)
    assert select.select(list(server.children), [], [], 10.0)[0]
    os.kill(second, signal.SIGSTOP)
    turns(server, lambda: ChildStopped(pid=second) in server.connection.told)


def test_what_one_agent_did_not_hear_the_next_one_is_told(server, monkeypatch):
    """Its connection breaks while it is told of the first of two."""
    broken = server.connection
    broken.refuses = True
    for pid in server.children.values():
        os.kill(pid, signal.SIGSTOP)
        eventually(lambda pid=pid: psutil.Process(pid).status() == psutil.STATUS_STOPPED)
    turns(server, lambda: server.connection is None)
    following = Agent()

    def connect():
        server.connection = following
        return following

    monkeypatch.setattr(server, "_connect", connect)
    following.far_end.close()  # so that the turn ends
    monkeypatch.setattr(server, "_handle_messages", lambda connection: None)
    server.turn()
    assert sorted(one.pid for one in following.told) == sorted(server.children.values()) and not broken.told
    server.turn()
    assert len(following.told) == 2, "once"


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


def test_a_store_that_is_killed_before_an_attempt_has_it_is_replaced(server, monkeypatch):
    """The older one serves the running attempt: its ranks notice."""
    for number in (1, 2):
        pid = os.posix_spawn(sys.executable, [sys.executable, "-c", "import time; time.sleep(600)"], os.environ)
        server.stores[os.pidfd_open(pid)] = pid
        server.store = ("host", number)
    made = iter([("host", 3)])
    monkeypatch.setattr(server, "_new_store", lambda: next(made))
    monkeypatch.setattr(fork_server, "STORE_RETRY_S", 0.0)
    older, newest = server.stores.values()
    os.kill(newest, signal.SIGKILL)
    turns(server, lambda: newest not in server.stores.values())
    assert server.connection.told == [StoreAddress(store=("host", 3))] and server.store == ("host", 3)
    server.stores[os.pidfd_open(os.getpid())] = os.getpid()
    os.kill(older, signal.SIGKILL)
    turns(server, lambda: older not in server.stores.values())
    assert len(server.connection.told) == 1
