"""What an agent learns of a rank's process before that is gone. Real processes; the kernel takes the lock."""

import os
import random
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from fakes.host import RecordingHost
from waiting import eventually

from muster.agent import rank_pool
from muster.agent.ranks import dying_ranks, rank_process
from muster.agent.ranks.rank_process import all_threads_exiting, fatal_signal
from muster.core import processes
from muster.protocol.rank_agent import RankBeat
from muster.protocol.to_agent import EndAttempt, StartAttempt
from muster.protocol.to_supervisor import RankExit, RanksEnded
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


@pytest.fixture
def host(tmp_path):
    tmp_path.chmod(0o700)
    hub = ConnectionPool(token=b"t" * 32, on_gone=lambda *_: None)
    resources = SimpleNamespace(ranks_per_host=1, on_cpu=False)
    spec = SimpleNamespace(recovery=SimpleNamespace(warm_standby=False), resources=resources, command=None)
    yield RecordingHost(tmp_path, spec=spec, hub=hub)
    hub.shutdown()


@pytest.fixture
def on_cpu(host, monkeypatch, tmp_path):
    """A host whose ranks hold no device, and which has room for as many once more."""
    (tmp_path / "room").write_text(meminfo(100, 50))
    monkeypatch.setattr(dying_ranks, "MEMORY", tmp_path / "room")
    monkeypatch.setattr(processes, "memory_groups", list)
    host.spec.resources.on_cpu = True
    return host


@pytest.fixture
def stand_in(monkeypatch):
    """Its end is what the agent's pidfd of a rank sees: so the rank is not gone until a test says so."""
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"]) as child:
        monkeypatch.setattr(rank_pool, "open_pidfd", lambda _: os.pidfd_open(child.pid))
        yield child
        child.kill()


def pool_with(host, pid):
    """A pool that has heard from this rank."""
    pool = host.rank_pool(reaps=True)
    pool.register_rank(pid, 1, 1, None, was_warm=True)
    for step in (7, 7):  # it is waited for once
        pool.handle(pool.workers[pid], RankBeat(step=step, micro=0))
    return pool


def ends_of(host):
    return [type(one).__name__ for one in host.sent if isinstance(one, RankExit | RanksEnded)]


def until(hub, condition):
    for _ in range(300):
        if condition():
            return
        hub.run_once(0.1)
    raise AssertionError("it did not happen")


def lock_of(folder, pid):
    return robust_lock.Lock(os.open(folder / robust_lock.name_of(pid), os.O_RDWR))


def exits(host):
    return [(one.rank, one.code, one.step) for one in host.sent if isinstance(one, RankExit)]


def test_a_killed_rank_is_told_at_once_and_its_attempt_ends_with_it(host, start, stand_in):
    rank = start()
    pool = pool_with(host, rank.pid)
    assert [thread.name for thread in threading.enumerate()].count(f"rank-{rank.pid}") == 1
    rank.kill()
    until(host.hub, lambda: exits(host))
    assert exits(host) == [(1, -9, 7)] and list(pool.exits) == [1]
    pool.end(EndAttempt(attempt=1, why="i1"))
    host.hub.run_once(0.1)
    assert [worker.pid for worker in pool.living()] == [rank.pid], "nothing that its end precedes has begun"
    assert not any(isinstance(one, RanksEnded) for one in host.sent)
    stand_in.kill()
    until(host.hub, lambda: not pool.living() or pool.workers[rank.pid].pidfd < 0)
    pool.on_exit_code(rank.pid, -signal.SIGKILL)
    assert isinstance(host.sent[-1], RanksEnded) and exits(host) == [(1, -9, 7)] and not pool.workers


def test_on_the_cpu_an_attempt_ends_once_nothing_of_its_ranks_runs(on_cpu, start, stand_in):
    rank = start()
    pool = pool_with(on_cpu, rank.pid)
    written = []
    on_cpu.log.write = lambda kind, *_, **more: written.append((kind, more["rank"]))
    pool.end(EndAttempt(attempt=1, why="i1"))
    until(on_cpu.hub, lambda: ends_of(on_cpu))
    assert ends_of(on_cpu) == ["RanksEnded"] and written == [("rank.exited", 1)]
    assert list(pool.workers) == [rank.pid] and not pool.living(), "its memory is not free yet"
    pool.start(StartAttempt(attempt=2, contexts=()))
    stand_in.kill()
    until(on_cpu.hub, lambda: not pool.workers)
    assert ends_of(on_cpu) == ["RanksEnded"] and written == [("rank.exited", 1)] and not pool.exits


def test_on_the_cpu_an_attempt_ends_after_a_killed_rank_is_told(on_cpu, start, stand_in):
    rank = start()
    pool = pool_with(on_cpu, rank.pid)
    rank.kill()
    until(on_cpu.hub, lambda: pool.workers[rank.pid].only_memory_left)
    assert exits(on_cpu) == [(1, -9, 7)]
    pool.end(EndAttempt(attempt=1, why="i1"))
    assert ends_of(on_cpu) == ["RankExit", "RanksEnded"] and pool.workers


def meminfo(total, free):
    return f"MemTotal: {total} kB\nMemFree: 1 kB\nMemAvailable: {free} kB\n"


