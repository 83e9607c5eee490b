"""An agent whose limits were lowered starts nothing that inherits them; a fork server that fails is tried again."""

import os
import resource
import select
import signal
import subprocess
import sys

import pytest
from fakes.host import VirtualHost

from muster.agent.programs.fork_server import AGAIN_S, DEATHS, NAME
from muster.agent.values.actions import FindForkServer
from muster.agent.values.events import ForkServerFound, ProgramEnded, SetupFound
from muster.agent.watchdog import GRACEFUL, keep_running
from muster.protocol.exit_codes import LIMITED
from muster.protocol.version import OtherVersion

AGENT = """
import os, resource, sys
from pathlib import Path
from muster.agent.values.host_identity import HostIdentity
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
from muster.agent.values.host_identity import HostIdentity
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


def dies(host, code=1):
    host.give(ProgramEnded(NAME, code, b"no room"))


def test_a_fork_server_that_cannot_start_is_said_and_tried_again():
    host = VirtualHost().supervised().give(SetupFound("", False))
    for _ in range(DEATHS):
        assert not host.sent
        dies(host)
    (failure,) = host.sent
    assert "died with code 1: no room" in failure.reason and len(host.started(NAME)) == DEATHS
    assert host.now_s < host.state.fork_server.again_s <= host.now_s + AGAIN_S
    host.tick()
    assert len(host.started(NAME)) == DEATHS, "not yet"
    host.tick(AGAIN_S)
    assert len(host.started(NAME)) == DEATHS + 1 and host.state.fork_server.again_s > 1e9
    host.with_fork_server()
    assert host.state.link.kept == {}


def test_one_that_a_dead_agent_started_is_replaced_once_it_has_died():
    """It connects by itself while it lives; after that nothing else would start another one."""
    host = VirtualHost()
    host.answers[FindForkServer] = lambda action: [ForkServerFound(7, True)]
    host.give(SetupFound("", False))
    assert not host.started(NAME)
    dies(host, None)
    assert len(host.started(NAME)) == 1


@pytest.mark.parametrize("mebibytes", [0, 58])
def test_a_limit_that_was_there_from_the_start_is_named(monkeypatch, mebibytes):
    monkeypatch.setattr("muster.core.processes.memory_limit", lambda: mebibytes << 20)
    host = VirtualHost()
    host.state.fork_server.deaths = DEATHS
    dies(host)
    assert ("RLIMIT_AS" in host.state.link.kept["fork server"].reason) == (mebibytes > 0)
