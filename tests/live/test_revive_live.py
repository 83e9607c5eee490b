"""On this machine a host whose keeper is killed is started again: a run that waits for it does not wait for ever."""

from __future__ import annotations

import json
import os
import signal

import pytest
from verbs import Shell
from waiting import eventually
from watched import Watched

from muster.core import processes

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
    eventually(lambda: task("agent-host-0") != keeper, 30)
    shell.wait_for_step(step + 2)
    assert task("supervisor") == supervisor and processes.look(supervisor)
    said = shell.run("events", run_id, "--kind", "run.message").stdout
    assert "agent-host-0 had ended while the run waits for hosts: it was started again" in said
    assert shell.status(run_id)["state"] == "running"
    shell.run("down", run_id)
    assert shell.left(run_id) == []
