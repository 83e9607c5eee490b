"""The back ends of the launcher contract: how each is set up, looked at from outside, and made to fail."""

from __future__ import annotations

import dataclasses
import shlex
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from fakes.slurm import FakeSlurm

from muster.backends.local.launcher import LocalLauncher
from muster.backends.slurm.commands import Slurm
from muster.backends.slurm.launcher import SlurmLauncher
from muster.backends.slurm.script import SCRIPT
from muster.config.spec import RunSpec
from muster.core import processes
from muster.core.errors import AccessError, BackendError, CapacityError, MusterError, UsageError
from muster.core.types import JobHandle, JobRequest, TaskSpec
from muster.storage import run_registry

SLEEP = (sys.executable, "-c", "import time; time.sleep(60)")
#: What sbatch says before the reason.
FAILED = "sbatch: error: Batch job submission failed: "


class LocalCase:
    """This machine: processes, counted by their label."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.launcher = LocalLauncher(grace_s=0.3)

    def living(self, run_id: str) -> list[int]:
        return [process.pid for process in processes.labelled(run_id)]

    def refusals(self) -> Iterator[tuple[type[MusterError], JobRequest]]:
        """What the back end refuses, arranged one after the other, and as which error."""
        yield BackendError, self.request(("/no/such/program",))

    def submit_without_answer(self, request: JobRequest) -> None:
        """The submission is carried out, and whoever asked for it never hears so."""
        self.launcher.submit(request)
        self.lose_record(request)

    def lose_record(self, request: JobRequest) -> None:
        (Path(request.run_dir) / "job.json").unlink()

    def spec(self, name: str = "contract", hosts: int = 1) -> RunSpec:
        return RunSpec.model_validate({"name": name, "command": ["true"], "resources": {"hosts": hosts}})

    def request(self, *argvs: tuple[str, ...], name: str = "contract") -> JobRequest:
        run_id = run_registry.new_run_id(name)
        rendered = self.launcher.render(self.spec(name), run_id=run_id, run_dir=str(self.folder / run_id))
        tasks = tuple(TaskSpec(name=f"task{index}", argv=argv) for index, argv in enumerate(argvs or (SLEEP,)))
        return dataclasses.replace(rendered, tasks=tasks)


def local_case(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[LocalCase]:
    """For a fixture: this machine, with nothing left of its jobs afterwards."""
    monkeypatch.setenv("MUSTER_HOME", str(tmp_path / "home"))
    found = LocalCase(tmp_path)
    yield found
    for folder in tmp_path.iterdir():
        found.launcher.cancel(JobHandle(run_id=folder.name, backend="local", job_id="", run_dir=str(folder)))


class SlurmCase:
    """Slurm's commands in memory; jobs run here. The real one has a live suite of its own."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.shell = folder, FakeSlurm()
        self.launcher = SlurmLauncher(slurm=Slurm(shell=self.shell))

    def living(self, run_id: str) -> list[int]:
        return [process.pid for process in processes.labelled(run_id)]

    def refusals(self) -> Iterator[tuple[type[MusterError], JobRequest]]:
        for kind, said in (
            (AccessError, FAILED + "Invalid account or account/partition combination"),
            (AccessError, FAILED + "User's group not permitted to use this partition"),
            (CapacityError, FAILED + "Requested node configuration is not available"),
            (CapacityError, f"sbatch: error: QOSMaxNodes\n{FAILED}Job violates accounting/QOS policy (submit limit)"),
            (UsageError, "sbatch: error: invalid partition specified: nope"),
            (UsageError, "sbatch: unrecognized option '--nope'"),
            (BackendError, FAILED + "Unable to contact slurm controller"),
            (BackendError, "sbatch: error: something that nobody has seen before"),
        ):  # fmt: skip
            self.shell.trouble["sbatch"] = (False, said)
            yield kind, self.request()

    def submit_without_answer(self, request: JobRequest) -> None:
        said = FAILED + "Socket timed out on send/recv operation"
        self.shell.trouble["sbatch"] = (True, said)
        self.launcher.submit(request)
        self.lose_record(request)

    def lose_record(self, request: JobRequest) -> None:
        (Path(request.run_dir) / "job.json").unlink()

    def spec(self, name: str = "contract", hosts: int = 1) -> RunSpec:
        resources = {"hosts": hosts, "device": "cpu"}
        return RunSpec.model_validate({"name": name, "backend": "slurm", "command": ["true"], "resources": resources})

    def request(self, *argvs: tuple[str, ...], name: str = "contract") -> JobRequest:
        run_id = run_registry.new_run_id(name)
        rendered = self.launcher.render(self.spec(name), run_id=run_id, run_dir=str(self.folder / run_id))
        lines = [f"export MUSTER_RUN_ID={run_id}", *(f"{shlex.join(argv)} &" for argv in argvs or (SLEEP,)), "wait"]
        return dataclasses.replace(rendered, files={SCRIPT: "\n".join(["#!/bin/bash", *lines, ""])})


Case = LocalCase | SlurmCase
CASES: dict[str, Callable[[Path], Case]] = {"local": LocalCase, "slurm": SlurmCase}
