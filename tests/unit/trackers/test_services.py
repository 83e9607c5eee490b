"""Each tracker's client is called as its documentation says, and one run of ours is one run of theirs."""

import sys
from types import ModuleType, SimpleNamespace

import pytest

from muster.config.spec import RunSpec
from muster.core.errors import UsageError
from muster.trackers import services, wanted
from muster.trackers.delivery import Figures
from muster.trackers.services import RunFacts, connector

FIGURES = [
    Figures(
        attempt=1, prefix="train", step=step, wall_ns=step * 10**9,
        values={"train/loss": step / 10, "train/tokens": 5.0},
    )
    for step in range(1, 4)
]  # fmt: skip


class Fake(ModuleType):
    """Answers any call and remembers it."""

    def __init__(self, name):
        super().__init__(name)
        self.calls = []

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda *args, **kwargs: self.calls.append((name, args, kwargs))


def facts(tmp_path, **environ):
    config = {"name": "demo", "training": {"steps": 5, "exact": None}}
    return RunFacts(run_id="demo-1", name="demo", run_dir=tmp_path, config=config, environ=environ)


@pytest.mark.parametrize(
    ("name", "own", "end"),
    [("wandb", {"id": "demo-1", "dir": "."}, {"exit_code": 255}), ("trackio", {}, {})],
)
def test_wandb_and_trackio_continue_their_run(monkeypatch, tmp_path, name, own, end):
    fake = Fake(name)
    monkeypatch.setitem(sys.modules, name, fake)
    own = {key: str(tmp_path) if key == "dir" else value for key, value in own.items()}
    for environ, project in (({}, "demo"), ({f"{name.upper()}_PROJECT": "mine"}, "mine")):
        fake.calls.clear()
        service = connector(name, facts(tmp_path, **environ))()
        assert service.send(FIGURES) == 1
        service.close("stopped")
        (init, begun), (_, logged), (_, ended) = ((call[0], call) for call in fake.calls)
        assert init == "init" and begun[2] == {
            "project": project, "name": "demo-1", "resume": "allow", **own,
            "config": {"name": "demo", "training": {"steps": 5, "exact": None}},
        }  # fmt: skip
        assert logged == ("log", ({"train/loss": 0.1, "train/tokens": 5.0},), {"step": 1})
        assert ended == ("finish", (), end)


class MLflowClient:
    """As ``mlflow.MlflowClient`` (3.17): the runs and experiments of a server, with its limits on a request."""

    def __init__(self):
        self.experiments, self.runs = {}, {}

    def get_experiment_by_name(self, name):
        found = self.experiments.get(name)
        return None if found is None else SimpleNamespace(experiment_id=found)

    def create_experiment(self, name):
        self.experiments[name] = str(len(self.experiments) + 1)
        return self.experiments[name]

    def search_runs(self, experiments, filter_string, max_results):
        wanted_tag = filter_string.removeprefix("tags.`muster.run_id` = ").strip("'")
        return [
            run for run in self.runs.values()
            if run.experiment in experiments and run.tags["muster.run_id"] == wanted_tag
        ][:max_results]  # fmt: skip

    def create_run(self, experiment, run_name, tags):
        run_id = f"run{len(self.runs)}"
        self.runs[run_id] = SimpleNamespace(
            info=SimpleNamespace(run_id=run_id), experiment=experiment, name=run_name, tags=tags, status="RUNNING",
            metrics=[], params={},
        )  # fmt: skip
        return self.runs[run_id]

    def update_run(self, run_id, status):
        self.runs[run_id].status = status

    def set_terminated(self, run_id, status):
        self.runs[run_id].status = status

    def log_batch(self, run_id, metrics=(), params=()):
        assert len(metrics) <= 1000 and len(params) <= 100
        self.runs[run_id].metrics += metrics
        self.runs[run_id].params.update(params)


