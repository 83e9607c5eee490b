"""How far a submission has come with its regions: the run's request log, and the next step from it.

Each look at the run (``muster status``, ``watch``, ``submit`` again), on any machine, does what is due: the log
is changed by conditional writes before anything is sent, so of two looks at the same time one acts. Nothing waits
here but ``begin``, for a job whose creation was not answered.

Regions are asked in order, one active request at a time. Vertex takes no name and no request id, so a creation whose
answer was lost is looked for by its mark before it is repeated; where a late answer makes two jobs all the same, the
one whose host woke first owns the request and trains, and the other is cancelled here.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass, replace

from muster.backends.google.request_log import NOTHING, Request, RequestLog, RequestLogFile
from muster.backends.vertex.custom_job import NONCE_LABEL, requests
from muster.backends.vertex.job_state import Cause, CustomJob, cause, custom_job
from muster.backends.vertex.jobs_api import Jobs, Lost, QuotaRefused
from muster.backends.vertex.placement import Placement
from muster.core.errors import CapacityError, ConflictError, MusterError
from muster.core.protocols import Clock, Store
from muster.core.typed_json import JsonObject, text

LIST_LAG_S = 60.0
"""For this long a new job may be missing in a list: nothing promises that it is there at once."""
LOOK_EVERY_S, LONGEST_LOOK_S = 5.0, 60.0


@dataclass(frozen=True, kw_only=True)
class Looked:
    log: RequestLog | None
    """None: nothing was submitted."""
    next: Next | None
    """None: nothing is to be done any more, or the job's record is gone."""
    records: Sequence[JsonObject] = ()
    """Of the newest request's jobs."""

    @property
    def request(self) -> Request | None:
        """The newest one."""
        return self.log.last if self.log is not None else None

    @property
    def job(self) -> CustomJob | None:
        """The one that counts, where that is known."""
        return getattr(self.next, "job", None) or next(iter(self.jobs), None)

    @property
    def jobs(self) -> list[CustomJob]:
        return [custom_job(row) for row in self.records]

    @property
    def record(self) -> JsonObject:
        name = self.job.name if self.job is not None else None
        return next((row for row in self.records if text(row, "name") == name), {})


@dataclass(frozen=True, kw_only=True)
class Requests:
    jobs: Jobs
    store: Store
    placement: Placement
    clock: Clock

    @property
    def file(self) -> RequestLogFile:
        return RequestLogFile(store=self.store, home=self.placement.home)

    def held(self) -> tuple[RequestLog | None, str | None]:
        """The log and its generation; None: nothing was submitted. Raises as the store, and ConflictError where
        another run lives in the home."""
        log, generation = self.file.read()
        if log is not None and log.run_id != self.placement.run_id:
            raise ConflictError(f"the run {log.run_id} lives in {self.placement.home}", hint="another run_dir")
        return log, generation

    def begin(self, submission: int, sha256: str) -> Looked:
        """Ask the first region, and the next ones as long as they refuse at once; the same submission again asks
        nothing that was asked.

        Raises:
            CapacityError: every region refused.
            ConflictError: another submit is in progress, or an older submission's job still goes on.
            AccessError, BackendError: Google's refusal; nothing was created by this submission.
        """
        log, _ = self.held()
        if log is None or log.submission < submission:
            if log is not None and (going := [job for job in self.all_jobs(log) if not job.final]):
                raise ConflictError(
                    f"custom job {going[0].name.rpartition('/')[2]} of an older submission still goes on",
                    hint=f"muster down {self.placement.run_id}",
                )
            self.file.begin(self.placement.run_id, submission, sha256)
        while True:
            looked = self.look()
            last = looked.request
            if isinstance(looked.next, NoRoom):
                raise CapacityError(
                    f"no region has room: {'; '.join(looked.next.reasons)}",
                    hint="ask for quota, or add regions to resources.locations",
                )
            if isinstance(looked.next, Look) and last is not None and not last.name and not looked.records:
                self.clock.sleep(looked.next.after_s)
            elif not isinstance(looked.next, Create | Cancel) or (last is not None and last.is_sent):
                return looked

    def look(self) -> Looked:
        """Look at everything, and do what is due, one step.

        Raises:
            AccessError, BackendError: Google's refusal.
            ConflictError: another command acts at the same time.
        """
        log, generation = self.held()
        if log is None:
            return Looked(log=None, next=None)
        last = log.last
        records = self._records(last, log.mark) if last is not None else []
        looked = Looked(log=log, next=None, records=records)
        if log.closed or (last is not None and last.name and not records):
            return looked
        found = next_step(
            self.placement.regions, log.requests, looked.jobs, max_wait_s=self.placement.max_wait_s,
            now_s=self.clock.wall_ns() / 1e9,
        )  # fmt: skip
        if isinstance(found, Create):
            log = self._create(found, log, generation)
        elif isinstance(found, Cancel):
            if found.leave and last is not None:
                log = log.with_request(replace(last, left=True))
                self.file.write(log, generation)
            self.jobs.cancel(found.name)
        return replace(looked, log=log, next=found)

    def end(self) -> RequestLog | None:
        """Nothing is asked any more, and no host that wakes from now on trains. Raises as ``held``."""
        log, _ = self.held()
        return self.file.close() if log is not None else None

    def wait_for_the_list(self, asked: Request) -> None:
        """Until a job whose creation was not answered is in the list, if there is one."""
        left_s = asked.asked_s + LIST_LAG_S - self.clock.wall_ns() / 1e9
        if left_s > 0:
            self.clock.sleep(left_s)

    def all_jobs(self, log: RequestLog | None) -> list[CustomJob]:
        """Every job of the run, whichever request made it: by its label, and by its name where a list lags."""
        asked = log.requests if log is not None else ()
        regions = dict.fromkeys([*self.placement.regions, *(one.where for one in asked)])
        rows = [row for region in regions for row in self.jobs.of_run(region, self.placement.run_id)]
        there = {text(row, "name") for row in rows}
        late = [self.jobs.get(one.name) for one in asked if one.name and one.name not in there]
        return [custom_job(row) for row in (*rows, *late) if row]

    def _create(self, found: Create, before: RequestLog, generation: str | None) -> RequestLog:
        """Write the intent, then send the request."""
        log, last, now_s = before, before.last, self.clock.wall_ns() / 1e9
        if found.nothing and last is not None:
            log = log.with_request(replace(last, state=NOTHING, reason=found.nothing))
        if found.again and last is not None:
            request = replace(last, asked_s=now_s)
        else:
            request = Request(number=log.next_number, where=found.region, asked_s=now_s)
        log = log.with_request(request)
        generation = self.file.write(log, generation)
        bodies = requests(self.placement, submission=log.submission, turn=request.number, sha256=log.files_sha256)
        try:
            row = self.jobs.create(next(one for one in bodies if one.region == found.region))
            request = replace(request, name=text(row, "name"))
        except QuotaRefused:
            request = replace(request, state=NOTHING, reason=Cause.QUOTA.value)
        except Lost:
            return log
        except MusterError:
            self.file.write(before, generation)
            raise
        log = log.with_request(request)
        with contextlib.suppress(ConflictError):  # another process has looked meanwhile, and found it by its mark
            self.file.write(log, generation)
        return log

    def _records(self, asked: Request, mark: str) -> list[JsonObject]:
        rows = self.jobs.labelled(asked.where, NONCE_LABEL, mark)
        if asked.name and asked.name not in {text(row, "name") for row in rows}:
            rows += [row] if (row := self.jobs.get(asked.name)) is not None else []
        return rows


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
