"""The ``Launcher`` for Vertex AI: a run is a custom job in one of its regions, found by its label and its nonce.

The run's folder on the user's machine holds its intent; the run itself, and how far its requests have come, are in its
bucket. Nobody can dial a host: questions go through a mailbox there.
"""

from __future__ import annotations

import base64
import contextlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from muster.backends import code_bundle, mailbox, run_folder, run_home
from muster.backends.google.http import GoogleHttp, Http
from muster.backends.google.secret_manager import SecretManager
from muster.backends.google.session import Session
from muster.backends.letters import ASK, RUN, Command, Outcome, box_of
from muster.backends.log_forwarder import writer_of
from muster.backends.mailbox import Box
from muster.backends.protocols import Terminal
from muster.backends.vertex import claim
from muster.backends.vertex.custom_job import code_dir
from muster.backends.vertex.jobs_api import Jobs
from muster.backends.vertex.offers import rents
from muster.backends.vertex.on_host import presence
from muster.backends.vertex.placement import Placement, place, resolved
from muster.backends.vertex.progress import FILE as REQUESTS
from muster.backends.vertex.progress import Requests
from muster.backends.vertex.reason import explain
from muster.backends.vertex.submission import BACKEND, SUBMISSION, render, submission_of
from muster.catalog import offers as catalogue
from muster.config.spec import RunSpec
from muster.core import resolved_file
from muster.core.clock import SystemClock
from muster.core.errors import BackendError, ConflictError, MusterError, UsageError
from muster.core.protocols import Clock, Store
from muster.core.typed_json import Unreadable, decode, encode
from muster.core.types import JobHandle, JobRequest, JobState, JobStatus, LogChunk, Offer
from muster.protocol import codec
from muster.protocol.client import FromClient, SupervisorStatus
from muster.protocol.lease import EndRecord
from muster.protocol.pipes import FROM_POD, AskInPod
from muster.storage import run_registry
from muster.storage.home import HOME_FILE, Home
from muster.storage.store import open_store
from muster.transport.secure_session import read_token

GONE_WITHIN_S = 300.0
"""A cancelled job takes a minute or so to end."""
LOOK_S = 5.0
ASK_S = 30.0
"""A question through the bucket takes seconds, whatever its asker is used to."""
COMMAND_S = 600.0
"""For a command on a host (``muster exec``)."""


