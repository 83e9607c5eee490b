"""What the programs of a run's job share: the run, its result, and the job after this one."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from muster.backends.host.place import Place
from muster.backends.slurm.commands import Slurm, name_of
from muster.backends.slurm.script import SCRIPT
from muster.config.spec import RunSpec
from muster.core.errors import MusterError
from muster.storage import run_output
from muster.storage.run_output import Verdict

PART = "MUSTER_PART"
"""The number of this job of the run: passed from one to the next."""
TIME_LIMIT = "Slurm's time limit"
CONTROLLERS = "controllers.json"
"""Where the controllers listen, for nodes that need to know whether they are cut off."""


@dataclass(kw_only=True)
class JobPlace(Place):
    run_dir: Path
    run_id: str
    environ: Mapping[str, str]
    spec: RunSpec
    began_wall_ns: int
    """When the job's batch program began: an earlier result is an older job's."""
    slurm: Slurm = field(default_factory=Slurm)

    @property
    def job_id(self) -> str:
        return self.environ["SLURM_JOB_ID"]

    def verdict(self) -> Verdict | None:
        """The run's result, if it has ended in this job."""
        return run_output.verdict(self.run_dir, since_wall_ns=self.began_wall_ns)

    def resubmit(self) -> str | None:
        """Submit the next job of a run that saved because of its time limit, or requeue this one, as the run file says;
        the job that goes on, None where there is none.

        A waiting job of the run counts as the next one: nothing is submitted twice.
        """
        slurm, part = self.spec.slurm, int(self.environ.get(PART, "1"))
        if slurm.resubmit == "no" or part >= slurm.max_jobs:
            log(f"saved; slurm.resubmit is {slurm.resubmit}, this was job {part} of {slurm.max_jobs}")
            return None
        if slurm.time_limit is None and self.spec.limits.max_hours is not None:
            log(f"saved; limits.max_hours ({self.spec.limits.max_hours:g}) is used up")
            return None
        if slurm.resubmit == "new_job":
            try:
                log(f"continues in job {(job := self._next_job(part + 1))}")
                return job
            except MusterError as error:
                log(f"cannot submit a further job from here ({error}); requeueing this one")
        try:
            self.slurm.requeue(self.job_id)
            return self.job_id
        except MusterError as error:
            log(f"cannot requeue either: {error}; `muster recover {self.run_id}` continues the run")
            return None

    def _next_job(self, part: int) -> str:
        waiting = [job.id for job in self.slurm.jobs(self.run_id) if not job.ended and job.id != self.job_id]
        if waiting:
            return waiting[-1]
        name = self.environ.get("SLURM_JOB_NAME", name_of(self.run_id))
        return self.slurm.submit(str(self.run_dir / SCRIPT), name=name, variables={PART: str(part)})


def log(text: str) -> None:
    """A line of the program's own log, which is the only one with a time."""
    print(f"{time.strftime('%Y-%m-%dT%H:%M:%SZ', time.gmtime())} muster: {text}", flush=True)
