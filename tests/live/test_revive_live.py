"""A killed host of this machine comes back where its run waits for it; two submits at one moment make one run."""

from __future__ import annotations

import json
import os
import signal

import pytest
from verbs import Shell
from waiting import eventually
from watched import Watched

from muster.core import processes
from muster.storage import run_registry

pytestmark = [pytest.mark.live, pytest.mark.timeout(300)]


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
