"""What an agent learns of a rank's process before that is gone. Real processes; the kernel takes the lock."""

import os
import random
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from waiting import eventually

from muster.agent.ranks import processes
from muster.agent.ranks.processes import Lock, RankProcesses, all_threads_exiting, fatal_signal
from muster.agent.values.events import Killed, ProcessGone, RankExiting, RankThreadsEnded, RankWatched
from muster.core import processes as core_processes
from muster.storage.memory_dir import MemoryDir
from muster.transport import robust_lock
from muster.transport.connections import ConnectionPool

#: It holds its lock, has threads that run, says so, and then does ``end``.
RANK = """
import ctypes, os, sys, threading, time
from pathlib import Path
from muster.transport import robust_lock
robust_lock.hold(Path(sys.argv[1]) / robust_lock.name_of(os.getpid()))
def spin():
    while True:
        time.sleep(0.0005)
for _ in range(3):
    threading.Thread(target=spin, daemon=True).start()
print("held", flush=True)
sys.stdin.readline()
{end}
"""
SLEEP = "time.sleep(600)"
FORKS = f"child = os.fork()\nif child == 0: os._exit(0)\nos.waitpid(child, 0)\nprint('over', flush=True)\n{SLEEP}"
#: What ends no process by a signal, though it takes the lock from its main thread.
OTHERWISE = {
    "its exit code is its own": "os._exit(9)",
    "it is another program": "os.execv('/bin/sleep', ['sleep', '600'])",
    # exit(2) of one thread: 60 on x86-64, 93 on arm64 (the syscall tables of Linux)
    "its main thread has gone alone": "ctypes.CDLL(None).syscall({'x86_64': 60, 'aarch64': 93}[os.uname().machine], 9)",
}


@pytest.fixture
def start(tmp_path):
    """Starts processes that hold a lock; ``start(end)`` returns once it is held."""
    started = []

    def one(end=SLEEP):
        argv = [sys.executable, "-c", RANK.format(end=end), str(tmp_path)]
        child = subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        started.append(child)
        assert child.stdout.readline() == "held\n"
        return child

    yield one
    for child in started:
        child.kill()
        child.communicate()


class Watched:
    """A rank that is watched, and what is learned of it."""

    def __init__(self, pool, memory, pid, *, heard=True):
        self.pool, self.part, self.pid = pool, RankProcesses(pool, memory), pid
        self.events = list(self.part.watch(pid, str(memory.folder / "rank.log")))
        for _ in range(2 if heard else 0):  # it is waited for once
            self.part.heard(pid)

    def turn(self, timeout_s=0.1):
        for event in self.pool.poll(timeout_s):
            of = self.part.woken if isinstance(event.token, Lock) else self.part.gone
            self.events += of(event.token)

    def until(self, happened):
        for _ in range(300):
            if happened():
                return
            self.turn()
        raise AssertionError("it did not happen")

    def of(self, kind):
        return [event for event in self.events if isinstance(event, kind)]


@pytest.fixture
def watch(tmp_path, monkeypatch):
    """``watch(pid)``. The host has room for the memory of as many ranks once more."""
    tmp_path.chmod(0o700)
    (tmp_path / "room").write_text(meminfo(100, 50))
    monkeypatch.setattr(processes, "MEMORY", tmp_path / "room")
    monkeypatch.setattr(core_processes, "memory_groups", list)
    pool = ConnectionPool(token=b"t" * 32)
    memory = MemoryDir.open(tmp_path)
    yield lambda pid, **more: Watched(pool, memory, pid, **more)
    pool.shutdown()


@pytest.fixture
def stand_in(monkeypatch):
    """Its end is what the agent's pidfd of a rank sees: so the rank is not gone until a test says so."""
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"]) as child:
        monkeypatch.setattr(os, "pidfd_open", lambda _, real=os.pidfd_open: real(child.pid))
        yield child
        child.kill()


def meminfo(total, free):
    return f"MemTotal: {total} kB\nMemFree: 1 kB\nMemAvailable: {free} kB\n"


def lock_of(folder, pid):
    return robust_lock.Lock(os.open(folder / robust_lock.name_of(pid), os.O_RDWR))


def go_on(rank):
    rank.stdin.write("\n")
    rank.stdin.flush()


def test_a_killed_rank_is_known_before_it_is_gone(watch, start, stand_in):
    rank = start()
    watched = watch(rank.pid)
    assert watched.events == [RankWatched(rank.pid, os.getpid(), False)]
    assert [thread.name for thread in threading.enumerate()].count(f"rank-{rank.pid}") == 1
    rank.kill()
    watched.until(lambda: watched.of(RankThreadsEnded))
    stand_in.kill()
    watched.until(lambda: watched.of(ProcessGone))
    kinds = [type(event) for event in watched.events]
    assert RankExiting(rank.pid, 9) in watched.events and RankThreadsEnded(rank.pid, True) in watched.events
    assert kinds.index(RankExiting) < kinds.index(RankThreadsEnded) < kinds.index(ProcessGone)


