"""The ``Launcher`` for Vertex AI: a run is a custom job in one of its regions, found by its label and its nonce.

The run's folder on the user's machine holds its intent; the run itself, and how far its requests have come, are in its
bucket. Hosts accept no connections: questions go through a mailbox there.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from muster.backends import run_folder, run_home
from muster.backends.google.launcher import GoogleLauncher
from muster.backends.google.request_log import FILE as REQUESTS
from muster.backends.log_forwarder import writer_of
from muster.backends.vertex.custom_job import code_dir
from muster.backends.vertex.jobs_api import Jobs
from muster.backends.vertex.offers import rents
from muster.backends.vertex.on_host import presence
from muster.backends.vertex.placement import Placement, place, resolved
from muster.backends.vertex.progress import Requests
from muster.backends.vertex.reason import explain
from muster.backends.vertex.submission import BACKEND, render, submission_of
from muster.backends.vertex.turns import LIST_LAG_S
from muster.catalog import offers as catalogue
from muster.catalog.offers import Option
from muster.config.spec import RunSpec
from muster.core.errors import BackendError, ConflictError, MusterError, UsageError
from muster.core.typed_json import Unreadable
from muster.core.types import JobHandle, JobRequest, JobState, JobStatus, LogChunk
from muster.protocol.lease import EndRecord
from muster.storage import run_registry
from muster.transport.secure_session import read_token

GONE_WITHIN_S = 300.0
"""A cancelled job takes a minute or so to end."""
LOOK_S = 5.0


@dataclass(kw_only=True)
class VertexLauncher(GoogleLauncher[Placement]):
    """Runs jobs as custom jobs in the regions that the run file names."""

    name: str = BACKEND
    follow = None

    # ------------------------------------------------------------ before

    def sold(self) -> Sequence[Option]:
        return rents(catalogue.catalogue())

    def placed(self, spec: RunSpec, run_id: str, run_dir: str | None) -> Placement:
        return place(spec, run_id=run_id, run_dir=run_dir)

    def code_dir(self, run_id: str) -> str:
        return code_dir(run_id)

    def resolve(self, spec: RunSpec) -> RunSpec:
        """The run file with what the machine decides: ranks a host, device, how long hosts are waited for."""
        return resolved(place(spec, run_id="run", run_dir=None))

    def render(self, spec: RunSpec, *, run_id: str, run_dir: str) -> JobRequest:
        """The request of each region; pure."""
        return render(spec, run_id=run_id, run_dir=run_dir)

    # ------------------------------------------------------------ start

    def submit(self, request: JobRequest) -> JobHandle:
        """Ask the first region; the same request twice makes one job. Waits, at most for a minute or two, only where
        the answer of a creation was lost.

        Raises:
            CapacityError: every region refused at once.
            ConflictError: another run lives in its home, or an older submission's job still goes on.
            AccessError, BackendError: Google's refusal.
        """
        local, submission = Path(request.run_dir), submission_of(request)
        home, store = submission.placement.home, self.opened()
        self.begin(local, request.run_id, home)
        requests = self._requests(submission.placement)
        before, _ = requests.held()
        try:
            if before is not None and before.closed and before.submission >= submission.number:
                return self.handle(request.run_id, local, "")  # `muster down` ended this very one
            sha256, warnings = submission.put(store, self.secrets(), read_token(str(local / "token")).decode())
            looked = requests.begin(submission.number, sha256)
        except MusterError:
            if before is None:
                self._forget(self.handle(request.run_id, local, ""), home)
            raise
        self.record(local, request.run_id, submission.number)
        newest = looked.job or looked.request
        return self.handle(request.run_id, local, newest.name if newest is not None else "", warnings)

    def _forget(self, handle: JobHandle, home: str) -> None:
        """A run that never began leaves its home to others. A job of it that comes late finds no log and ends."""
        store = self.opened()
        with contextlib.suppress(MusterError):
            self.cancel(handle)
        for uri in [
            f"{home}/{REQUESTS}",
            *(uri for folder in ("events", run_folder.FOLDER) for uri in store.list(f"{home}/{folder}")),
            f"{home}/{run_home.RUN_ID}",
        ]:
            with contextlib.suppress(MusterError, FileNotFoundError):
                store.delete(uri)

    # ------------------------------------------------------------ watch

    def find(self, run_id: str) -> JobHandle | None:
        """By the run's home, which its folder on this machine names; None where none was submitted, or it was ended
        from here."""
        known = self.known(run_id)
        if known is None:
            return None
        local, requests = known[0], self._requests(known[1])
        log = None
        with contextlib.suppress(Unreadable):
            log, _ = requests.held()
        if log is None or log.closed or log.last is None:
            return None
        mine = [job.name for job in requests.all_jobs(log) if job.nonce == log.mark]
        return self.handle(run_id, local, next(iter(mine), log.last.name))

    def poll(self, handle: JobHandle) -> JobStatus:
        """Look once at everything, do what is due (a region that kept the request too long is left for the next one),
        and say it in one sentence."""
        known = self.known(handle.run_id)
        if known is None:
            return JobStatus(state=JobState.ABSENT, reason="no such run, or it was never submitted")
        requests = self._requests(known[1])
        try:
            looked = requests.look()
        except ConflictError:  # another command looks at this moment, and does what is due
            looked = requests.look()
        if looked.log is None:
            return JobStatus(state=JobState.ABSENT, reason="the run was never submitted")
        hosts = []
        with contextlib.suppress(MusterError):
            hosts = presence.hosts(self.opened(), requests.placement.home, looked.log.mark)
        return explain(looked, self._end(handle.run_id), hosts, self.clock.wall_ns() / 1e9)

    def logs(self, handle: JobHandle, *, after: Mapping[str, int] | None = None) -> Iterator[LogChunk]:
        """What the run's programs wrote, from its home, and what each host's first program printed, from Cloud Logging
        (task ``workerpool0-0``; its position is a time). Where that may not be read, the home's alone."""
        after, known = after or {}, self.known(handle.run_id)
        home = self.home(handle.run_id)
        if known is None or home is None:
            return
        with contextlib.suppress(MusterError):
            yield from run_home.logs(home, after)
        requests = self._requests(known[1])
        with contextlib.suppress(MusterError):
            log, _ = requests.held()
            for one in log.requests if log is not None else ():
                if one.name:
                    yield from self._printed(requests.jobs, one.name.rpartition("/")[2], after)

    def _printed(self, jobs: Jobs, number: str, after: Mapping[str, int]) -> Iterator[LogChunk]:
        """Lines that are copies of a file in the home are left out."""
        text: dict[str, str] = {}
        at: dict[str, int] = {}
        positions = [position for task, position in after.items() if task.startswith("workerpool")]
        for task, when_ns, line in jobs.output(number, min(positions, default=0)):
            if when_ns <= after.get(task, 0) or writer_of(line, task)[0] != task:
                continue
            text[task] = text.get(task, "") + line + "\n"
            at[task] = max(when_ns, at.get(task, 0))
        yield from (LogChunk(task=task, text=words, next_offset=at[task]) for task, words in text.items())

    def box_of_host(self, run_id: str, placement: Placement, host: int) -> str:
        """By the host's number in the job."""
        if host >= placement.hosts:
            raise UsageError(f"{run_id} has no host {host}: it has {placement.hosts}, counted from 0")
        log, _ = self._requests(placement).held()
        there = presence.hosts(self.opened(), placement.home, log.mark) if log is not None else []
        if not any(one.index == host and one.state == "up" for one in there):
            raise BackendError(f"host {host} of {run_id} is not there now", hint=f"muster status {run_id}")
        return str(host)

    # ------------------------------------------------------------ end

    def cancel(self, handle: JobHandle) -> None:
        """End every job of the run and wait until they have; remove its secret. Absent is success.

        Raises:
            BackendError: one has not ended in time.
        """
        known = self.known(handle.run_id)
        if known is None:
            return
        requests = self._requests(known[1])
        log = None
        with contextlib.suppress(Unreadable):  # of another version: its jobs are found by their label
            log = requests.end()
        if log is None and not run_registry.is_readable(known[0]):  # its newest job may not be listed yet
            self.clock.sleep(LIST_LAG_S)
        last = log.last if log is not None else None
        if last is not None and last.is_lost:
            requests.wait_for_the_list(last)
        waited_s = 0.0
        while going := [job for job in requests.all_jobs(log) if not job.final]:
            if waited_s >= GONE_WITHIN_S:
                numbers = ", ".join(job.name.rpartition("/")[2] for job in going)
                raise BackendError(f"custom job {numbers} has not ended", hint=f"muster down {handle.run_id}")
            for job in going if waited_s % (10 * LOOK_S) == 0 else ():
                requests.jobs.cancel(job.name)
            self.clock.sleep(LOOK_S)
            waited_s += LOOK_S
        self.secrets().delete(requests.placement.token_secret)

    def remaining(self, handle: JobHandle) -> list[str]:
        """Jobs that have not ended, and the run's secret; records of ended jobs cost nothing and stay."""
        known = self.known(handle.run_id)
        if known is None:
            return []
        requests = self._requests(known[1])
        log = None
        with contextlib.suppress(Unreadable):
            log, _ = requests.held()
        found = [f"custom job {job.name}: {job.state}" for job in requests.all_jobs(log) if not job.final]
        project = requests.placement.spec.resources.project or ""
        return [*found, *self.secrets().labelled(project, "muster-run", handle.run_id)]

    # ------------------------------------------------------------ below

    def _requests(self, placement: Placement) -> Requests:
        project = placement.spec.resources.project or ""
        jobs = Jobs(session=self.session(), project=project)
        return Requests(jobs=jobs, store=self.opened(), placement=placement, clock=self.clock)

    def _end(self, run_id: str) -> EndRecord | None:
        home = self.home(run_id)
        return run_home.end_of(home, again=True) if home is not None else None
