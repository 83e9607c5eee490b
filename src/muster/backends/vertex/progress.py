"""How far a submission has come with its regions: one record in the run's home, and the next step from it.

Whoever looks at the run (``muster status``, ``watch``, ``submit`` again), on any machine, does what is due: the record
is changed by conditional writes before anything is sent, so of two who look at the same time one acts. Nothing waits
here but ``begin``, for a job whose creation was not answered.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass, replace

from muster.backends.vertex import claim
from muster.backends.vertex.claim import Claim
from muster.backends.vertex.custom_job import NONCE_LABEL, requests
from muster.backends.vertex.job_state import Cause, CustomJob, custom_job
from muster.backends.vertex.jobs_api import Jobs, Lost, QuotaRefused
from muster.backends.vertex.placement import Placement, nonce
from muster.backends.vertex.turns import LIST_LAG_S, Asked, Cancel, Create, Look, Next, NoRoom, next_step
from muster.core.errors import CapacityError, ConflictError, MusterError
from muster.core.protocols import Clock, Store
from muster.core.typed_json import Count, JsonObject, Record, decode, encode, text
from muster.storage import uris

FILE = "vertex-requests.json"


@dataclass(frozen=True, kw_only=True)
class Progress(Record):
    """Of the newest submission."""

    run_id: str = ""
    submission: Count
    sha256: str = ""
    """Of the run's files."""
    asked: tuple[Asked, ...] = ()
    ended: bool = False
    """``muster down``: nothing is asked any more."""

    @property
    def mark(self) -> str:
        """The newest request's nonce."""
        return self.asked[-1].nonce if self.asked else ""