def test_the_end_of_its_log_comes_with_an_abort(watch, start, stand_in, tmp_path):
    rank = start()
    watched = watch(rank.pid)
    (tmp_path / "rank.log").write_text("x" * 50_000 + "\nCUDA error: y\n")
    rank.send_signal(signal.SIGABRT)
    watched.until(lambda: watched.of(RankExiting))
    tail = watched.of(RankExiting)[0].tail
    assert tail.endswith("CUDA error: y\n") and len(tail) == processes.TAIL_BYTES
    assert watched.part.tail(rank.pid, -9) == ""


@pytest.mark.parametrize("what", ["no room", "no room in the container"])
def test_where_the_memory_of_another_one_does_not_fit_that_is_told(watch, start, stand_in, tmp_path, monkeypatch, what):
    (tmp_path / "room").write_text(meminfo(100, 49) if what == "no room" else meminfo(100, 60))
    monkeypatch.setattr(core_processes, "memory_groups", lambda: [(6, 5)] if "container" in what else [(5, 6)])
    rank = start()
    watched = watch(rank.pid)
    rank.kill()
    watched.until(lambda: watched.of(RankThreadsEnded))
    assert watched.of(RankThreadsEnded) == [RankThreadsEnded(rank.pid, False)]


@pytest.mark.parametrize("end", OTHERWISE.values(), ids=OTHERWISE)
def test_what_is_no_death_by_a_signal_is_told_when_it_is_over(watch, start, stand_in, tmp_path, end):
    rank = start(end)
    watched = watch(rank.pid)
    go_on(rank)
    watched.until(lambda: not list(tmp_path.glob("*.lock")))  # it has been looked at
    assert {event.signal for event in watched.of(RankExiting)} <= {None}


def test_the_end_of_a_child_is_none_of_its_own(watch, start, tmp_path):
    rank = start(FORKS)
    watched = watch(rank.pid)
    go_on(rank)
    assert rank.stdout.readline() == "over\n"
    watched.turn()
    assert list(tmp_path.glob("*.lock")) and watched.of(RankExiting) == []


def test_where_the_host_has_no_room_for_a_thread_only_the_pidfd_tells(watch, start, monkeypatch):
    def full(_):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", full)
    made = []
    monkeypatch.setattr(os, "eventfd", lambda *given, make=os.eventfd: made.append(make(*given)) or made[-1])
    rank = start()
    watched = watch(rank.pid)
    with pytest.raises(OSError):
        os.fstat(made[0])  # it was given back
    rank.kill()
    watched.until(lambda: watched.of(ProcessGone))
    assert not watched.of(RankExiting)


def test_a_lock_of_another_name_or_user_is_not_opened(watch, start, tmp_path):
    """Whoever may write a lock has the process that waits for it in their hands."""
    rank = start()
    os.link(tmp_path / robust_lock.name_of(rank.pid), tmp_path / "second")
    watch(rank.pid)
    assert f"rank-{rank.pid}" not in [thread.name for thread in threading.enumerate()]


def test_a_kill_says_whether_the_process_had_begun_to_go(watch, start):
    rank = start()
    watched = watch(rank.pid, heard=False)
    assert list(watched.part.kill(rank.pid)) == [Killed(rank.pid, False)]
    eventually(lambda: processes.is_exiting(rank.pid))
    assert list(watched.part.kill(rank.pid)) == [Killed(rank.pid, True)]
    watched.until(lambda: watched.of(ProcessGone))
    rank.wait()
    assert list(watched.part.kill(rank.pid)) == [Killed(rank.pid, True)], "gone is success"


def test_a_process_that_has_gone_before_it_is_watched_is_told_at_once(watch, start):
    rank = start()
    rank.kill()
    rank.wait()
    assert watch(rank.pid).events == [ProcessGone(rank.pid)]


def test_all_threads_exit_once_the_last_one_does(start, tmp_path):
    alone = start(OTHERWISE["its main thread has gone alone"])
    lock = lock_of(tmp_path, alone.pid)
    alone.stdin.write("\n")
    alone.stdin.flush()
    lock.wait()
    assert processes.is_exiting(alone.pid) and not all_threads_exiting(alone.pid)
    alone.kill()
    eventually(lambda: all_threads_exiting(alone.pid))
    alone.wait()
    assert all_threads_exiting(alone.pid), "gone"


