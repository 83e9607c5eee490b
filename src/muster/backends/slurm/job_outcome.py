"""The run's state in one sentence, from what Slurm and the run's own log report. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from muster.backends.slurm import parse, reason_text
from muster.backends.slurm.commands import Job
from muster.core.types import JobState, JobStatus
from muster.storage.job_record import JobRecord
from muster.storage.run_output import Verdict

_WAITING = ("PENDING", "REQUEUED", "REQUEUE_HOLD", "REQUEUE_FED", "SPECIAL_EXIT", "CONFIGURING", "RESV_DEL_HOLD")
#: The accounting learns of a job's end late (a busy slurmdbd, or one that was down), and of some never. A run writes
#: its logs every few seconds, so one that has been quiet for longer has ended, even if the accounting has it running.
ACCOUNTING_LAGS_S = 600.0


@dataclass(frozen=True, kw_only=True)
class SlurmJob(JobRecord):
    """What the run's folder says of its job."""

    state: Literal["submitting", "submitted", "cancelled"] = "submitting"
    job_id: str | None = None


def judge(
    record: SlurmJob | None,
    jobs: Sequence[Job],
    verdict: Verdict | None,
    accounted: Mapping[str, str] | None,
    *,
    run_dir: Path,
    is_locked: bool = False,
    quiet_s: float = 0.0,
) -> JobStatus:
    """``jobs``: this submission's, oldest first; ``accounted``: the last one's row in the accounting, if any;
    ``is_locked``: a submit is in progress; ``quiet_s``: since something was last written in the run's folder."""
    living = [job for job in jobs if not job.ended]
    if record is None and not jobs:
        return JobStatus(state=JobState.ABSENT, reason="Slurm has no job of this run")
    if record is not None and record.state == "cancelled" and (verdict is None or _preempted(verdict)):
        ending = f", job {living[-1].id} is ending" if living else ""
        return JobStatus(state=JobState.STOPPED, reason=f"cancelled{ending}", tasks=_tasks(living))
    if verdict is not None and _preempted(verdict) and jobs:
        return _saved(verdict, jobs, run_dir)
    if verdict is not None and not (_preempted(verdict) and _cancelled(accounted)):
        return JobStatus(
            state=JobState(verdict.outcome), reason=verdict.reason, exit_code=verdict.exit_code,
            tasks={"job": f"ending ({living[-1].id})"} if living else {},
        )  # fmt: skip
    if living:
        return _living(living[-1], len(jobs))
    if jobs:
        return _ended(jobs[-1].state, jobs[-1].id, run_dir)
    if accounted and (state := _accounted_state(accounted)):
        return _accounted(state, accounted.get("JobID", ""), run_dir, quiet_s)
    if record is not None and record.job_id is None:
        if is_locked:
            return JobStatus(state=JobState.WAITING, reason="being submitted")
        return JobStatus(state=JobState.FAILED, reason="its submission was interrupted, and Slurm has no job of it")
    job_id = record.job_id if record else ""
    log = f"{run_dir}/logs/slurm-{job_id}.log"
    return JobStatus(
        state=JobState.FAILED, reason=f"Slurm no longer knows job {job_id}, and it recorded no result; its log is {log}"
    )


def _living(job: Job, nth: int) -> JobStatus:
    again = f", the {nth}th of this run" if nth > 3 else ("", "", ", the 2nd of this run", ", the 3rd of this run")[nth]
    if job.state in _WAITING:
        sentence = reason_text.waits(job.reason)
        reason = f"job {job.id}{again} waits: {sentence}"
        return JobStatus(state=JobState.WAITING, reason=reason, tasks={"job": f"waits ({job.id})"})
    if job.state == "COMPLETING":
        return JobStatus(state=JobState.RUNNING, reason=f"job {job.id}{again} is ending", tasks=_tasks([job]))
    held = "" if job.state == "RUNNING" else f" ({job.state.lower()})"
    nodes = f"{job.count} node{'s' if job.count != 1 else ''} ({job.nodes})"
    return JobStatus(state=JobState.RUNNING, reason=f"job {job.id}{again} has {nodes}{held}", tasks=_tasks([job]))


def _ended(state: str, job_id: str, run_dir: Path) -> JobStatus:
    job_state = reason_text.STATES.get(state, JobState.FAILED)
    if state == "COMPLETED":
        job_state = JobState.FAILED  # a run that is done records it itself
    text = reason_text.ENDINGS.get(state, f"the job ended as {state}")
    reason = f"{text} (job {job_id}; {run_dir}/logs/slurm-{job_id}.log)"
    own = job_state is JobState.FAILED and state not in reason_text.MACHINES_DOING
    return JobStatus(state=job_state, reason=reason, exit_code=1 if own else None)


def _accounted(state: str, job_id: str, run_dir: Path, quiet_s: float) -> JobStatus:
    """Of a job that the queue no longer shows. A state that is not final is believed for a while only."""
    if state in parse.ENDED:
        return _ended(state, job_id, run_dir)
    if quiet_s <= ACCOUNTING_LAGS_S:
        job_state = JobState.WAITING if state in _WAITING else JobState.RUNNING
        known = f"the queue no longer shows job {job_id}, the accounting has it as {state.lower()}"
        return JobStatus(state=job_state, reason=f"{known}; last written {quiet_s:.0f} s ago")
    text = f"the queue no longer shows job {job_id}, and nothing was written for {quiet_s / 60:.0f} minutes"
    hint = f"the accounting still has it as {state.lower()} (sacctmgr show runawayjobs)"
    return JobStatus(state=JobState.FAILED, reason=f"{text}; {hint}; its log is {run_dir}/logs/slurm-{job_id}.log")


def _tasks(living: Sequence[Job]) -> dict[str, str]:
    """The lease tells where the supervisor is; from here only the state of its job is known."""
    running = [job for job in living if job.state not in _WAITING and job.state != "COMPLETING"]
    return {"supervisor": f"running (job {running[-1].id})"} if running else {}


def _saved(verdict: Verdict, jobs: Sequence[Job], run_dir: Path) -> JobStatus:
    """Of a run that saved because Slurm was about to end its job: on notice, or at SIGTERM, which comes with
    ``scancel`` too, so that only the job's own end says whether a person meant it."""
    last = jobs[-1]
    begun_since = (last.start_s or 0) * 1_000_000_000 > verdict.wall_ns
    if not last.ended:
        if last.state in _WAITING or begun_since:
            return _living(last, len(jobs))
        # Its batch program may be submitting the next job just now: a second submission would make two.
        reason = f"{verdict.reason}; job {last.id} is ending"
        return JobStatus(state=JobState.RUNNING, reason=reason, tasks={"job": f"ending ({last.id})"})
    if begun_since or reason_text.STATES.get(last.state) is JobState.STOPPED:
        return _ended(last.state, last.id, run_dir)
    return JobStatus(state=JobState(verdict.outcome), reason=verdict.reason, exit_code=verdict.exit_code)


def _cancelled(accounted: Mapping[str, str] | None) -> bool:
    return reason_text.STATES.get(_accounted_state(accounted)) is JobState.STOPPED


def _accounted_state(accounted: Mapping[str, str] | None) -> str:
    """Its first word: ``CANCELLED by 1000``. Empty where the accounting does not know the job."""
    return (accounted or {}).get("State", "").partition(" ")[0]


def _preempted(verdict: Verdict) -> bool:
    return verdict.outcome == "preempted"
