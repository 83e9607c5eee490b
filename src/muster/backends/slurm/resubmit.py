"""The job after this one: a run that saved because of its time limit continues."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from muster.backends.slurm.commands import Slurm, name_of
from muster.backends.slurm.script import SCRIPT
from muster.config.spec import RunSpec
from muster.core.errors import MusterError

#: The number of this job of the run: passed from one to the next.
PART = "MUSTER_PART"


def resubmit(
    spec: RunSpec, run_dir: Path, run_id: str, environ: Mapping[str, str], slurm: Slurm, log: Callable[[str], None]
) -> bool:
    """Submit the next job, or requeue this one, as the run file says; False where neither was done.

    A waiting job of the run counts as the next one: nothing is submitted twice.
    """
    part, job_id = int(environ.get(PART, "1")), environ["SLURM_JOB_ID"]
    if spec.slurm.resubmit == "no" or part >= spec.slurm.max_jobs:
        log(f"saved; slurm.resubmit is {spec.slurm.resubmit}, this was job {part} of {spec.slurm.max_jobs}")
        return False
    if spec.slurm.time_limit is None and spec.limits.max_hours is not None:
        log(f"saved; limits.max_hours ({spec.limits.max_hours:g}) is used up")
        return False
    if spec.slurm.resubmit == "new_job":
        name = environ.get("SLURM_JOB_NAME", name_of(run_id))
        try:
            waiting = [job.id for job in slurm.jobs(run_id) if not job.ended and job.id != job_id]
            if not waiting:
                waiting = [slurm.submit(str(run_dir / SCRIPT), name=name, variables={PART: str(part + 1)})]
            log(f"continues in job {waiting[-1]}")
            return True
        except MusterError as error:
            log(f"cannot submit a further job from here ({error}); requeueing this one")
    try:
        slurm.requeue(job_id)
        return True
    except MusterError as error:
        log(f"cannot requeue either: {error}; `muster recover {run_id}` continues the run")
        return False
