"""Trackers: TensorBoard if it is installed, and one tracking service. Imported lazily, on rank 0 only."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from muster.config.spec import RunSpec
from muster.core.errors import UsageError
from muster.core.typed_json import JsonObject


class Tracker(Protocol):
    """Records scalars."""

    name: str
    """What messages call it."""

    def log(self, values: Mapping[str, float], *, step: int) -> None:
        """Record one step's scalars."""
        ...

    def close(self) -> None:
        """Flush."""
        ...


class TensorBoard:
    """Event files under the run's ``tensorboard`` folder, created with the first numbers: the disk may be full."""

    name = "TensorBoard"

    def __init__(self, directory: Path) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._make: Callable[[], Any] = lambda: SummaryWriter(str(directory))
        self._writer: Any = None

    def log(self, values: Mapping[str, float], *, step: int) -> None:
        if self._writer is None:
            self._writer = self._make()
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()


class Service:
    """W&B, MLflow or trackio: three modules with similar calls."""

    def __init__(self, name: str, *, run_id: str, project: str, directory: Path, config: JsonObject) -> None:
        self.name = name
        try:
            self._module: Any = importlib.import_module(name)
        except ImportError as error:
            problem = f"output.tracker is {name}, but {name} is not installed"
            raise UsageError(problem, hint=f"pip install {name}") from error
        if name == "mlflow":
            self._module.set_experiment(project)
            self._module.start_run(run_name=run_id)
            return
        extra = {"id": run_id, "resume": "allow", "dir": str(directory)} if name == "wandb" else {}
        self._module.init(project=project, name=run_id, config=dict(config), **extra)

    def log(self, values: Mapping[str, float], *, step: int) -> None:
        if self.name == "mlflow":
            self._module.log_metrics(dict(values), step=step)
        else:
            self._module.log(dict(values), step=step)

    def close(self) -> None:
        if self.name == "mlflow":
            self._module.end_run()
        else:
            self._module.finish()


@dataclass
class Trackers:
    """All trackers of a run; the failure of one (a full disk, an unreachable service) does not end the training.

    A failed tracker gets no more numbers, and ``report`` gets the reason once. TensorBoard raises from its writer's
    thread, at some later call.
    """

    working: list[Tracker] = field(default_factory=list)
    report: Callable[[str], None] = print

    def log(self, values: Mapping[str, float], *, step: int) -> None:
        self._each(lambda tracker: tracker.log(values, step=step))

    def close(self) -> None:
        self._each(lambda tracker: tracker.close())

    def _each(self, call: Callable[[Tracker], None]) -> None:
        for tracker in list(self.working):
            try:
                call(tracker)
            except Exception as error:  # noqa: BLE001 (third-party code that training does not depend on)
                self.working.remove(tracker)
                self.report(f"{tracker.name} failed and gets no more numbers: {error or type(error).__name__}")


def open_trackers(spec: RunSpec, *, run_id: str, run_dir: Path) -> list[Tracker]:
    """The trackers that the run file requests.

    Raises:
        UsageError: one of them is not installed.
    """
    trackers: list[Tracker] = []
    installed = importlib.util.find_spec("tensorboard") is not None
    if spec.output.tensorboard and not installed:
        raise UsageError("output.tensorboard is true, but tensorboard is not installed", hint="pip install tensorboard")
    if spec.output.tensorboard is not False and installed:
        trackers.append(TensorBoard(run_dir / "tensorboard"))
    if spec.output.tracker != "none":
        config = spec.model_dump(mode="json")
        trackers.append(
            Service(spec.output.tracker, run_id=run_id, project=spec.name, directory=run_dir, config=config)
        )
    return trackers