@pytest.fixture
def mlflow(monkeypatch):
    client, module, entities = MLflowClient(), ModuleType("mlflow"), ModuleType("mlflow.entities")
    module.MlflowClient = lambda: client
    entities.Metric, entities.Param = lambda *given: given, lambda *given: given
    monkeypatch.setitem(sys.modules, "mlflow", module)
    monkeypatch.setitem(sys.modules, "mlflow.entities", entities)
    return client


def test_mlflow_has_one_run_for_all_attempts(mlflow, tmp_path):
    for outcome, status in (("preempted", "KILLED"), ("failed", "FAILED"), ("succeeded", "FINISHED")):
        service = connector("mlflow", facts(tmp_path))()
        (run,) = mlflow.runs.values()
        assert run.status == "RUNNING"
        service.close(outcome)
        assert run.status == status
    assert run.name == "demo-1" and run.params == {"name": "demo", "training.steps": "5"}
    assert run.tags["mlflow.source.name"] == "muster" and "mlflow.source.git.commit" not in run.tags
    other = RunFacts(run_id="demo-2", name="demo", run_dir=tmp_path, config={}, environ={})
    connector("mlflow", other)()
    assert len(mlflow.runs) == 2 and mlflow.experiments == {"demo": "1"}


def test_mlflow_gets_many_steps_in_one_request_up_to_its_limit(mlflow, tmp_path, monkeypatch):
    service = connector("mlflow", facts(tmp_path))()
    assert service.send(FIGURES) == 3
    (run,) = mlflow.runs.values()
    assert run.metrics[0] == ("train/loss", 0.1, 1000, 1) and len(run.metrics) == 6
    monkeypatch.setattr(services, "MOST_METRICS", 5)
    assert service.send(FIGURES) == 2
    monkeypatch.setattr(services, "MOST_METRICS", 1)
    assert service.send(FIGURES) == 1, "one step at least"


@pytest.mark.parametrize(
    ("environ", "experiment"), [({"MLFLOW_EXPERIMENT_NAME": "mine"}, "1"), ({"MLFLOW_EXPERIMENT_ID": "77"}, "77")]
)
def test_mlflows_own_variables_choose_the_experiment(mlflow, tmp_path, environ, experiment):
    connector("mlflow", facts(tmp_path, **environ))()
    (run,) = mlflow.runs.values()
    assert run.experiment == experiment and "demo" not in mlflow.experiments


def test_a_library_that_is_missing_is_named(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(UsageError, match="wandb is not installed"):
        connector("wandb", facts(tmp_path))()


def test_tensorboard_drops_what_is_taken_again(tmp_path):
    """Read as its own server and every notebook read it."""
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    again = [Figures(attempt=2, prefix="train", step=2, wall_ns=9, values={"train/loss": 7.0}, again=True)]
    for figures in (FIGURES, again):  # of two processes: two files
        service = connector("tensorboard", facts(tmp_path))()
        assert service.send(figures) == len(figures)
        service.close("succeeded")
    read = EventAccumulator(str(tmp_path / "tensorboard"))
    read.Reload()
    assert [(each.step, round(each.value, 3)) for each in read.Scalars("train/loss")] == [(1, 0.1), (2, 7.0)]


def spec_of(**given):
    return RunSpec.model_validate({"name": "demo", **given})


def test_tensorboard_is_a_tracker_by_default_where_it_is_installed(monkeypatch):
    found = True
    monkeypatch.setattr("muster.trackers.importlib.util.find_spec", lambda name: found or None)
    loop = {"command": ["train.py"]}
    assert wanted(spec_of()) == ["tensorboard"]
    assert wanted(spec_of(output={"tensorboard": False, "tracker": "mlflow"})) == ["mlflow"]
    assert wanted(spec_of(**loop)) == [] and wanted(spec_of(**loop, output={"tensorboard": True})) == ["tensorboard"]
    found = False
    assert wanted(spec_of()) == [] and wanted(spec_of(output={"tensorboard": True})) == ["tensorboard"]
