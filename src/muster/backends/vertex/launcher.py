"""The ``Launcher`` for Vertex AI: a run is a custom job in one of its regions, found by its label and its nonce.

The run's folder on the user's machine holds its intent; the run itself, and how far its requests have come, are in its
bucket. Hosts accept no connections: questions go through a mailbox there.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from muster.backends import code_bundle, run_folder, run_home
from muster.backends.bucket_launcher import RESUME_LATER, STOPPED_BY_USER, ended_with
from muster.backends.google.launcher import GoogleLauncher
from muster.backends.google.request_log import FILE as REQUESTS
from muster.backends.google.request_log import NOTHING
from muster.backends.google.secret_manager import SecretManager, variables
from muster.backends.log_forwarder import writer_of
from muster.backends.run_folder import RunFiles
from muster.backends.vertex.custom_job import RUN_LABEL, code_dir, requests, run_files
from muster.backends.vertex.job_state import CustomJob, cause, sentence, web_links
from muster.backends.vertex.jobs_api import Jobs
from muster.backends.vertex.on_host import presence
from muster.backends.vertex.on_host.presence import HostRecord
from muster.backends.vertex.placement import Placement, place, rents, resolved
from muster.backends.vertex.progress import LIST_LAG_S, Looked, NoRoom, Over, Requests
from muster.backends.vertex.run_file_rules import rules
from muster.catalog import offers as catalogue
from muster.catalog.offers import Option
from muster.config.spec import RunSpec
from muster.core.errors import BackendError, ConflictError, MusterError, RunFileError, UsageError
from muster.core.protocols import Store
from muster.core.typed_json import JsonObject, Unreadable
from muster.core.types import JobHandle, JobRequest, JobState, JobStatus, LogChunk, TaskSpec
from muster.protocol.lease import EndRecord
from muster.storage import run_registry
from muster.storage.job_record import SUBMISSION
from muster.transport.secure_session import read_token

BACKEND = "vertex"
RESOLVED, RUN_YAML = "resolved.json", "run.yaml"
GONE_WITHIN_S = 300.0
"""A cancelled job takes a minute or so to end."""
LOOK_S = 5.0
NO_CAPACITY = 4


def render(spec: RunSpec, *, run_id: str, run_dir: str) -> JobRequest:
    """The requests by region, and the run's files. Pure.

    Raises:
        RunFileError: rules across keys are broken; all of them at once, with reasons.
        UsageError: no such machine.
    """
    if problems := list(rules(spec)):
        raise RunFileError(problems)
    placement = place(spec, run_id=run_id, run_dir=run_dir)
    files = run_files(placement)
    host = ("python", "-m", "muster.agent.watchdog", "--run-id", run_id)
    supervisor = ("python", "-m", "muster.app.supervisor", "--run-id", run_id)
    return JobRequest(
        run_id=run_id,
        backend=BACKEND,
        run_dir=run_dir,
        tasks=(TaskSpec(name="supervisor", argv=supervisor), TaskSpec(name="agent", argv=host, count=placement.hosts)),
        labels={RUN_LABEL: run_id},
        files={
            **{f"custom-job.{one.region}.json": one.text() for one in requests(placement)},
            RESOLVED: files.resolved,
            RUN_YAML: files.run_yaml,
        },
    )


@dataclass(frozen=True, kw_only=True)
class Submission:
    """A request with the user's own code as it is now."""

    placement: Placement
    number: int
    files: RunFiles

    def put(self, store: Store, secrets: SecretManager, token: str) -> tuple[str, list[str]]:
        """The run's files into its home and its token into a secret that its account may read; the same again changes
        nothing. Returns the files' digest, and warnings.

        Raises:
            UsageError: a secret that hosts are to read is not there.
            ConflictError: the secret holds another token.
            AccessError, BackendError: refused.
        """
        asked = self.placement.spec.vertex
        warnings = secrets.require(variables(self.placement.spec.secrets, asked.hugging_face_secret))
        sha256 = run_folder.put(store, self.placement.home, self.files.encoded())
        version = self.placement.token_secret
        secrets.create(version, token.encode(), {RUN_LABEL: self.placement.run_id})
        return sha256, [*warnings, *secrets.share(version, (asked.service_account,))]


