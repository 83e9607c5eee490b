"""Regions in turn, one active request at a time: what to do next, from what was asked and what is there. Pure.

Vertex takes no name and no request id, so a creation whose answer was lost is looked for by its nonce before it is
repeated; where a late answer makes two jobs all the same, the claim in the run's home lets one of them train
(``claim.py``), and the other is cancelled here. A region that keeps a request waiting beyond the limit is left: cancel,
wait until the job has ended, then ask the next one. A cancelled job may still succeed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from muster.backends.vertex.job_state import Cause, CustomJob, cause
from muster.core.typed_json import Name, Record

LIST_LAG_S = 60.0
"""For this long a new job may be missing in a list: nothing promises that it is there at once."""
LOOK_EVERY_S, LONGEST_LOOK_S = 5.0, 60.0


@dataclass(frozen=True, kw_only=True)
class Asked(Record):
    """One region's request, as it is recorded before it is sent."""

    region: Name
    nonce: Name
    at_s: float
    """When it was last sent, seconds since 1970."""
    name: str = ""
    """The job, once known."""
    left: bool = False
    """Its end was asked for, because the region kept it waiting."""
    nothing: str = ""
    """Why it brought nothing: refused for quota or machines (others are errors), or as ``Create`` says later."""


@dataclass(frozen=True, kw_only=True)
class Create:
    """Ask ``region``."""

    region: str
    again: bool = False
    """The last request there was lost: the same nonce again, as a new one would leave its job unfound."""
    nothing: str = ""
    """Why the last region's request brought nothing: to be recorded there."""


@dataclass(frozen=True, kw_only=True)
class Look:
    """Look again after ``after_s``: for a job with the nonce, or at the job."""

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
    asked: Sequence[Asked],
    jobs: Sequence[CustomJob],
    *,
    max_wait_s: float,
    now_s: float,
    counts: str | None = None,
) -> Next:
    """What to do now. Called again after each act, with what it changed.

    ``asked``: one for each region so far, in order; ``jobs``: all that are there with the last one's nonce; ``counts``:
    number of the job that the run's home names for it, None where no host of one has claimed it.
    """
    if not asked:
        return Create(region=regions[0])
    last = asked[-1]
    if last.nothing:
        return _elsewhere(regions, asked, last.nothing)
    job = _the_one(last, jobs, counts)
    if job is None:
        if now_s - last.at_s < LIST_LAG_S:
            return Look(after_s=LOOK_EVERY_S, why=f"the answer of {last.region} was lost: looking for a job of it")
        return Create(region=last.region, again=True)
    going = [one for one in jobs if not one.final and one.state != "CANCELLING"]
    # Before one has claimed the run either may be the one that does: whoever is cancelled then could be both.
    if counts is not None and (others := [one for one in going if one.name != job.name]):
        return Cancel(name=others[0].name, leave=False)
    if job.final:
        return _ended(regions, asked, job, now_s)
    if job.runs:
        return Placed(job=job)
    waited_s = now_s - (last.at_s if job.created_s is None else min(job.created_s, now_s))
    if not job.waits or waited_s < max_wait_s:
        left_s = max_wait_s - waited_s if job.waits else LOOK_EVERY_S
        return Look(after_s=min(LONGEST_LOOK_S, left_s), why=f"the job's state is {job.state}")
    if going and not last.left:
        return Cancel(name=going[0].name, leave=len(going) == 1)
    return Look(after_s=LOOK_EVERY_S, why="its end was asked for, and it has not ended")


def _the_one(last: Asked, jobs: Sequence[CustomJob], counts: str | None) -> CustomJob | None:
    """The job that counts: as the home says; else of those that go on the one whose name is known, or the oldest."""

    def rank(job: CustomJob) -> tuple[bool, bool, bool, bool, float, str]:
        claimed = counts is not None and job.name.rpartition("/")[2] == counts
        ending = job.state == "CANCELLING"
        return not claimed, job.final, ending, job.name != last.name, job.created_s or 0.0, job.name

    return min(jobs, key=rank, default=None)


def _ended(regions: Sequence[str], asked: Sequence[Asked], job: CustomJob, now_s: float) -> Next:
    why = cause(job, now_s)
    if why is Cause.NOT_YET_SAID:
        return Look(after_s=LOOK_EVERY_S, why=why.value)
    if why is not None and why.elsewhere:
        return _elsewhere(regions, asked, why.value)
    if job.state == "CANCELLED" and asked[-1].left:
        return _elsewhere(regions, asked, "the region kept the request waiting")
    return Over(job=job)


def _elsewhere(regions: Sequence[str], asked: Sequence[Asked], nothing: str) -> Next:
    tried = [one.region for one in asked]
    if left := [region for region in regions if region not in tried]:
        return Create(region=left[0], nothing=nothing)
    return NoRoom(reasons=tuple(f"{one.region}: {one.nothing or nothing}" for one in asked))
