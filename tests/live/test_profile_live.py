"""A look into a run that trains, as a user types it."""

from __future__ import annotations

import json
import os
import re
import signal
from pathlib import Path

import pytest
from cluster import SMALL
from fakes import chrome_trace
from verbs import Shell
from waiting import eventually
from watched import Watched

from muster.protocol.client import TraceRun
from muster.protocol.lease import read_lease
from muster.transport.client import ask_supervisor
from muster.transport.secure_session import read_token

pytestmark = [pytest.mark.live, pytest.mark.timeout(300)]

RUN_FILE = json.loads(json.dumps(SMALL)) | {
    "training": {
        **SMALL["training"],
        "steps": 1_000_000,
        "optimizer": {"schedule": "constant"},
        "state_hash_every_steps": 1,
    },
    "metrics": {"port": 0},
}


def hashes(folder: Path) -> dict[int, str]:
    """Step -> the state after it, the last word on each."""
    return {event.step or 0: str(event.detail["state_hash"]) for event in Watched(folder).events("step")}


def submitted(shell: Shell) -> tuple[str, Path]:
    """(run id, its folder), once it trains."""
    (shell.folder / "run.yaml").write_text(json.dumps(RUN_FILE))  # JSON is YAML
    shell.run("submit", "run.yaml", "run_dir=there")
    there = shell.folder / "there"
    shell.wait_for_step(5)
    return (there / "run_id").read_text().strip(), there


def test_traces_stacks_and_figures_of_a_run_that_trains(shell: Shell) -> None:
    run_id, _ = submitted(shell)
    traces = json.loads(shell.run("profile", run_id, "--steps", "2", "--rank", "all", "--json").stdout)
    assert sorted(trace["rank"] for trace in traces) == [0, 1]
    for trace in traces:
        assert trace["last_step"] == trace["first_step"] + 1 and trace["problem"] is None
        assert any(name.startswith("aten::") for name in chrome_trace.read(Path(trace["file"])).names)
    seen = json.loads(shell.run("profile", run_id, "--stacks", "--json").stdout)
    told = sorted(rank for group in seen["groups"] for rank in group["ranks"])
    assert told == [0, 1] and any(group["frames"] for group in seen["groups"]), seen
    assert "there is no rank 9: the run's ranks are 0-1" in shell.run("profile", run_id, "--rank", "9", code=2).stderr
    (step,) = re.findall(r"^muster_step\{.*\} (\S+)$", shell.run("metrics", run_id).stdout, re.MULTILINE)
    assert float(step) >= traces[0]["last_step"]
    shell.run("stop", run_id)
    assert "has ended" in shell.run("profile", run_id, code=2).stderr


def test_no_bit_of_the_state_differs_though_a_rank_dies_in_its_trace(shell: Shell) -> None:
    """It is replaced like any other; no part of its trace is there."""
    run_id, there = submitted(shell)
    shell.run("profile", run_id, "--steps", "2", "--rank", "all")
    watched = Watched(there)
    address = read_lease((there / "lease.json").read_bytes(), me="the test").address
    asked = TraceRun(request="cut", steps=100, ranks=(1,))
    assert ask_supervisor(address, read_token(str(there / "token")), asked).refused is None
    begun = watched.step()
    eventually(lambda: watched.step() >= begun + 3, 60)
    os.kill(watched.ranks()[1][0], signal.SIGKILL)
    eventually(lambda: watched.recoveries() == ["restart"], 60)
    killed = watched.step()
    eventually(lambda: watched.step() >= killed + 3, 90)
    shell.run("stop", run_id)
    assert not list((there / "traces").glob("*.part"))
    for event in watched.events("trace.written"):  # of a machine that takes 100 steps before it is killed
        if event.detail["request"] == "cut":
            chrome_trace.read(there / event.detail["file"])

    last = killed + 3
    shell.run("train", "run.yaml", "run_dir=plain", f"training.steps={last}")
    plain, profiled = hashes(shell.folder / "plain"), hashes(there)
    assert sorted(plain) == list(range(1, last + 1))
    assert {step: profiled[step] for step in plain} == plain
