"""Tracking services are asked for by key, imported when asked for, and missed by name."""

import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from muster.config.spec import RunSpec
from muster.core.errors import UsageError
from muster.train.measurement import trackers


def spec(**output: Any) -> RunSpec:
    return RunSpec.model_validate({"name": "demo", "output": output})


class Fake(ModuleType):
    """Answers any call and remembers it."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.calls: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = []

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda *args, **kwargs: self.calls.append((name, args, kwargs))


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("wandb", ["init", "log", "finish"]),
        ("trackio", ["init", "log", "finish"]),
        ("mlflow", ["set_experiment", "start_run", "log_metrics", "end_run"]),
    ],
)
def test_each_service_gets_the_numbers(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str, expected: list[str]
) -> None:
    fake = Fake(name)
    monkeypatch.setitem(sys.modules, name, fake)
    (found,) = trackers.open_trackers(spec(tracker=name, tensorboard=False), run_id="r1", run_dir=tmp_path)
    found.log({"train/loss": 1.0}, step=4)
    found.close()
    assert [call[0] for call in fake.calls] == expected
    (logged,) = [call for call in fake.calls if call[0].startswith("log")]
    assert logged[1] == ({"train/loss": 1.0},) and logged[2] == {"step": 4}


def test_a_service_that_is_missing_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(UsageError, match="wandb is not installed"):
        trackers.open_trackers(spec(tracker="wandb", tensorboard=False), run_id="r", run_dir=tmp_path)


def test_tensorboard_is_used_where_present_and_missed_where_demanded(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(trackers.importlib.util, "find_spec", lambda name: None)
    assert trackers.open_trackers(spec(), run_id="r", run_dir=tmp_path) == []
    with pytest.raises(UsageError, match="tensorboard is not installed"):
        trackers.open_trackers(spec(tensorboard=True), run_id="r", run_dir=tmp_path)
    monkeypatch.setattr(trackers.importlib.util, "find_spec", lambda name: object())
    monkeypatch.setattr(trackers, "TensorBoard", lambda directory: directory)
    assert trackers.open_trackers(spec(), run_id="r", run_dir=tmp_path) == [tmp_path / "tensorboard"]
    assert trackers.open_trackers(spec(tensorboard=False), run_id="r", run_dir=tmp_path) == []
