"""Lists and tables of the terminal, as a person reads them in 80 and in 120 columns."""

from __future__ import annotations

from pathlib import Path

import pytest

from muster.app.api import RunDir
from muster.app.inspect.status import RunStatus, Summary
from muster.cli import tables
from muster.core.types import JobState, JobStatus
from muster.protocol.client import SupervisorStatus

NOW_NS = 10**18


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MUSTER_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("HOME", str(tmp_path))


def at_home(run_id: str, tmp_path: Path) -> RunDir:
    return RunDir(path=tmp_path / "home" / "runs" / run_id, run_id=run_id)


def seen(run: RunDir, state: JobState = JobState.RUNNING, phase: str | None = "run", **figures: object) -> RunStatus:
    known = {
        "name": "demo", "attempt": 1, "last_step": 30, "final_loss": 1.23456, "tokens": 9000, "tokens_per_s": 16939.7,
        "incident_count": 0, "total_steps": 1200, "began_ns": NOW_NS - 600 * 10**9, "step_every_s": 0.5, "usd": 0.0,
    }  # fmt: skip
    summary = Summary(**{**known, **figures})  # type: ignore[arg-type]
    live = SupervisorStatus(phase=phase, reason="training: step 30 of attempt 1", attempt=1, step=30) if phase else None
    status = JobStatus(state=state, reason="so it is", tasks={"supervisor": "running (pid 7)"})
    return RunStatus(run=run, backend="local", status=status, summary=summary, live=live)


def test_the_list_in_120_columns_is_a_line_a_run(tmp_path: Path):
    there = RunDir(path=tmp_path / "work" / "first-run", run_id="demo-20261123-101010-beef")
    found = [
        seen(at_home("demo-20261123-101112-cafe", tmp_path), usd=1234.5),
        seen(there, JobState.STOPPED, None, last_step=None, final_loss=None, usd=None),
    ]
    assert list(tables.runs(found, NOW_NS, 120)) == [
        "run                        state       age      step     ETA    loss       cost  folder",
        "demo-20261123-101112-cafe  running  10 min  30/1,200  10 min  1.2346  $1,234.50  -",
        "demo-20261123-101010-beef  stopped  10 min   -/1,200       -       -          -  ~/work/first-run",
    ]


def test_in_80_columns_the_folder_then_the_id_has_a_line_of_its_own(tmp_path: Path):
    there = RunDir(path=tmp_path / "work" / "first-run", run_id="demo-20261123-101010-beef")
    found = [seen(at_home("demo-20261123-101112-cafe", tmp_path), usd=1.5), seen(there, JobState.STOPPED, None)]
    assert list(tables.runs(found, NOW_NS, 80)) == [
        "run                        state       age      step     ETA    loss   cost",
        "demo-20261123-101112-cafe  running  10 min  30/1,200  10 min  1.2346  $1.50",
        "demo-20261123-101010-beef  stopped  10 min  30/1,200       -  1.2346  $0.00",
        "  ~/work/first-run",
    ]
    assert list(tables.runs(found, NOW_NS, 60)) == [
        "  state       age      step     ETA    loss   cost",
        "demo-20261123-101112-cafe",
        "  running  10 min  30/1,200  10 min  1.2346  $1.50",
        "demo-20261123-101010-beef",
        "  stopped  10 min  30/1,200       -  1.2346  $0.00",
        "  ~/work/first-run",
    ]


def test_what_says_nothing_of_any_run_has_no_column(tmp_path: Path):
    found = [seen(at_home("demo", tmp_path), JobState.STOPPED, None)]
    assert next(tables.runs(found, NOW_NS, None)).split() == ["run", "state", "age", "step", "loss", "folder"]


def test_a_run_that_does_not_train_has_no_arrival(tmp_path: Path):
    run = at_home("demo", tmp_path)
    assert seen(run).eta_s == pytest.approx(585.0)
    for other in (
        seen(run, phase="recover"), seen(run, JobState.SUCCEEDED, None), seen(run, last_step=None),
        seen(run, step_every_s=None), seen(run, total_steps=None),
    ):  # fmt: skip
        assert other.eta_s is None
    assert "running (recover)" in list(tables.runs([seen(run, phase="recover")], NOW_NS, None))[1]


def test_one_run_without_none_and_without_exponents(tmp_path: Path):
    lines = list(tables.one_run(seen(at_home("demo", tmp_path), tokens_per_s=16940.0), NOW_NS))
    assert lines[0] == "demo: running: so it is"
    assert "  step          30 of 1,200, 10 min to go" in lines and "  tokens/s      16,940" in lines
    unknown = dict.fromkeys(("name", "last_step", "final_loss", "tokens_per_s", "total_steps", "began_ns", "usd"))
    text = "\n".join(tables.one_run(seen(at_home("demo", tmp_path), phase=None, **unknown), NOW_NS))
    assert "None" not in text and "e+0" not in text and "cost" not in text
    assert "  supervisor    running (pid 7)" in text


def test_money_is_never_nothing_where_something_was_paid():
    assert [tables.money(usd) for usd in (0.0, 0.004, 0.42, 1204.1)] == ["$0.00", "<$0.01", "$0.42", "$1,204.10"]
