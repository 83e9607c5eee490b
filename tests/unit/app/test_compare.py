"""Runs against each other: at equal steps, at equal tokens, and by what their files say."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from muster.app.inspect import compare as use_case
from muster.app.planning import prices
from muster.cli import main
from muster.config import load
from muster.core import resolved_file
from muster.core.errors import UsageError
from muster.core.event_log import EventLog
from muster.storage import run_registry

TEXT = "name: x\nmodel: {config: {model_type: llama}}\ndata: {sources: [{type: random}]}\ntraining: {steps: 50}\n"


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MUSTER_HOME", str(tmp_path / "home"))


def made(run_id: str, steps: int, tokens: int, *changes: str) -> str:
    """A run whose loss after step n is 100 - n."""
    resolved = load.loads(TEXT, overrides=list(changes)).spec.model_dump_json()
    run = run_registry.create(run_id, run_registry.place(run_id, None), run_file=TEXT, resolved=resolved)
    resolved_file.write(run.path, resolved)
    log = EventLog(run_id, run.events, "host-0", 1)
    log.append("host.allocated", detail={"gpus": 1, "role": "active", "usd_per_hour": 0.0})
    log.append("attempt.started", detail={"world_size": 1, "layout": {}, "hosts": {"host-0": [0]}})
    figures = {"tokens": tokens, "supervised_tokens": tokens, "padding_tokens": 0, "step_ns": 10**6, "grad_norm": 1.0}
    for n in range(1, steps + 1):
        log.append("step", step=n, rank=0, detail={**figures, "loss": 100.0 - n, "learning_rate": 1e-3})
    log.append("eval", step=10, rank=0, detail={"loss": float(steps)})
    log.close()
    return run_id


def test_the_same_step_and_the_same_tokens_are_two_comparisons():
    found = use_case.compare([made("a-1", 20, 100), made("b-1", 30, 50, "training.optimizer.learning_rate=0.01")])
    assert found.differences == {"training.optimizer.learning_rate": [2e-5, 0.01]}
    assert found.at_step is not None and found.at_tokens is not None
    assert found.at_step.at == 20 and found.at_step.loss == [84.5, 84.5], "mean over steps 11 to 20"
    assert (found.at_step.heldout_step, found.at_step.heldout_loss) == (10, [20.0, 30.0])
    assert found.at_tokens.at == 1500 and found.at_tokens.loss == [89.5, 74.5], "steps 15 and 30 are 1,500 tokens"


def test_what_has_not_begun_has_no_equal_point(capsys: pytest.CaptureFixture[str]):
    found = use_case.compare([made("a-1", 20, 100), made("b-1", 0, 0)])
    assert found.at_step is None and found.at_tokens is None and found.differences == {}


def test_a_letter_for_each_run_and_json(capsys: pytest.CaptureFixture[str]):
    made("a-1", 20, 100), made("b-1", 30, 50, "training.optimizer.learning_rate=0.01")
    assert main.run(["compare", "a-1", "b-1"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[:2] == ["A  a-1", "B  b-1"] and max(map(len, lines)) <= 80
    rows = {line.rsplit(maxsplit=2)[0].strip(): line.split()[-2:] for line in lines[4:]}
    assert rows["training.optimizer.learning_rate"] == ["2e-05", "0.01"]
    assert rows["loss at step 20 (mean of 10 steps)"] == ["84.5000", "84.5000"]
    assert rows["loss at 1,500 tokens (mean of 10 steps)"] == ["89.5000", "74.5000"]
    assert main.run(["compare", "a-1", "b-1", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["at_equal_tokens"]["loss"] == [89.5, 74.5]
    assert main.run(["compare", "a-1"]) == 2


def test_what_can_be_rented_with_the_date_of_its_price(capsys: pytest.CaptureFixture[str], tmp_path: Path):
    assert main.run(["gpus", "--region", "us-central1-a", "--gpu", "h100", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found and all(each["location"] == "us-central1" and each["price"]["date"] for each in found)
    assert all("h100" in each["accelerator"].lower() for each in found)
    rates = [each["usd_per_node_hour"] / each["gpus_per_node"] for each in found if each["accelerator"] == "H100"]
    assert rates == sorted(rates), "the cheapest first"
    assert main.run(["gpus"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 120 and lines[0].split()[:2] == ["GPUs", "memory"]
    with pytest.raises(UsageError, match="no machine: in mars"):
        prices.rentable(region="mars")
