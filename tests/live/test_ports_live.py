"""Everything that listens for a run listens on the address that the run was given, and on no other."""

import os
import secrets
import subprocess
import sys
from pathlib import Path

import pytest
from cluster import RUN_ID, LiveRun, namespaces_work, spec_of
from listeners import listeners

from muster.rank.interface import VARIABLE

pytestmark = [pytest.mark.live, pytest.mark.timeout(240)]


def watch(run, pids_of):
    """What the processes of each host listen on, while the run goes on for some steps."""
    seen = {name: set() for name in pids_of}
    until = run.step() + 5
    while run.step() < until:
        for name, pids in pids_of.items():
            for pid in pids():
                seen[name] |= listeners(pid)
    return seen


def programs(run):
    return {"supervisor": lambda: [run.supervisor.pid]} | {
        name: (lambda name=name: run.host_pids(name)) for name in run.names
    }


@pytest.mark.skipif(not namespaces_work(), reason="needs root and iproute2")
def test_each_host_listens_on_its_own_address_alone(tmp_path):
    spec = spec_of(**{"resources.hosts": 2, "resources.ranks_per_host": 1, "training.steps": 400})
    with LiveRun(tmp_path, spec, netns=True) as run:
        run.under_way(3)
        seen = watch(run, programs(run))
        assert seen == {
            "supervisor": {run.network.bridge},
            **{name: {run.network.address(name)} for name in run.names},
        }


def test_on_one_machine_everything_listens_on_loopback_and_no_process_shows_the_token(tmp_path):
    with LiveRun(tmp_path, spec_of(**{"training.steps": 400})) as run:
        run.under_way(3)
        seen = watch(run, programs(run))
        assert seen == {"supervisor": {"127.0.0.1"}, "host-0": {"127.0.0.1"}}
        token = (run.dir / "token").read_bytes()
        shown = [
            Path(f"/proc/{pid}/{file}").read_bytes()
            for pid in [run.supervisor.pid, *run.host_pids("host-0")]
            for file in ("cmdline", "environ")
        ]
        assert len(shown) >= 8 and not any(token in text for text in shown)


@pytest.fixture
def without_ipv4():
    """Words that start a program where there is ::1 and no other address."""
    name = f"mu{secrets.token_hex(3)}"
    subprocess.run(["ip", "netns", "add", name], check=True)
    for words in (["link", "set", "lo", "up"], ["addr", "del", "127.0.0.1/8", "dev", "lo"]):
        subprocess.run(["ip", "-n", name, *words], check=True)
    yield ["nsenter", f"--net=/run/netns/{name}"]
    subprocess.run(["ip", "netns", "del", name], check=True)


class OnIpv6(LiveRun):
    """Supervisor and host in one namespace; ``inside``: the words that enter it."""

    def __init__(self, *given, inside):
        super().__init__(*given)
        self.inside = inside

    def start_supervisor(self):
        self.supervisor = self._start("muster.app.supervisor", "supervisor")

    def start_agent(self, name):
        words = ["--host", name, "--no-metadata-server"]
        self.agents[name] = self._start("muster.agent.watchdog", f"agent-{name}", *words)

    def _start(self, module, log, *words):
        argv = [*self.inside, sys.executable, "-m", module, "--run-dir", str(self.dir), "--run-id", RUN_ID, *words]
        environ = {key: value for key, value in os.environ.items() if key != VARIABLE} | {"MUSTER_BIND": "::1"}
        with open(self.dir / "logs" / f"{log}.log", "a") as output:
            return subprocess.Popen(
                argv, stdout=output, stderr=output, stdin=subprocess.DEVNULL, start_new_session=True, env=environ
            )


@pytest.mark.skipif(not namespaces_work(), reason="needs root and iproute2")
def test_a_run_needs_no_ipv4(tmp_path, without_ipv4):
    spec = spec_of(**{"training.steps": 12, "checkpoint.every_steps": 6})
    with OnIpv6(tmp_path, spec, inside=without_ipv4) as run:
        run.under_way(3)
        seen = watch(run, programs(run))
        assert run.wait() == 0, run.story()
    assert seen == {"supervisor": {"::1"}, "host-0": {"::1"}}
