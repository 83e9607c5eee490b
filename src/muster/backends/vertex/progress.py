"""How far a submission has come with its regions: the run's request log, and the next step from it.

Each look at the run (``muster status``, ``watch``, ``submit`` again), on any machine, does what is due: the log
is changed by conditional writes before anything is sent, so of two who look at the same time one acts. Nothing waits
here but ``begin``, for a job whose creation was not answered.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass, replace

from muster.backends.google.request_log import NOTHING, Request, RequestLog, RequestLogFile
from muster.backends.vertex.custom_job import NONCE_LABEL, requests
from muster.backends.vertex.job_state import Cause, CustomJob, custom_job
from muster.backends.vertex.jobs_api import Jobs, Lost, QuotaRefused
from muster.backends.vertex.placement import Placement
from muster.backends.vertex.turns import LIST_LAG_S, Cancel, Create, Look, Next, NoRoom, next_step
from muster.core.errors import CapacityError, ConflictError, MusterError
from muster.core.protocols import Clock, Store
from muster.core.typed_json import JsonObject, text


@dataclass(frozen=True, kw_only=True)
class Looked:
    """What was found, and done."""

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
        """The job's own record."""
        name = self.job.name if self.job is not None else None
        return next((row for row in self.records if text(row, "name") == name), {})


@dataclass(frozen=True, kw_only=True)
class Requests:
    """One run's."""

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
