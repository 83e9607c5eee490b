"""A killed host of this machine comes back where its run waits for it; two submits at one moment make one run."""

from __future__ import annotations

import json
import os
import resource
import signal

import psutil
import pytest
from verbs import Shell
from waiting import eventually
from watched import Watched

from muster.core import processes
from muster.storage import run_registry

pytestmark = [pytest.mark.live, pytest.mark.timeout(300)]
MODULES = ("muster.agent.host_agent", "muster.rank.fork_server")


@pytest.mark.parametrize("killed", ["keeper", "whole host"])
def test_the_only_host_comes_back(shell: Shell, killed: str) -> None:
    run_id = shell.run("submit", "run.yaml", "run_dir=there", "checkpoint.every_steps=1").stdout.strip()
    there = shell.folder / "there"

    def task(name: str) -> int:
        return int(json.loads((there / "job.json").read_text())["tasks"][name]["pid"])

    shell.wait_for_step(2)
    keeper, supervisor = task("agent-host-0"), task("supervisor")
    victims = [process.pid for process in processes.labelled(run_id)] if killed == "whole host" else [keeper]
    for pid in victims:
        if pid != supervisor:
            os.kill(pid, signal.SIGKILL)
    step = Watched(there).step()
    eventually(lambda: task("agent-host-0") != keeper, 60)
    shell.wait_for_step(step + 2)
    assert task("supervisor") == supervisor and processes.look(supervisor)
    said = shell.run("events", run_id, "--kind", "run.message").stdout
    assert "agent-host-0 had ended while the run waits for hosts: it was started again" in said
    assert shell.status(run_id)["state"] == "running"
    shell.run("down", run_id)
    assert shell.left(run_id) == []


def test_of_two_submits_at_one_moment_one_starts_the_run(shell: Shell) -> None:
    there = shell.folder / "there"
    held = run_registry.lock_submit(there)
    assert held is not None
    loser = shell.run("submit", "run.yaml", "run_dir=there", code=1)
    assert loser.stdout == "" and "another muster submit is starting a run in" in loser.stderr
    words = [line.partition(":")[0] for line in loser.stderr.splitlines()]
    assert [word for word in words if word != "warning"] == ["error", "hint"]
    held.close()

    both = [shell.start("submit", "run.yaml", "run_dir=there") for _ in range(2)]
    said = [process.communicate(timeout=120) for process in both]
    run_id = (there / "run_id").read_text().strip()
    codes = [process.returncode for process in both]
    assert 0 in codes and set(codes) <= {0, 1}, said
    for code, (out, err) in zip(codes, said, strict=True):
        assert out.strip() == run_id if code == 0 else "another muster submit is starting" in err
    argvs = [process.argv for process in shell.left(run_id)]
    for program in ("muster.app.supervisor", "muster.agent.watchdog"):
        assert len([argv for argv in argvs if program in argv]) == 1
    shell.run("down", run_id)


def test_a_submit_that_takes_over_a_keeper_on_its_way_out_gets_its_host(shell: Shell) -> None:
    """The keeper is stopped while the run ends, so that it is alive for the submit that follows, and ends then."""
    submit = ("submit", "run.yaml", "run_dir=there")
    run_id = shell.run(*submit).stdout.strip()
    shell.wait_for_step(2)
    record = json.loads((shell.folder / "there" / "job.json").read_text())
    keeper = record["tasks"]["agent-host-0"]["pid"]
    os.kill(keeper, signal.SIGSTOP)
    shell.run("stop", run_id, "--no-wait")
    eventually(lambda: shell.status(run_id)["state"] == "stopped", 60, every_s=0.5)
    shell.run(*submit)
    tasks = json.loads((shell.folder / "there" / "job.json").read_text())["tasks"]
    assert tasks["agent-host-0"]["pid"] == keeper, "it was taken over"
    step = Watched(shell.folder / "there").step()
    os.kill(keeper, signal.SIGCONT)
    shell.wait_for_step(step + 2)
    assert "agent-host-0 had ended" in shell.run("events", run_id, "--kind", "run.message").stdout
    shell.run("down", run_id)
    assert shell.left(run_id) == []


def test_a_limit_put_on_an_agent_ends_with_it(shell: Shell) -> None:
    """What starts next would inherit it: not even torch can be imported within."""
    run_id = shell.run("submit", "run.yaml", "run_dir=there").stdout.strip()
    shell.wait_for_step(2)

    def programs() -> dict[str, int]:
        """The oldest process of each program: ranks are forks of the fork server."""
        found = sorted(processes.labelled(run_id), key=lambda process: process.start_ticks, reverse=True)
        return {word.rpartition(".")[2]: process.pid for process in found for word in process.argv if word in MODULES}

    before = programs()
    unlimited = resource.prlimit(before["host_agent"], resource.RLIMIT_AS)
    limit = psutil.Process(before["host_agent"]).memory_info().vms + (8 << 20)
    resource.prlimit(before["host_agent"], resource.RLIMIT_AS, (limit, limit))
    os.kill(before["fork_server"], signal.SIGKILL)
    step = Watched(shell.folder / "there").step()
    shell.wait_for_step(step + 2)
    ranks = [pid for pid, _ in Watched(shell.folder / "there").ranks().values()]
    os.kill(max(ranks), signal.SIGKILL)  # the next attempt needs a fork server
    step = Watched(shell.folder / "there").step()
    shell.wait_for_step(step + 2)
    assert resource.prlimit(programs()["host_agent"], resource.RLIMIT_AS) == unlimited
    assert "host.set_aside" not in shell.run("events", run_id).stdout
    shell.run("down", run_id)
    assert shell.left(run_id) == []
