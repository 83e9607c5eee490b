"""The job after this one: a run that saved because its time was up goes on."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from muster.backends.slurm.commands import Slurm, name_of
from muster.backends.slurm.script import SCRIPT
from muster.config.spec import RunSpec
from muster.core.errors import MusterError

#: The nth job of a run: handed from one to the next.
PART = "MUSTER_PART"


def go_on(
    spec: RunSpec, run_dir: Path, run_id: str, environ: Mapping[str, str], slurm: Slurm, say: Callable[[str], None]
) -> bool:
    """Hand in the next job, or put this one into the queue again, as the run file says; whether either is under way.

    A job of the run that waits already is taken for the next one: nothing is handed in twice.
    """
    part, job_id = int(environ.get(PART, "1")), environ["SLURM_JOB_ID"]
    if spec.slurm.resubmit == "no" or part >= spec.slurm.max_jobs:
        say(f"saved; slurm.resubmit is {spec.slurm.resubmit}, this was job {part} of {spec.slurm.max_jobs}")
        return False
    if spec.slurm.time_limit is None and spec.limits.max_hours is not None:
        say(f"saved; limits.max_hours ({spec.limits.max_hours:g}) is used up")
        return False
    if spec.slurm.resubmit == "new_job":
        name = environ.get("SLURM_JOB_NAME", name_of(run_id))
        try:
            waiting = [job.id for job in slurm.jobs(run_id) if not job.ended and job.id != job_id]
            if not waiting:
                waiting = [slurm.submit(str(run_dir / SCRIPT), name=name, variables={PART: str(part + 1)})]
            say(f"goes on in job {waiting[-1]}")
            return True
        except MusterError as error:
            say(f"cannot hand in a further job from here ({error}); putting this one into the queue again")
    try:
        slurm.requeue(job_id)
        return True
    except MusterError as error:
        say(f"cannot requeue either: {error}; muster recover {run_id} goes on")
        return False