@pytest.mark.parametrize("error", [PermissionError, OSError(24, "too many open files")])
def test_of_what_cannot_be_read_nothing_is_known(start, monkeypatch, error):
    rank = start()
    rank.kill()
    rank.wait()
    assert all_threads_exiting(rank.pid)

    def fails(*_):
        raise error

    monkeypatch.setattr(processes, "_fields", fails)
    assert not all_threads_exiting(rank.pid)


def test_a_list_that_is_short_of_a_thread_is_none(start, monkeypatch):
    """The kernel's ends where the thread at which it stands is released meanwhile."""
    rank = start()
    monkeypatch.setattr(processes, "_thread_is_exiting", lambda *_: True)
    assert all_threads_exiting(rank.pid)
    monkeypatch.setattr(os, "listdir", lambda path, every=os.listdir: every(path)[:-1])
    assert not all_threads_exiting(rank.pid)


#: Threads that write to a file in shared memory, and threads that start others, without a pause.
WRITES = """import mmap
shared = mmap.mmap(os.open(sys.argv[1] + "/shared", os.O_RDWR), 8 * 4)
def write(at):
    number = 0
    while True:
        number += 1
        shared[8 * at : 8 * at + 8] = number.to_bytes(8, "little")
def more(at):
    until = time.monotonic() + 0.002
    while time.monotonic() < until:
        shared[8 * at : 8 * at + 8] = os.urandom(8)
def starts(at):
    while True:
        threading.Thread(target=more, args=(at,), daemon=True).start()
        time.sleep(0.0005)
for number in range(4):
    threading.Thread(target=write if number < 2 else starts, args=(number,), daemon=True).start()
time.sleep(0.05)
print("over", flush=True)
time.sleep(600)
"""


def test_once_all_of_its_threads_exit_a_process_writes_nothing(start, tmp_path):
    """At random moments: what is in memory that others share is the same from the first look on."""
    shared = tmp_path / "shared"
    shared.write_bytes(bytes(32))
    for _ in range(5):
        rank = start(WRITES)
        rank.stdin.write("\n")
        rank.stdin.flush()
        assert rank.stdout.readline() == "over\n"
        time.sleep(random.random() / 100)
        assert not all_threads_exiting(rank.pid)
        rank.kill()
        eventually(lambda pid=rank.pid: all_threads_exiting(pid))
        found = shared.read_bytes()
        rank.wait()
        assert shared.read_bytes() == found


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGSEGV, signal.SIGABRT])
def test_a_signal_that_is_told_early_is_the_one_of_the_exit_status(start, tmp_path, number):
    """At random moments, each look from the first word on until the process is reaped."""
    for _ in range(5):
        rank = start()
        lock = lock_of(tmp_path, rank.pid)
        assert fatal_signal(rank.pid) is None
        time.sleep(random.random() / 100)
        rank.send_signal(number)
        lock.wait()
        seen = [fatal_signal(rank.pid) for _ in range(20)]
        eventually(lambda pid=rank.pid: os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT))
        seen.append(fatal_signal(rank.pid))
        assert rank.wait() == -number and set(seen) == {number}
        assert fatal_signal(rank.pid) is None, "it is gone"


def test_a_stopped_process_is_not_dying(start):
    rank = start()
    rank.send_signal(signal.SIGSTOP)
    os.waitid(os.P_PID, rank.pid, os.WSTOPPED | os.WNOWAIT)
    assert fatal_signal(rank.pid) is None


@pytest.mark.parametrize(("flags", "number"), [(0x4, 5), (0x400000, None)])
def test_a_signal_at_which_a_debugger_holds_it_is_a_death_only_once_it_is_exiting(monkeypatch, flags, number):
    """The kernel's words, of a thread that ``ptrace_stop`` of kernel/signal.c has stopped with SIGTRAP."""
    fields = [b"t", *[b"1"] * 5, str(flags).encode(), *[b"0"] * 42, b"5"]
    monkeypatch.setattr(processes, "_stat", lambda pid: fields)
    assert fatal_signal(7) == number


def test_the_signal_that_stops_what_a_main_thread_left_is_no_death(start, tmp_path):
    rank = start(OTHERWISE["its main thread has gone alone"].replace(", 9)", ", 0)"))
    lock = lock_of(tmp_path, rank.pid)
    rank.stdin.write("\n")
    rank.stdin.flush()
    lock.wait()
    rank.send_signal(signal.SIGSTOP)
    eventually(lambda: Path(f"/proc/{rank.pid}/stat").read_text().split()[51] == str(int(signal.SIGSTOP)))
    assert fatal_signal(rank.pid) is None


def test_where_there_is_no_room_for_a_lock_the_rank_goes_on_without(tmp_path, monkeypatch):
    def full(*_):
        raise OSError(28, "no space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    robust_lock.hold(tmp_path / robust_lock.name_of(5))
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(OSError):
        lock_of(tmp_path, 5)
