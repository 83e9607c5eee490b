"""An agent whose limits were lowered starts nothing that inherits them; a fork server that fails is tried again."""

import os
import resource
import select
import signal
import subprocess
import sys
import time

import pytest
from test_agent_ends import agent  # noqa: F401 (a fixture)
from waiting import eventually

from muster.agent.fork_server_process import AGAIN_S, DEATHS
from muster.agent.host_identity import HostIdentity
from muster.agent.watchdog import GRACEFUL, keep_running
from muster.protocol.exit_codes import LIMITED
from muster.protocol.version import OtherVersion

AGENT = """
import os, resource, sys
from pathlib import Path
from muster.agent.host_identity import HostIdentity
folder = Path(sys.argv[1])
(folder / str(os.getpid())).touch()
hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
identity = HostIdentity(run_dir=folder, run_id="run", host="host-0", bind="", memory=None)
if len(list(folder.iterdir())) == 1:
    resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
    if os.geteuid() == 0:
        os.setresuid(65534, 65534, 65534)  # nobody may raise it again
    identity.start_program("x", "platform")
    (folder / "it has started something").touch()
print("an agent with", "all" if hard == int(sys.argv[2]) else hard)
"""


def no_beat_until(fd: int) -> None:
    select.select([fd], [], [])


def test_it_ends_and_its_keeper_starts_one_with_limits_of_its_own(tmp_path, capfd):
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    argv = [sys.executable, "-c", AGENT, str(tmp_path), str(hard)]
    try:
        assert keep_running(argv, dict(os.environ), no_beat_until) == 0
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
    said = capfd.readouterr()
    assert len(list(tmp_path.iterdir())) == 2, "two agents, and nothing started by the first"
    assert "an agent with all" in said.out and "was lowered from" in said.err and "keeper starts another" in said.err
    assert LIMITED not in GRACEFUL and OtherVersion.exit_code in GRACEFUL


SOFT = """
import resource, subprocess, sys
from pathlib import Path
from muster.agent.host_identity import HostIdentity
identity = HostIdentity(run_dir=Path(sys.argv[1]), run_id="run", host="host-0", bind="", memory=None)
soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
resource.setrlimit(resource.RLIMIT_NOFILE, (64, hard))
started = identity.start_program("x", "code", stdin=subprocess.PIPE)
print(resource.prlimit(started.pid, resource.RLIMIT_NOFILE) == (soft, hard))
started.communicate(b"")
"""


def test_a_program_gets_the_soft_limit_that_this_process_began_with(tmp_path):
    done = subprocess.run([sys.executable, "-c", SOFT, str(tmp_path)], capture_output=True, text=True, check=False)
    assert done.stdout == "True\n", done.stderr


def test_a_fork_server_that_cannot_start_is_said_and_tried_again(agent, monkeypatch):  # noqa: F811
    started = []

    def start_program(identity, log, module, *arguments, **streams):
        code = "raise SystemExit('no room')" if len(started) < DEATHS else "input()"
        with open(identity.run_dir / "errors", "ab") as errors:
            started.append(
                subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stderr=errors, **streams)
            )
        return started[-1]

    monkeypatch.setattr(HostIdentity, "start_program", start_program)
    monkeypatch.setattr(HostIdentity, "log_path", lambda identity, program: identity.run_dir / "errors")
    server, told = agent.fork_server, []
    monkeypatch.setattr(agent.link, "keep", lambda what, failure: told.append((what, failure)))

    def said():
        agent.hub.run_once(0.05)
        return told

    server.start()
    eventually(said)
    ((what, failure),) = told
    assert what == "fork server" and "died with code 1: no room" in failure.reason and len(started) == DEATHS
    assert time.monotonic() < server.due_s() <= time.monotonic() + AGAIN_S
    server.watch()
    assert len(started) == DEATHS, "not yet"
    monkeypatch.setattr(time, "monotonic", lambda now=time.monotonic: now() + AGAIN_S)
    server.watch()
    assert len(started) == DEATHS + 1 and server.due_s() > 1e9
    started[-1].kill()
    for child in started:
        child.wait()
        child.stdin.close()


@pytest.mark.parametrize("mebibytes", [0, 58])
def test_a_limit_that_was_there_from_the_start_is_named(agent, monkeypatch, mebibytes):  # noqa: F811
    monkeypatch.setattr("muster.core.processes.memory_limit", lambda: mebibytes << 20)
    told = []
    monkeypatch.setattr(agent.link, "keep", lambda what, failure: told.append(failure.reason))
    child = subprocess.Popen([sys.executable, "-c", "raise SystemExit(1)"])
    agent.fork_server._pid, agent.fork_server._deaths = child.pid, DEATHS - 1
    agent.fork_server._on_exit(child)
    (reason,) = told
    assert ("RLIMIT_AS" in reason and "58 MiB" in reason) == bool(mebibytes)
