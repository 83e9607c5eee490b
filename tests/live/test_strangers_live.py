"""1,100 connections that say nothing, to the supervisor and to a replicator: the run does not notice."""

import contextlib
import os
import resource
import signal
import statistics
import subprocess
import sys

import psutil
import pytest
from cluster import LiveRun, spec_of
from waiting import eventually

from muster.transport import connections, stream_server

pytestmark = [pytest.mark.live, pytest.mark.timeout(240)]

COUNT = 1_100
#: As most systems start programs. The test lowers the hard limit too: what is raised at start must not be what helps.
LIMIT = 1_024
CONNECT = """
import resource as r, socket, sys, time
r.setrlimit(r.RLIMIT_NOFILE, (r.getrlimit(r.RLIMIT_NOFILE)[1],) * 2)
kept = []
for _ in range(int(sys.argv[1])):
    for port in sys.argv[2:]:
        sock = socket.socket()
        sock.settimeout(0.5)
        with __import__("contextlib").suppress(OSError):
            sock.connect(("127.0.0.1", int(port)))
        kept.append(sock)
print("there", flush=True)
time.sleep(600)
"""


@contextlib.contextmanager
def silent(*ports):
    argv = [sys.executable, "-c", CONNECT, str(COUNT), *map(str, ports)]
    child = subprocess.Popen(argv, stdout=subprocess.PIPE)
    try:
        assert child.stdout.readline() == b"there\n"
        yield
    finally:
        child.kill()
        child.wait()
        child.stdout.close()


def replicator_of(run, name):
    (found,) = [
        process
        for process in map(psutil.Process, run.host_pids(name))
        if "muster.agent.replicator.main" in " ".join(process.cmdline())
    ]
    return found


def saved(run):
    return [event.step for event in run.events("checkpoint.committed")]


def test_silent_connections_cost_no_step_and_no_save(tmp_path):
    if resource.getrlimit(resource.RLIMIT_NOFILE)[1] < 2 * COUNT + 64:
        pytest.skip(f"this machine lets a process open fewer than {2 * COUNT} files")
    changes = {"resources.hosts": 2, "resources.ranks_per_host": 1, "training.steps": 100_000}
    with LiveRun(tmp_path, spec_of(**changes, **{"checkpoint.every_steps": 20})) as run:
        run.under_way(3)
        replicator = replicator_of(run, "host-0")
        attacked = [(psutil.Process(run.supervisor.pid), connections.STRANGERS), (replicator, stream_server.STRANGERS)]
        for process, _ in attacked:
            process.rlimit(psutil.RLIMIT_NOFILE, (LIMIT, LIMIT))
        before = [process.num_fds() for process, _ in attacked]
        address = run.supervisor_address()
        port = run.replicator_port()
        with silent(address[1], port):
            for (process, most), had in zip(attacked, before, strict=True):
                eventually(lambda process=process, had=had, most=most: process.num_fds() <= had + most + 32)
            step, count = run.step(), len(saved(run))
            run.wait_for_step(step + 10)
            run.wait_until(lambda: len(saved(run)) >= count + 2, "two more saves", 60)
        for (process, _), had in zip(attacked, before, strict=True):
            eventually(lambda process=process, had=had: process.num_fds() <= had + 8)
            assert process.is_running()
        assert replicator_of(run, "host-0").pid == replicator.pid
        assert not run.troubles() and not run.events("checkpoint.failed"), run.story()
        # A rank that waits in vain for its replicator writes the share itself, after five seconds: none had to.
        took_s = [event.detail["duration_ns"] / 1e9 for event in run.events("checkpoint.committed")]
        assert statistics.median(took_s) < 5 and max(took_s) < 25, took_s
        os.kill(run.supervisor.pid, signal.SIGINT)
        assert run.wait() == 130, run.story()
