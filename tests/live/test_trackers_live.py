"""A tracker that hangs, refuses, dies or comes back costs a run nothing, and gets every figure once."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest
from cluster import SMALL
from verbs import Shell
from waiting import eventually
from watched import Watched

from muster.core import processes

pytestmark = [pytest.mark.live, pytest.mark.timeout(300)]

FAKE = Path(__file__).parents[1] / "fakes" / "tracker"


class Tracked:
    """A run with that tracker."""

    def __init__(self, shell: Shell, *, mode: str, steps: int) -> None:
        self.shell, self.fake, self.there = shell, shell.folder / "fake", shell.folder / "there"
        self.fake.mkdir()
        self.set(mode)
        shell.env |= {"PYTHONPATH": str(FAKE), "TRACKIO_FAKE": str(self.fake), "TRACKIO_PROJECT": "all of them"}
        run_file = SMALL | {
            "training": SMALL["training"] | {"steps": steps},
            "output": {"tracker": "trackio", "tensorboard": False},
        }
        (shell.folder / "run.yaml").write_text(json.dumps(run_file))  # JSON is YAML
        self.seen = Watched(self.there)

    def set(self, mode: str) -> None:
        (self.fake / "mode.new").write_text(mode)
        (self.fake / "mode.new").replace(self.fake / "mode")

    def calls(self, name: str) -> list[dict]:
        path = self.fake / "calls.jsonl"
        made = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
        return [call for call in made if call["call"] == name]

    def steps(self) -> list[int]:
        """Of training, in the order in which the tracker got them."""
        return [call["step"] for call in self.calls("log") if "train/loss" in call["metrics"]]

    def notes(self) -> list[str]:
        return [event.detail["text"] for event in self.seen.events("run.message") if "trackio" in event.detail["text"]]

    def process(self) -> int | None:
        """That serves the tracker."""
        living = processes.labelled((self.there / "run_id").read_text().strip())
        return next((each.pid for each in living if "muster.trackers.main" in each.argv), None)


def test_one_that_hangs_from_start_to_end_costs_no_step(shell: Shell) -> None:
    run = Tracked(shell, mode="init hangs", steps=20)
    train = shell.start("train", "run.yaml", "run_dir=there")
    _, err = train.communicate(timeout=120)
    assert train.returncode == 0, err
    assert run.seen.step() == 20 and not run.seen.troubles()
    assert run.steps() == []
    assert "has nothing 8 s after the end of the run: muster track" in run.notes()[-1] and len(run.notes()) == 1
    run_id = (run.there / "run_id").read_text().strip()
    assert not shell.left(run_id)

    run.set("ok")
    assert "have all figures" in shell.run("track", "there").stderr
    assert run.steps() == list(range(1, 21)) and len(run.calls("finish")) == 1


def test_one_that_comes_back_gets_every_step_once_over_all_attempts(shell: Shell) -> None:
    run = Tracked(shell, mode="ok", steps=1_000_000)
    train = shell.start("train", "run.yaml", "run_dir=there")
    eventually(lambda: len(run.steps()) > 3, 60)
    run.set("log hangs")
    step = run.seen.step()
    eventually(lambda: run.seen.step() > step + 20)
    run.set("refuses")
    eventually(lambda: any("does not accept" in note for note in run.notes()))
    pid, _ = run.seen.ranks()[0]
    os.kill(pid, signal.SIGKILL)
    eventually(lambda: 0 in run.seen.ranks() and run.seen.ranks()[0][0] != pid, 60)
    process = run.process()
    assert process is not None
    os.kill(process, signal.SIGKILL)
    eventually(lambda: run.process() not in (None, process))
    step = run.seen.step()
    eventually(lambda: run.seen.step() > step + 5)
    run.set("ok")
    eventually(lambda: run.steps()[-1] > step, 60)
    os.kill(train.pid, signal.SIGINT)
    _, err = train.communicate(timeout=60)
    assert train.returncode == 130, err
    # The client may have held in memory what it got just before the kill: that may come again.
    assert list(dict.fromkeys(run.steps())) == list(range(1, run.seen.step() + 1))
    assert {call["name"] for call in run.calls("init")} == {(run.there / "run_id").read_text().strip()}
    assert {(call["project"], call["resume"]) for call in run.calls("init")} == {("all of them", "allow")}
    assert len(run.calls("finish")) == 1
    assert sum("does not accept" in note for note in run.notes()) == 1, run.notes()
    assert sum("accepts figures again" in note for note in run.notes()) == 1, run.notes()
    assert len([incident for incident in run.seen.troubles()]) == 1, "the rank that was killed"
