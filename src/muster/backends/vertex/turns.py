"""Regions in turn, one active request at a time: what to do next, from what was asked and what is there. Pure.

Vertex takes no name and no request id, so a creation whose answer was lost is looked for by its mark before it is
repeated; where a late answer makes two jobs all the same, the one whose host woke first is the request's owner and
trains, and the other is cancelled here. A region that keeps a request waiting beyond the limit is left: cancel,
wait until the job has ended, then ask the next one. A cancelled job may still succeed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from muster.backends.google.request_log import NOTHING, Request
from muster.backends.vertex.job_state import Cause, CustomJob, cause

LIST_LAG_S = 60.0
"""For this long a new job may be missing in a list: nothing promises that it is there at once."""
LOOK_EVERY_S, LONGEST_LOOK_S = 5.0, 60.0


@dataclass(frozen=True, kw_only=True)
class Create:
    """Ask ``region``."""

    region: str
    again: bool = False
    """The last request there was lost: the same mark again, as a new one would leave its job unfound."""
    nothing: str = ""
    """Why the last region's request brought nothing: to be recorded there."""


@dataclass(frozen=True, kw_only=True)
class Look:
    """Look again after ``after_s``: for a job with the mark, or at the job."""

    after_s: float
    why: str


@dataclass(frozen=True, kw_only=True)
class Cancel:
    """End this job."""

    name: str
    leave: bool
    """The region is left with it, to be recorded; else another job of the same request counts."""


@dataclass(frozen=True, kw_only=True)
class Placed:
    """This job has its machines: nothing to do now."""

    job: CustomJob


@dataclass(frozen=True, kw_only=True)
class Over:
    """The job has ended, and no other region would change that."""

    job: CustomJob


@dataclass(frozen=True, kw_only=True)
class NoRoom:
    """Every region was asked."""

    reasons: tuple[str, ...]


Next = Create | Look | Cancel | Placed | Over | NoRoom


def next_step(
    regions: Sequence[str],
    asked: Sequence[Request],
    jobs: Sequence[CustomJob],
    *,
    max_wait_s: float,
    now_s: float,
) -> Next:
    """What to do now. Called again after each act, with what it changed.

    ``asked``: one for each region so far, in order; ``jobs``: all that are there with the last one's mark.
    """
    if not asked:
        return Create(region=regions[0])
    last = asked[-1]
    if last.state == NOTHING:
        return _elsewhere(regions, asked, last.reason)
    job = _the_one(last, jobs)
    if job is None:
        if now_s - last.asked_s < LIST_LAG_S:
            return Look(after_s=LOOK_EVERY_S, why=f"the answer of {last.where} was lost: looking for a job of it")
        return Create(region=last.where, again=True)
    going = [one for one in jobs if not one.final and one.state != "CANCELLING"]
    # Before one has claimed the run either may be the one that does: cancelling then could end both.
    if last.owner and (others := [one for one in going if one.name != job.name]):
        return Cancel(name=others[0].name, leave=False)
    if job.final:
        return _ended(regions, asked, job, now_s)
    if job.runs:
        return Placed(job=job)
    waited_s = now_s - (last.asked_s if job.created_s is None else min(job.created_s, now_s))
    if not job.waits or waited_s < max_wait_s:
        left_s = max_wait_s - waited_s if job.waits else LOOK_EVERY_S
        return Look(after_s=min(LONGEST_LOOK_S, left_s), why=f"the job's state is {job.state}")
    if going and not last.left:
        return Cancel(name=going[0].name, leave=len(going) == 1)
    return Look(after_s=LOOK_EVERY_S, why="its end was asked for, and it has not ended")


def _the_one(last: Request, jobs: Sequence[CustomJob]) -> CustomJob | None:
    """The job that counts: the owner; else of those that go on the one whose name is known, or the oldest."""

    def rank(job: CustomJob) -> tuple[bool, bool, bool, bool, float, str]:
        is_owner = job.name.rpartition("/")[2] == last.owner
        ending = job.state == "CANCELLING"
        return not is_owner, job.final, ending, job.name != last.name, job.created_s or 0.0, job.name

    return min(jobs, key=rank, default=None)


def _ended(regions: Sequence[str], asked: Sequence[Request], job: CustomJob, now_s: float) -> Next:
    why = cause(job, now_s)
    if why is Cause.NOT_YET_SAID:
        return Look(after_s=LOOK_EVERY_S, why=why.value)
    if why is not None and why.elsewhere:
        return _elsewhere(regions, asked, why.value)
    if job.state == "CANCELLED" and asked[-1].left:
        return _elsewhere(regions, asked, "the region kept the request waiting")
    return Over(job=job)


def _elsewhere(regions: Sequence[str], asked: Sequence[Request], nothing: str) -> Next:
    tried = [one.where for one in asked]
    if left := [region for region in regions if region not in tried]:
        return Create(region=left[0], nothing=nothing)
    return NoRoom(reasons=tuple(f"{one.where}: {one.reason or nothing}" for one in asked))
