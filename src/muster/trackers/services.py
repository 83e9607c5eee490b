"""The trackers themselves. Each is imported where it is opened: in a thread that may wait for it."""

from __future__ import annotations

import contextlib
import getpass
import importlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from muster.core.errors import UsageError
from muster.core.typed_json import Json, JsonObject
from muster.trackers.delivery import Figures, Service

#: Most metrics of one request to MLflow (its REST API: ``runs/log-batch``), and most parameters of one.
MOST_METRICS, MOST_PARAMS = 1000, 100
#: A parameter's longest value (MLflow's ``MAX_PARAM_VAL_LENGTH``).
MOST_PARAM_CHARACTERS = 6000
#: The tag by which a run of ours finds its run in MLflow again.
RUN_TAG = "muster.run_id"
#: MLflow's own names. A run that was preempted is continued by a later attempt, which sets RUNNING again.
_MLFLOW_STATUS = {"succeeded": "FINISHED", "failed": "FAILED", "stopped": "KILLED", "preempted": "KILLED"}
#: W&B's client sends 255 for a run that Ctrl-C has ended (``wandb/sdk/lib/exit_hooks.py``).
_WANDB_CODE = {"succeeded": 0, "failed": 1, "stopped": 255, "preempted": 255}


@dataclass(frozen=True, kw_only=True)
class RunFacts:
    """What a tracker gets to know of the run."""

    run_id: str
    name: str
    run_dir: Path
    config: JsonObject
    environ: Mapping[str, str]
    """Trackers' own variables go before the run file's ``name``: ``WANDB_PROJECT`` and the like."""


def _import(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        raise UsageError(f"{error.name} is not installed", hint=f"pip install {name.partition('.')[0]}") from error


class TensorBoard:
    """Event files in ``tensorboard/`` of the run's folder."""

    buffer_s = 0.0

    def __init__(self, facts: RunFacts) -> None:
        # torch's SummaryWriter writes by the same class; without torch this process is small.
        writer = _import("tensorboard.summary.writer.event_file_writer")
        self._protos = _import("tensorboard.compat.proto.event_pb2"), _import("tensorboard.compat.proto.summary_pb2")
        self._writer = writer.EventFileWriter(str(facts.run_dir / "tensorboard"))

    def send(self, figures: Sequence[Figures]) -> int:
        event_pb2, summary_pb2 = self._protos
        for each in figures:
            if each.again:  # readers drop what is from this step on (what SummaryWriter's ``purge_step`` writes)
                start = event_pb2.SessionLog(status=event_pb2.SessionLog.START)
                self._add(event_pb2.Event(step=each.step, session_log=start), each)
            values = [summary_pb2.Summary.Value(tag=tag, simple_value=value) for tag, value in each.values.items()]
            self._add(event_pb2.Event(step=each.step, summary=summary_pb2.Summary(value=values)), each)
        self._writer.flush()  # raises what its thread could not write
        return len(figures)

    def _add(self, event: Any, figures: Figures) -> None:
        event.wall_time = figures.wall_ns / 1e9
        self._writer.add_event(event)

    def close(self, outcome: str) -> None:
        self._writer.close()


class MLflow:
    """One run of theirs for the whole run: found again by a tag."""

    buffer_s = 0.0

    def __init__(self, facts: RunFacts) -> None:
        self._entities = _import("mlflow.entities")
        self._client = _import("mlflow").MlflowClient()
        experiment = facts.environ.get("MLFLOW_EXPERIMENT_ID") or self._experiment(facts)
        found = self._client.search_runs([experiment], f"tags.`{RUN_TAG}` = '{facts.run_id}'", max_results=1)
        if found:
            self._run = found[0].info.run_id
            self._client.update_run(self._run, status="RUNNING")
            return
        # The fluent API would add the git commit of Muster's own source as the run's.
        tags = {RUN_TAG: facts.run_id, "mlflow.source.name": "muster"}
        with contextlib.suppress(KeyError, OSError):  # a container's user without a name
            tags["mlflow.user"] = getpass.getuser()
        self._run = self._client.create_run(experiment, run_name=facts.run_id, tags=tags).info.run_id
        params = [self._entities.Param(key, value[:MOST_PARAM_CHARACTERS]) for key, value in _flat("", facts.config)]
        for first in range(0, len(params), MOST_PARAMS):
            self._client.log_batch(self._run, params=params[first : first + MOST_PARAMS])

    def _experiment(self, facts: RunFacts) -> str:
        name = facts.environ.get("MLFLOW_EXPERIMENT_NAME") or facts.name
        found = self._client.get_experiment_by_name(name)
        return str(found.experiment_id if found is not None else self._client.create_experiment(name))

    def send(self, figures: Sequence[Figures]) -> int:
        metrics: list[Any] = []
        count = 0
        for each in figures:
            if count and len(metrics) + len(each.values) > MOST_METRICS:
                break
            count += 1
            metrics += [
                self._entities.Metric(key, value, each.wall_ns // 1_000_000, each.step)
                for key, value in each.values.items()
            ]
        self._client.log_batch(self._run, metrics=metrics)
        return count

    def close(self, outcome: str) -> None:
        self._client.set_terminated(self._run, _MLFLOW_STATUS[outcome])


class WandB:
    """W&B, and trackio, whose calls are the same."""

    buffer_s = 5.0  # trackio writes every 0.5 s; W&B's client hands over to a process of its own

    def __init__(self, name: str, facts: RunFacts) -> None:
        self._name, self._module = name, _import(name)
        project = facts.environ.get(f"{name.upper()}_PROJECT") or facts.name
        own = {"id": facts.run_id, "dir": str(facts.run_dir)} if name == "wandb" else {}
        self._module.init(project=project, name=facts.run_id, config=dict(facts.config), resume="allow", **own)

    def send(self, figures: Sequence[Figures]) -> int:
        self._module.log(dict(figures[0].values), step=figures[0].step)
        return 1

    def close(self, outcome: str) -> None:
        own = {"exit_code": _WANDB_CODE[outcome]} if self._name == "wandb" else {}
        self._module.finish(**own)


def connector(name: str, facts: RunFacts) -> Callable[[], Service]:
    """What opens the tracker of this name."""
    match name:
        case "tensorboard":
            return lambda: TensorBoard(facts)
        case "mlflow":
            return lambda: MLflow(facts)
    return lambda: WandB(name, facts)


def _flat(key: str, value: Json) -> list[tuple[str, str]]:
    """``training.steps`` -> ``400`` for every value of a run file that is set."""
    if isinstance(value, Mapping):
        return [pair for name, item in value.items() for pair in _flat(f"{key}.{name}" if key else name, item)]
    return [] if value is None else [(key, str(value))]
