"""The trackers' own clients, where they are installed, in the process that serves them: no training."""

from __future__ import annotations

import json
import os
import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest
from fakes.mlflow_server import MLflowServer
from waiting import eventually

from muster.config.spec import RunSpec
from muster.core import resolved_file
from muster.core.event_log import EventLog
from muster.protocol.codec import encode, reader_of
from muster.protocol.pipes import TRACKER_NOTES, RunOver

pytestmark = [pytest.mark.live, pytest.mark.timeout(240)]

STEP = {
    "loss": 1.5, "grad_norm": 1.0, "learning_rate": 1e-3, "step_ns": 5, "tokens": 10, "supervised_tokens": 4,
    "padding_tokens": 0,
}  # fmt: skip


class Run:
    """A run's folder and the process that serves its tracker."""

    def __init__(self, folder: Path, tracker: str, env: dict[str, str]) -> None:
        self.folder, self.env = folder / "run", {**os.environ, **env}
        self.folder.mkdir()
        output = {"tracker": tracker, "tensorboard": False}
        spec = RunSpec.model_validate({"name": "demo", "output": output})
        resolved_file.write(self.folder, spec.model_dump_json())
        self.log = EventLog(run_id="demo-1", directory=self.folder / "events", writer="host-0", attempt=1)
        self.step, self.notes = 0, folder / "notes"
        self.child = self.start()

    def start(self) -> subprocess.Popen[bytes]:
        argv = ["-P", "-m", "muster.trackers.main", "--run-dir", str(self.folder), "--run-id", "demo-1"]
        with open(self.notes, "ab") as notes:
            return subprocess.Popen(
                [sys.executable, *argv, "--writer", "host-0"],
                stdin=subprocess.PIPE, stdout=notes, env=self.env, cwd=self.folder,
            )  # fmt: skip

    def train(self, steps: int) -> None:
        for _ in range(steps):
            self.step += 1
            self.log.append("step", rank=0, step=self.step, detail=STEP | {"loss": 1 / self.step})

    def said(self) -> list[str]:
        return [reader_of(TRACKER_NOTES)(line).text for line in self.notes.read_bytes().splitlines()]

    def newest(self) -> int:
        path = self.folder / "trackers"
        files = list(path.glob("*.json")) if path.is_dir() else []
        return json.loads(files[0].read_text())["newest"].get("train", 0) if files else 0

    def kill(self) -> None:
        """And start it again, as the agent does."""
        self.child.kill()
        self.child.wait()
        assert self.child.stdin is not None
        self.child.stdin.close()
        self.child = self.start()

    def end(self, outcome: str) -> None:
        assert self.child.stdin is not None
        self.child.communicate(encode(RunOver(outcome=outcome)) + b"\n", timeout=60)  # type: ignore[arg-type]
        assert self.child.returncode == 0
        self.log.close()


@pytest.mark.parametrize("away", ["refuses", "hangs", "500"])
def test_mlflow_against_a_server_that_goes_away_and_comes_back(tmp_path: Path, away: str) -> None:
    pytest.importorskip("mlflow")
    server = MLflowServer()
    server.set(away)
    run = Run(
        tmp_path, "mlflow",
        {
            "MLFLOW_TRACKING_URI": server.url, "MLFLOW_EXPERIMENT_NAME": "all of them",
            "MLFLOW_HTTP_REQUEST_TIMEOUT": "1", "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "0",
        },
    )  # fmt: skip
    run.train(60)
    eventually(lambda: len(run.said()) == 1, 60)
    assert "mlflow does not accept this run's figures" in run.said()[0]
    server.set("ok")
    eventually(lambda: run.newest() == 60, 60)
    eventually(lambda: "mlflow accepts figures again" in run.said()[-1])

    run.train(20)
    eventually(lambda: run.newest() == 80, 60)
    server.set(away)
    run.train(20)
    eventually(lambda: len(run.said()) == 3, 60)
    run.kill()
    run.train(20)
    server.set("ok")
    eventually(lambda: run.newest() == 120, 60)
    eventually(lambda: len(run.said()) == 4)
    run.end("stopped")
    assert server.steps() == list(range(1, 121)) and server.experiments == {"all of them": "1"}
    (found,) = server.runs.values()
    assert (found["name"], found["status"]) == ("demo-1", "KILLED") and found["params"]["name"] == "demo"
    assert not any("git" in tag["key"] for tag in found["tags"])


def test_trackio_continues_one_run(tmp_path: Path) -> None:
    pytest.importorskip("trackio")
    run = Run(tmp_path, "trackio", {"TRACKIO_DIR": str(tmp_path / "trackio"), "TRACKIO_PROJECT": "mine"})
    run.train(30)
    eventually(lambda: run.newest() == 30, 90)
    run.kill()
    run.train(30)
    eventually(lambda: run.newest() == 60, 90)
    run.end("succeeded")
    (path,) = (tmp_path / "trackio").glob("mine*.db")
    with sqlite3.connect(path) as store:
        rows = store.execute("select run_name, step from metrics order by step").fetchall()
    assert {name for name, _ in rows} == {"demo-1"} and sorted({step for _, step in rows}) == list(range(1, 61))
    assert not run.said()


def test_wandb_without_a_network_keeps_everything_in_the_runs_folder(tmp_path: Path) -> None:
    pytest.importorskip("wandb")
    run = Run(tmp_path, "wandb", {"WANDB_MODE": "offline", "WANDB_PROJECT": "mine"})
    run.train(30)
    eventually(lambda: run.newest() == 30, 90)
    run.end("failed")
    (file,) = (run.folder / "wandb").glob("offline-run-*-demo-1/run-demo-1.wandb")
    assert file.stat().st_size > 0 and not run.said()