@pytest.mark.parametrize("what", ["on a GPU", "a user's program", "no room", "no room in the container"])
def test_what_may_not_be_passed_by_is_waited_for(on_cpu, start, stand_in, tmp_path, monkeypatch, what):
    """A GPU's memory is given up after the host's; of a user's program nobody knows what the next one needs."""
    (tmp_path / "meminfo").write_text(meminfo(100, 49) if what == "no room" else meminfo(100, 60))
    monkeypatch.setattr(dying_ranks, "MEMORY", tmp_path / "meminfo")
    monkeypatch.setattr(processes, "memory_groups", lambda: [(6, 5)] if "container" in what else [(5, 6)])
    on_cpu.spec.resources.on_cpu, on_cpu.spec.command = what != "on a GPU", "train.py" if "user" in what else None
    rank = start()
    pool = pool_with(on_cpu, rank.pid)
    pool.end(EndAttempt(attempt=1, why="i1"))
    until(on_cpu.hub, lambda: not list(tmp_path.glob("*.lock")))  # the last look
    assert ends_of(on_cpu) == []
    stand_in.kill()
    until(on_cpu.hub, lambda: ends_of(on_cpu))


def test_one_that_left_by_itself_is_waited_for_because_its_code_says_why(on_cpu, start, stand_in, tmp_path):
    rank = start(OTHERWISE["its exit code is its own"])
    pool = pool_with(on_cpu, rank.pid)
    rank.stdin.write("\n")
    rank.stdin.flush()
    until(on_cpu.hub, lambda: not list(tmp_path.glob("*.lock")))
    pool.end(EndAttempt(attempt=1, why="i1"))
    assert ends_of(on_cpu) == []


def test_all_threads_exit_once_the_last_one_does(start, tmp_path):
    alone = start(OTHERWISE["its main thread has gone alone"])
    lock = lock_of(tmp_path, alone.pid)
    alone.stdin.write("\n")
    alone.stdin.flush()
    lock.wait()
    assert rank_process.is_exiting(alone.pid) and not all_threads_exiting(alone.pid)
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

    monkeypatch.setattr(rank_process, "_told", fails)
    assert not all_threads_exiting(rank.pid)


def test_a_list_that_is_short_of_a_thread_is_none(start, monkeypatch):
    """The kernel's ends where the thread at which it stands is released meanwhile."""
    rank = start()
    monkeypatch.setattr(rank_process, "_thread_is_exiting", lambda *_: True)
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


@pytest.mark.parametrize("end", OTHERWISE.values(), ids=OTHERWISE)
def test_what_is_no_death_by_a_signal_is_told_when_it_is_over(host, start, stand_in, tmp_path, end):
    rank = start(end)
    pool = pool_with(host, rank.pid)
    rank.stdin.write("\n")
    rank.stdin.flush()
    until(host.hub, lambda: not list(tmp_path.glob("*.lock")))  # it has been looked at
    assert exits(host) == [] and not pool.workers[rank.pid].is_dying


def test_a_rank_that_its_agent_ends_is_not_told(host, start, stand_in, tmp_path):
    rank = start()
    pool = pool_with(host, rank.pid)
    pool.end(EndAttempt(attempt=1, why="i1"))
    until(host.hub, lambda: not list(tmp_path.glob("*.lock")))
    assert host.sent == [] and not pool.workers[rank.pid].is_dying


def test_a_retained_rank_is_not_told_before_it_is_gone(host, start, stand_in, tmp_path):
    """It may be given a place in the next attempt meanwhile, whose failure its end is then."""
    rank = start()
    pool = pool_with(host, rank.pid)
    pool.workers[rank.pid].retained = True
    rank.kill()
    until(host.hub, lambda: not list(tmp_path.glob("*.lock")))
    assert host.sent == [] and not pool.workers[rank.pid].is_dying


def test_the_end_of_a_child_is_none_of_its_own(host, start, tmp_path):
    rank = start(FORKS)
    pool = pool_with(host, rank.pid)
    rank.stdin.write("\n")
    rank.stdin.flush()
    assert rank.stdout.readline() == "over\n"
    host.hub.run_once(0.1)
    assert list(tmp_path.glob("*.lock")) and not pool.workers[rank.pid].is_dying


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
    monkeypatch.setattr(rank_process, "_stat", lambda pid: fields)
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


def test_where_the_host_has_no_room_for_a_thread_only_the_pidfd_tells(host, start, tmp_path, monkeypatch):
    def full(_):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", full)
    made = []
    monkeypatch.setattr(os, "eventfd", lambda *given, make=os.eventfd: made.append(make(*given)) or made[-1])
    rank = start()
    pool = pool_with(host, rank.pid)
    with pytest.raises(OSError):
        os.fstat(made[0])  # it was given back
    rank.kill()
    until(host.hub, lambda: pool.workers[rank.pid].pidfd < 0)
    pool.on_exit_code(rank.pid, -9)
    assert exits(host) == [(1, -9, 7)]


def test_a_lock_of_another_name_or_user_is_not_opened(host, start, tmp_path, monkeypatch):
    """Whoever may write a lock has the process that waits for it in their hands."""
    rank = start()
    os.link(tmp_path / robust_lock.name_of(rank.pid), tmp_path / "second")
    pool = pool_with(host, rank.pid)
    assert f"rank-{rank.pid}" not in [thread.name for thread in threading.enumerate()]
    assert not pool.workers[rank.pid].is_dying