def submission_of(request: JobRequest) -> Submission:
    """Raises UsageError: more code than is shipped."""
    spec = RunSpec.model_validate_json(request.files[RESOLVED])
    shipped, code = code_bundle.pack(spec, code_dir(request.run_id))
    files = RunFiles(
        resolved=shipped.model_dump_json(indent=1) + "\n", run_yaml=request.files[RUN_YAML], code=code
    )  # fmt: skip
    placement = place(spec, run_id=request.run_id, run_dir=request.run_dir)
    return Submission(placement=placement, number=int(request.labels.get(SUBMISSION, "1")), files=files)


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


def explain(looked: Looked, end: EndRecord | None, hosts: Sequence[HostRecord], now_s: float) -> JobStatus:
    """One look at a run that was submitted. ``end``: the run's, of this submission."""
    job, going = looked.job, [one for one in looked.jobs if not one.final]
    over = end is not None and (end.exit_code != RESUME_LATER or not going)
    if end is not None and over:
        left = f" ({sentence(going[0], now_s)}: its hosts leave)" if going else ""
        found = ended_with(end)
        return replace(found, reason=found.reason + left)
    if looked.log is not None and looked.log.closed:
        return JobStatus(state=JobState.STOPPED, reason="ended by muster down")
    if isinstance(looked.next, NoRoom):
        reasons = "; ".join(looked.next.reasons)
        return JobStatus(state=JobState.FAILED, reason=f"no region has room: {reasons}", exit_code=NO_CAPACITY)
    if job is None:
        return _without_a_job(looked)
    failed = [f"host {one.index}: {one.said}" for one in hosts if one.state == "failed" and one.said]
    said = "; ".join([sentence(job, now_s), *failed])
    if isinstance(looked.next, Over):
        return _over(job, said, now_s)
    # A job that has ended may go on in another region: that is known once Vertex says why it has ended.
    state = JobState.WAITING if job.final else job.job_state
    return JobStatus(state=state, reason=_with_earlier(looked, said), tasks=_tasks(hosts, looked.record))


def _without_a_job(looked: Looked) -> JobStatus:
    last = looked.request
    if last is not None and last.name:
        number = last.name.rpartition("/")[2]
        return JobStatus(state=JobState.FAILED, reason=f"custom job {number} is gone: it was deleted")
    where = f" {last.where}" if last is not None else ""
    return JobStatus(state=JobState.WAITING, reason=_with_earlier(looked, f"asking{where}"))


def _over(job: CustomJob, said: str, now_s: float) -> JobStatus:
    if job.job_state is JobState.SUCCEEDED:  # the first host ended as a run's end that is written does
        return JobStatus(state=JobState.FAILED, reason=f"{said}, and the run's home has no end of the run", exit_code=1)
    code = STOPPED_BY_USER if job.job_state is JobState.STOPPED else 1
    hint = "" if cause(job, now_s) is None else " (hint: muster logs RUN, and the job's page in the console)"
    return JobStatus(state=job.job_state, reason=said + hint, exit_code=code)


def _with_earlier(looked: Looked, said: str) -> str:
    """With why regions before this one brought nothing."""
    before = looked.log.requests[:-1] if looked.log is not None else ()
    earlier = [f"{one.where}: {one.reason}" for one in before if one.state == NOTHING]
    return f"{said} (before it {'; '.join(earlier)})" if earlier else said


def _tasks(hosts: Sequence[HostRecord], record: JsonObject) -> dict[str, str]:
    """Each host as it says of itself, with the link to its shell in the browser."""
    links = web_links(record)
    found = {f"host-{one.index}": f"{one.state} at {one.address}" for one in hosts}
    for name, link in links.items():
        pool, _, index = name.partition("-")
        host = {"workerpool0": 0, "workerpool1": 1}.get(pool)
        if host is not None and index.isdecimal():
            task = f"host-{host + int(index)}"
            found[task] = ", ".join([*([found[task]] if task in found else []), f"shell: {link}"])
    return found
