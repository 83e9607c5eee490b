"""A small job beside no run: sent, waited for, and its end seen to."""

from __future__ import annotations

import contextlib
import secrets
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from muster.backends.site import Wait
from muster.backends.slurm import reason_text
from muster.backends.slurm.commands import Job, Slurm, name_of
from muster.backends.slurm.script import SCRIPT, around
from muster.backends.slurm.trial_node import SPEC
from muster.config.spec import RunSpec
from muster.core.errors import MusterError, UsageError
from muster.storage import run_registry

STARTS_WITHIN_S, ENDS_WITHIN_S = 1800.0, 120.0
Body = Callable[[Path], Sequence[str]]
"""What the script becomes, for the job's folder."""


@dataclass
class SmallJob:
    """One, with a folder where runs have theirs."""

    slurm: Slurm
    name: str
    folder: Path
    id: str = ""
    last: Job | None = None
    """As it was seen last."""
    nodes: tuple[str, ...] = ()

    def look(self) -> Job | None:
        """None: Slurm has forgotten it."""
        found = self.slurm.jobs(self.name)
        self.last = found[-1] if found else None
        if self.last is not None and self.last.nodes and not self.nodes:
            self.nodes = tuple(self.slurm.hostnames(self.last.nodes))
        return self.last

    def started(self) -> bool:
        job = self.look()
        if job is None or job.ended:
            raise MusterError(f"job {self.id} ended as {job.state if job else 'nothing'} before it could be used")
        return job.state == "RUNNING"

    def ended(self) -> bool:
        job = self.look()
        return job is None or job.ended

    def why(self) -> str:
        """Why it waits, or what it does."""
        if self.last is None:
            return f"job {self.id} is unknown"
        if self.last.state == "PENDING":
            return f"job {self.id} waits: {reason_text.waits(self.last.reason)}"
        return f"job {self.id} is {self.last.state}"


@dataclass
class SmallJobs:
    """Those of one acceptance."""

    slurm: Slurm
    names: list[str] = field(default_factory=list)

    @contextmanager
    def folder(self, spec: RunSpec) -> Iterator[SmallJob]:
        """One's folder, beside those of runs; removed in the end.

        Raises:
            UsageError: it cannot be made.
        """
        name = f"accept-{secrets.token_hex(4)}"
        folder = run_registry.place(name, spec.run_dir).parent / f".{name}"
        try:
            run_registry.make_folder(folder / "logs")
            run_registry.replace_text(folder / SPEC, spec.model_dump_json())
        except OSError as error:
            raise UsageError(f"{folder.parent} cannot be written: {error.strerror}", hint="run_dir") from error
        try:
            yield SmallJob(slurm=self.slurm, name=name, folder=folder)
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    @contextmanager
    def sent(self, job: SmallJob, spec: RunSpec, body: Body, wait: Wait) -> Iterator[None]:
        """Submitted; in the end it is cancelled and waited for.

        Raises:
            MusterError: Slurm refuses.
        """
        path = job.folder / SCRIPT
        run_registry.replace_text(path, around(body(job.folder), spec, run_id=job.name, run_dir=str(job.folder)))
        self.names.append(job.name)
        try:
            job.id = self.slurm.submit(str(path), name=name_of(job.name))
            yield
        finally:
            self._end(job.name, wait)

    def _end(self, name: str, wait: Wait) -> None:
        """By its name: a submission's answer may have been lost. What does not end is among ``left``."""
        with contextlib.suppress(MusterError):
            living = [job for job in self.slurm.jobs(name) if not job.ended]
            for job in living:
                self.slurm.cancel(job.id)
            if living:
                wait(lambda: not self._living(name), "end of the small job", ENDS_WITHIN_S)

    def _living(self, name: str) -> list[Job]:
        return [job for job in self.slurm.jobs(name) if not job.ended and job.state != "COMPLETING"]

    def left(self) -> list[str]:
        """Those that have not ended, which are asked to once more."""
        found = [job for name in self.names for job in self._living(name)]
        for job in found:
            self.slurm.cancel(job.id)
        return [f"job {job.id} ({job.state})" for name in self.names for job in self._living(name)]