@dataclass(kw_only=True)
class VertexLauncher:
    """Runs jobs as custom jobs in the regions that the run file names."""

    name: str = BACKEND
    http: Http = field(default_factory=lambda: GoogleHttp())
    store: Store | None = None
    """None: the bucket itself, when first needed."""
    clock: Clock = field(default_factory=SystemClock)
    _opened: Store | None = None
    attach = None
    steps = None
    revive = None
    follow = None

    @property
    def remote(self) -> VertexLauncher:
        """The run's folder is where its hosts are; this machine holds the intent alone."""
        return self

    # ------------------------------------------------------------ before

    def offers(self, spec: RunSpec) -> list[Offer]:
        """The catalogue's rows for the run file's machine, accelerator and mode; availability is not asked."""
        asked = spec.resources
        return [
            option.offer
            for option in rents(catalogue.catalogue())
            if asked.machine in (None, option.offer.machine)
            and asked.accelerator in (None, option.offer.accelerator)
            and asked.provisioning_model in (None, option.offer.mode)
        ]

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
        local = Path(request.run_dir)
        if run_registry.existing_id(local) not in (None, request.run_id):
            raise ConflictError(f"{local} holds another run", hint="choose another run_dir")
        submission = submission_of(request)
        home, store = submission.placement.home, self._store()
        self._begin(local, request.run_id, home)
        requests = self._requests(submission.placement)
        before, _ = requests.held()
        try:
            if before is not None and before.ended and before.submission >= submission.number:
                return self._handle(request.run_id, local, "")  # `muster down` ended this very one
            sha256, warnings = submission.put(store, self._secrets(), read_token(str(local / "token")).decode())
            looked = requests.begin(submission.number, sha256)
        except MusterError:
            if before is None:
                self._forget(self._handle(request.run_id, local, ""), home)
            raise
        record = {"version": 1, "run_id": request.run_id, "backend": self.name, SUBMISSION: submission.number}
        run_registry.replace_text(local / "job.json", json.dumps({**record, "run_dir": request.run_dir}) + "\n")
        name = looked.job.name if looked.job is not None else looked.progress.asked[-1].name
        return self._handle(request.run_id, local, name, warnings)

    def _begin(self, local: Path, run_id: str, home: str) -> None:
        """As ``run_home.begin``; a folder whose home is another's, or cannot be written, does not name it: ending that
        run would end the other."""
        named = (local / HOME_FILE).exists()
        try:
            run_home.begin(local, run_id, home, self.store)
        except MusterError:
            if not named:
                (local / HOME_FILE).unlink(missing_ok=True)
            raise

    def _forget(self, handle: JobHandle, home: str) -> None:
        """A run that never began leaves its home to others. A job of it that comes late finds no claim and ends."""
        store = self._store()
        with contextlib.suppress(MusterError):
            self.cancel(handle)
        for uri in [
            *(f"{home}/{name}" for name in (claim.FILE, REQUESTS)),
            *(uri for folder in ("events", run_folder.FOLDER) for uri in store.list(f"{home}/{folder}")),
            f"{home}/{run_home.RUN_ID}",
        ]:
            with contextlib.suppress(MusterError, FileNotFoundError):
                store.delete(uri)

    # ------------------------------------------------------------ watch

    def find(self, run_id: str) -> JobHandle | None:
        """By the run's home, which its folder on this machine names; None where none was submitted, or it was ended
        from here."""
        known = self._known(run_id)
        if known is None:
            return None
        local, requests = known
        progress, _ = requests.held()
        if progress is None or progress.ended:
            return None
        jobs = requests.all_jobs(progress)
        mine = [job for job in jobs if job.nonce == progress.mark]
        name = mine[0].name if mine else next((one.name for one in progress.asked[-1:]), None)
        return self._handle(run_id, local, name) if name is not None else None

    def poll(self, handle: JobHandle) -> JobStatus:
        """Look once at everything, do what is due (a region that kept the request too long is left for the next one),
        and say it in one sentence."""
        known = self._known(handle.run_id)
        if known is None:
            return JobStatus(state=JobState.ABSENT, reason="no such run, or it was never submitted")
        local, requests = known
        try:
            looked = requests.look()
        except ConflictError:  # somebody else looks at this moment, and does what is due
            looked = requests.look()
        if not looked.progress.submission:
            return JobStatus(state=JobState.ABSENT, reason="the run was never submitted")
        hosts = []
        with contextlib.suppress(MusterError):
            hosts = presence.hosts(self._store(), requests.placement.home, looked.progress.mark)
        return explain(looked, self._end(local), hosts, self.clock.wall_ns() / 1e9)

    def logs(self, handle: JobHandle, *, after: Mapping[str, int] | None = None) -> Iterator[LogChunk]:
        """What the run's programs wrote, from its home, and what each host's first program printed, from Cloud Logging
        (task ``workerpool0-0``; its position is a time). Where that may not be read, the home's alone."""
        after, known = after or {}, self._known(handle.run_id)
        home = self.home(handle.run_id)
        if known is None or home is None:
            return
        with contextlib.suppress(MusterError):
            yield from run_home.logs(home, after)
        requests = known[1]
        with contextlib.suppress(MusterError):
            progress, _ = requests.held()
            for one in progress.asked if progress is not None else ():
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

    # ------------------------------------------------------------ inside

    def ask(
        self, run_id: str, message: FromClient, *, timeout_s: float = 5.0, resolved: str | None = None
    ) -> SupervisorStatus:
        """Carry a question to the run's supervisor, through the mailbox; ``resolved`` replaces the run file before it.

        Raises:
            BackendError: nobody holds the run, or whoever does has not answered.
        """
        home, known = self.home(run_id), self._known(run_id)
        if home is None or known is None or run_home.holder_of(home) is None:
            raise BackendError(f"no host supervises {run_id} now", hint=f"muster status {run_id}")
        question = AskInPod(message=codec.encode(message).decode(), timeout_s=timeout_s)
        if resolved is not None:
            shipped, code = code_bundle.pack(RunSpec.model_validate_json(resolved), code_dir(run_id))
            text = shipped.model_dump_json(indent=1) + "\n"
            packed = base64.b64encode(code).decode() if code is not None else None
            question = AskInPod(message=question.message, timeout_s=timeout_s, resolved=text, code=packed)
            run_home.publish(home, text, code)
        box = self._box(run_id, known[0], home, mailbox.SUPERVISOR)
        said = box.send(ASK, codec.encode(question).decode(), timeout_s=max(ASK_S, timeout_s))
        try:
            answer = codec.reader_of(FROM_POD)(said.encode())
        except Unreadable as error:
            raise BackendError(f"the answer cannot be read: {error}", hint="is the image of this version?") from error
        if not isinstance(answer, SupervisorStatus):
            raise BackendError("the host answered another question")
        return answer

    def home(self, run_id: str) -> Home | None:
        """The run's home in a bucket, as the run's folder on this machine names it."""
        local = _local_dir(run_id)
        return run_home.open_of(local, self.store) if local is not None else None

    def mirror(self, run_id: str, folder: Path) -> int:
        """Bring the run's events to ``folder``, the local run folder's ``events``; returns how many bytes were new."""
        home = self.home(run_id)
        return home.mirror(folder.parent) if home is not None else 0

    def exec(self, run_id: str, argv: Sequence[str], terminal: Terminal, *, host: int | None = None) -> int:
        """Run a command on a host to its end, without input; its output comes then. Returns its exit code.

        Raises:
            UsageError: a terminal is asked for, or there is no such host.
            BackendError: the host does not answer.
        """
        home, known = self.home(run_id), self._known(run_id)
        if home is None or known is None:
            raise BackendError(f"{run_id} was never submitted", hint=f"muster status {run_id}")
        index, hosts = host or 0, known[1].placement.hosts
        if index >= hosts:
            raise UsageError(f"{run_id} has no host {index}: it has {hosts}, counted from 0")
        if terminal.tty:
            raise UsageError(
                "no terminal can be opened on a host of a custom job: nobody can dial it",
                hint="a command without a terminal (muster exec ... < /dev/null), or vertex.web_access: true",
            )
        progress, _ = known[1].held()
        there = presence.hosts(self._store(), home.uri, progress.mark) if progress is not None else []
        if not any(one.index == index and one.state == "up" for one in there):
            raise BackendError(f"host {index} of {run_id} is not there now", hint=f"muster status {run_id}")
        letter = Command(argv=tuple(argv), timeout_s=COMMAND_S)
        box = self._box(run_id, known[0], home, box_of(index))
        outcome = decode(Outcome, box.send(RUN, encode(letter).decode(), timeout_s=COMMAND_S + ASK_S).encode())
        terminal.out(base64.b64decode(outcome.out))
        terminal.err(base64.b64decode(outcome.err))
        return outcome.code

    # ------------------------------------------------------------ end

    def cancel(self, handle: JobHandle) -> None:
        """End every job of the run and wait until they have; remove its secret. Absent is success.

        Raises:
            BackendError: one has not ended in time.
        """
        known = self._known(handle.run_id)
        if known is None:
            return
        _, requests = known
        progress = requests.end()
        asked = progress.asked[-1] if progress is not None and progress.asked else None
        if progress is not None and asked is not None and not asked.name and not asked.nothing:
            requests.wait_for_the_list(asked)
        waited_s = 0.0
        while going := [job for job in requests.all_jobs(progress) if not job.final]:
            if waited_s >= GONE_WITHIN_S:
                numbers = ", ".join(job.name.rpartition("/")[2] for job in going)
                raise BackendError(f"custom job {numbers} has not ended", hint=f"muster down {handle.run_id}")
            for job in going if waited_s % (10 * LOOK_S) == 0 else ():
                requests.jobs.cancel(job.name)
            self.clock.sleep(LOOK_S)
            waited_s += LOOK_S
        self._secrets().delete(requests.placement.token_secret)

    def remaining(self, handle: JobHandle) -> list[str]:
        """Jobs that have not ended, and the run's secret; records of ended jobs cost nothing and stay."""
        known = self._known(handle.run_id)
        if known is None:
            return []
        _, requests = known
        progress, _ = requests.held()
        found = [f"custom job {job.name}: {job.state}" for job in requests.all_jobs(progress) if not job.final]
        project = requests.placement.spec.resources.project or ""
        return [*found, *self._secrets().labelled(project, "muster-run", handle.run_id)]

    # ------------------------------------------------------------ below

    def _known(self, run_id: str) -> tuple[Path, Requests] | None:
        """The run's folder on this machine, and its requests; None: it was never submitted from here."""
        local = _local_dir(run_id)
        if local is None or not (local / HOME_FILE).exists() or not (local / resolved_file.NAME).exists():
            return None
        spec = RunSpec.model_validate_json(resolved_file.read(local))
        home = (local / HOME_FILE).read_text().strip()
        return local, self._requests(place(spec, run_id=run_id, run_dir=home))

    def _requests(self, placement: Placement) -> Requests:
        project = placement.spec.resources.project or ""
        jobs = Jobs(session=self._session(), project=project)
        return Requests(jobs=jobs, store=self._store(), placement=placement, clock=self.clock)

    def _end(self, local: Path) -> EndRecord | None:
        home = run_home.open_of(local, self.store)
        return run_home.end_of(home, again=True) if home is not None else None

    def _box(self, run_id: str, local: Path, home: Home, name: str) -> Box:
        token = read_token(str(local / "token"))
        return Box(store=self._store(), home=home.uri, name=name, run_id=run_id, token=token, clock=self.clock)

    def _handle(self, run_id: str, local: Path, name: str, warnings: Sequence[str] = ()) -> JobHandle:
        return JobHandle(
            run_id=run_id, backend=self.name, job_id=name, run_dir=str(local), warnings=tuple(warnings)
        )  # fmt: skip

    def _store(self) -> Store:
        self._opened = self.store or self._opened or open_store()
        return self._opened

    def _secrets(self) -> SecretManager:
        return SecretManager(session=self._session())

    def _session(self) -> Session:
        return Session(http=self.http, clock=self.clock)


def _local_dir(run_id: str) -> Path | None:
    try:
        return run_registry.find(run_id).path
    except UsageError:
        return None