@dataclass(frozen=True, kw_only=True)
class Looked:
    """What was found, and done."""

    progress: Progress
    next: Next | None
    """None: nothing is to be done any more, or the job's record is gone."""
    records: Sequence[JsonObject] = ()
    """Of the newest request's jobs."""

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

    def held(self) -> tuple[Progress | None, str | None]:
        """The record and its generation; None: nothing was submitted. Raises as the store, and ConflictError where
        another run lives in the home."""
        try:
            found = self.store.get(self._uri(FILE))
        except FileNotFoundError:
            return None, None
        progress = decode(Progress, found.data)
        if progress.run_id != self.placement.run_id:
            raise ConflictError(f"the run {progress.run_id} lives in {self.placement.home}", hint="another run_dir")
        return progress, found.generation

    def begin(self, submission: int, sha256: str) -> Looked:
        """Ask the first region, and the next ones as long as they refuse at once; the same submission again asks
        nothing that was asked.

        Raises:
            CapacityError: every region refused.
            ConflictError: somebody else submits, or an older submission's job still goes on.
            AccessError, BackendError: Google's refusal; nothing was created by this submission.
        """
        progress, generation = self.held()
        if progress is None or progress.submission < submission:
            if progress is not None and (going := [job for job in self.all_jobs(progress) if not job.final]):
                raise ConflictError(
                    f"custom job {going[0].name.rpartition('/')[2]} of an older submission still goes on",
                    hint=f"muster down {self.placement.run_id}",
                )
            self._write(Progress(run_id=self.placement.run_id, submission=submission, sha256=sha256), generation)
        while True:
            looked = self.look()
            last = looked.progress.asked[-1] if looked.progress.asked else None
            if isinstance(looked.next, NoRoom):
                raise CapacityError(
                    f"no region has room: {'; '.join(looked.next.reasons)}",
                    hint="ask for quota, or add regions to resources.locations",
                )
            if isinstance(looked.next, Look) and last is not None and not last.name and not looked.records:
                self.clock.sleep(looked.next.after_s)
            elif not isinstance(looked.next, Create | Cancel) or (last is not None and last.name and not last.nothing):
                return looked

    def look(self) -> Looked:
        """Look at everything, and do what is due, one step.

        Raises:
            AccessError, BackendError: Google's refusal.
            ConflictError: somebody else acts at the same time.
        """
        progress, generation = self.held()
        if progress is None:
            return Looked(progress=Progress(submission=0), next=None)
        records = self._records(progress.asked[-1]) if progress.asked else []
        looked = Looked(progress=progress, next=None, records=records)
        if progress.ended or (progress.asked and progress.asked[-1].name and not records):
            return looked
        found = next_step(
            self.placement.regions, progress.asked, looked.jobs, max_wait_s=self.placement.max_wait_s,
            now_s=self.clock.wall_ns() / 1e9,
            counts=claim.counting(self.store, self._uri(claim.FILE), progress.mark) if progress.asked else None,
        )  # fmt: skip
        if isinstance(found, Create):
            progress = self._create(found, progress, generation)
        elif isinstance(found, Cancel):
            if found.leave:
                progress = replace(progress, asked=(*progress.asked[:-1], replace(progress.asked[-1], left=True)))
                self._write(progress, generation)
            self.jobs.cancel(found.name)
        return replace(looked, progress=progress, next=found)

    def end(self) -> Progress | None:
        """Nothing is asked any more, and no host that wakes from now on trains. Raises as the store."""
        progress, generation = self.held()
        if progress is None:
            return None
        if not progress.ended:
            progress = replace(progress, ended=True)
            self._write(progress, generation)
        if progress.asked:
            region = progress.asked[-1].region
            nobody = Claim(nonce=f"ended-{progress.submission}", region=region, submission=progress.submission)
            claim.ask(self.store, self._uri(claim.FILE), nobody)
        return progress

    def wait_for_the_list(self, asked: Asked) -> None:
        """Until a job whose creation was not answered is in the list, if there is one."""
        left_s = asked.at_s + LIST_LAG_S - self.clock.wall_ns() / 1e9
        if left_s > 0:
            self.clock.sleep(left_s)

    def all_jobs(self, progress: Progress | None) -> list[CustomJob]:
        """Every job of the run, whichever request made it: by its label, and by its name where a list lags."""
        asked = progress.asked if progress is not None else ()
        regions = dict.fromkeys([*self.placement.regions, *(one.region for one in asked)])
        rows = [row for region in regions for row in self.jobs.of_run(region, self.placement.run_id)]
        there = {text(row, "name") for row in rows}
        late = [self.jobs.get(one.name) for one in asked if one.name and one.name not in there]
        return [custom_job(row) for row in (*rows, *late) if row]

    def _create(self, found: Create, before: Progress, generation: str | None) -> Progress:
        """Intent, claim, request, in this order."""
        asked = list(before.asked)
        if found.nothing:
            asked[-1] = replace(asked[-1], nothing=found.nothing)
        if found.again:
            del asked[-1]
        turn = len(asked) + 1
        mark = nonce(self.placement.run_id, before.submission, turn)
        asked.append(Asked(region=found.region, nonce=mark, at_s=self.clock.wall_ns() / 1e9))
        progress = replace(before, asked=tuple(asked))
        generation = self._write(progress, generation)
        wanted = Claim(nonce=mark, region=found.region, submission=before.submission)
        claim.ask(self.store, self._uri(claim.FILE), wanted)
        bodies = requests(self.placement, submission=before.submission, turn=turn, sha256=before.sha256)
        try:
            row = self.jobs.create(next(one for one in bodies if one.region == found.region))
            last = replace(asked[-1], name=text(row, "name"))
        except QuotaRefused:
            last = replace(asked[-1], nothing=Cause.QUOTA.value)
        except Lost:
            return progress
        except MusterError:
            self._write(before, generation)
            raise
        progress = replace(progress, asked=(*asked[:-1], last))
        with contextlib.suppress(ConflictError):  # somebody has looked meanwhile, and found it by its nonce
            self._write(progress, generation)
        return progress

    def _records(self, asked: Asked) -> list[JsonObject]:
        rows = self.jobs.labelled(asked.region, NONCE_LABEL, asked.nonce)
        if asked.name and asked.name not in {text(row, "name") for row in rows}:
            rows += [row] if (row := self.jobs.get(asked.name)) is not None else []
        return rows

    def _write(self, progress: Progress, generation: str | None) -> str:
        if generation is None:
            return self.store.put_if_absent(self._uri(FILE), encode(progress))
        return self.store.put_if(self._uri(FILE), encode(progress), generation)

    def _uri(self, name: str) -> str:
        return uris.join(self.placement.home, name)
