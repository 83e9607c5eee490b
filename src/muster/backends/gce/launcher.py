"""The ``Launcher`` for Compute Engine: a run is a supervisor's machine, which makes its hosts; all have its label.

The run's folder on the user's machine holds its intent; the run itself, what was asked for (``journal``) and how far
machines have come are in its bucket. Nobody dials a machine: questions go through a mailbox there.
"""

from __future__ import annotations

import base64
import contextlib
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from muster.backends import code_bundle, mailbox, run_home
from muster.backends.gce import reason, teardown
from muster.backends.gce.compute import Compute
from muster.backends.gce.journal import FILE as JOURNAL
from muster.backends.gce.journal import JournalFile
from muster.backends.gce.offers import rents
from muster.backends.gce.placement import RUNS, Placement, place, resolved
from muster.backends.gce.provision import instances_of
from muster.backends.gce.submission import BACKEND, Start, render, submission_of
from muster.backends.google.http import GoogleHttp, Http
from muster.backends.google.secret_manager import SecretManager
from muster.backends.google.session import Session
from muster.backends.letters import ASK, RUN, Command, Outcome, box_of
from muster.backends.mailbox import Box
from muster.backends.protocols import Terminal
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
from muster.protocol.pipes import FROM_POD, AskInPod
from muster.storage import run_registry
from muster.storage.home import HOME_FILE, Home
from muster.storage.store import open_store
from muster.transport.secure_session import read_token

GONE_WITHIN_S = 600.0
"""For `down`: deleting a machine takes a minute or two; one that waits for flex-start took 39."""
ASK_S = 30.0
"""A question through the bucket takes seconds, whatever its asker is used to."""
COMMAND_S = 600.0
"""For a command on a host (``muster exec``)."""


@dataclass(kw_only=True)
class GceLauncher:
    """Runs jobs on machines in the zones that the run file names."""

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
    def remote(self) -> GceLauncher:
        """The run's folder is where its machines are; this one holds the intent alone."""
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
        """The requests by file; pure."""
        return render(spec, run_id=run_id, run_dir=run_dir)

    # ------------------------------------------------------------ start

    def submit(self, request: JobRequest) -> JobHandle:
        """Put the run's files into its home, and make the supervisor's machine, which asks for hosts; the same request
        twice makes one.

        Raises:
            CapacityError: no zone has a machine for the supervisor.
            AccessError, BackendError: Google refuses.
            ConflictError: another run lives in that home, or an older submission is still being removed.
        """
        local = Path(request.run_dir)
        if run_registry.existing_id(local) not in (None, request.run_id):
            raise ConflictError(f"{local} holds another run", hint="choose another run_dir")
        found = submission_of(request)
        placement = found.placement
        known = (local / HOME_FILE).exists()
        try:
            run_home.begin(local, request.run_id, placement.home, self.store)
        except MusterError:
            if not known:  # nothing was asked for, so nobody has to look for anything
                (local / HOME_FILE).unlink(missing_ok=True)
            raise
        file, warnings, handle = self._file(placement), [], self._handle(request.run_id, local, placement)
        before, _ = file.read()
        try:
            if not file.open_for(placement.submission).closed:
                warnings = found.put(self._store(), self._secrets(), read_token(str(local / "token")).decode())
                Start(
                    placement=placement, compute=self._compute(placement), file=file, clock=self.clock,
                    log=lambda line: print(f"muster: {line}", file=sys.stderr, flush=True),
                ).run()  # fmt: skip
        except MusterError:
            if before is None:
                with contextlib.suppress(MusterError):
                    self._forget(handle, placement)
            raise
        self._record(local, request.run_id, placement.submission)
        return replace(handle, warnings=tuple(warnings))

    def _forget(self, handle: JobHandle, placement: Placement) -> None:
        """A run that never began leaves its home to others, and no machine that came after all."""
        self.cancel(handle)
        for name in (JOURNAL, run_home.RUN_ID):
            with contextlib.suppress(MusterError, FileNotFoundError):
                self._store().delete(f"{placement.home}/{name}")

    # ------------------------------------------------------------ watch

    def find(self, run_id: str) -> JobHandle | None:
        """By the run's folder on this machine, which says the project, and the label there."""
        known = self._known(run_id)
        if known is None:
            return None
        local, placement = known
        journal, _ = self._file(placement).read()
        if journal is None or journal.closed or not instances_of(self._compute(placement), placement.stem):
            return None
        return self._handle(run_id, local, placement)

    def poll(self, handle: JobHandle) -> JobStatus:
        """Look once at everything, and say it in one sentence."""
        known = self._known(handle.run_id)
        if known is None:
            return JobStatus(state=JobState.ABSENT, reason="no such run, or it was never submitted")
        local, placement = known
        home = run_home.open_of(local, self.store)
        looked = reason.look(placement, self._compute(placement), self._store(), self._file(placement))
        end = run_home.end_of(home) if home is not None else None
        return reason.explain(looked, placement, end, self.clock.wall_ns() / 1e9)

    def logs(self, handle: JobHandle, *, after: Mapping[str, int] | None = None) -> Iterator[LogChunk]:
        """What the run's programs wrote, from its home; at most half a minute old."""
        home = self.home(handle.run_id)
        if home is not None:
            yield from run_home.logs(home, after or {})

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
            raise BackendError(f"no machine supervises {run_id} now", hint=f"muster status {run_id}")
        question = AskInPod(message=codec.encode(message).decode(), timeout_s=timeout_s)
        if resolved is not None:
            shipped, code = code_bundle.pack(RunSpec.model_validate_json(resolved), f"{RUNS}/{run_id}")
            text = shipped.model_dump_json(indent=1) + "\n"
            packed = base64.b64encode(code).decode() if code is not None else None
            question = AskInPod(message=question.message, timeout_s=timeout_s, resolved=text, code=packed)
            run_home.publish(home, text, code)
        box = self._box(run_id, known[0], home, mailbox.SUPERVISOR)
        said = box.send(ASK, codec.encode(question).decode(), timeout_s=max(ASK_S, timeout_s))
        try:
            answer = codec.reader_of(FROM_POD)(said.encode())
        except Unreadable as error:
            raise BackendError(f"the answer cannot be read: {error}", hint="is the bundle of this version?") from error
        if not isinstance(answer, SupervisorStatus):
            raise BackendError("the machine answered another question")
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
        local, placement = known
        machines = instances_of(self._compute(placement), placement.stem)
        hosts = sorted(one.name for one in machines if one.turn and one.lives)
        if not hosts:
            raise UsageError(f"{run_id} has no host now", hint=f"muster status {run_id}")
        if (host or 0) >= len(hosts):
            raise UsageError(f"{run_id} has no host {host}: it has {len(hosts)}, counted from 0 ({', '.join(hosts)})")
        if terminal.tty:
            raise UsageError(
                "no terminal is opened on a machine of Compute Engine: commands reach it through the bucket",
                hint="a command without a terminal: muster exec ... < /dev/null",
            )
        letter = encode(Command(argv=tuple(argv), timeout_s=COMMAND_S)).decode()
        box = self._box(run_id, local, home, box_of(hosts[host or 0]))
        outcome = decode(Outcome, box.send(RUN, letter, timeout_s=COMMAND_S + ASK_S).encode())
        terminal.out(base64.b64decode(outcome.out))
        terminal.err(base64.b64decode(outcome.err))
        return outcome.code

    # ------------------------------------------------------------ end

    def cancel(self, handle: JobHandle) -> None:
        """Nobody asks for anything any more; then every machine, disk, group, template, policy and the run's secret is
        removed. Absent is success."""
        known = self._known(handle.run_id)
        if known is None:
            return
        _, placement = known
        with contextlib.suppress(ConflictError):  # a supervisor writes it often; what it makes goes below
            self._file(placement).close()
        teardown.remove(self._compute(placement), placement.stem, self.clock, patience_s=GONE_WITHIN_S)
        self._file(placement).close()
        self._secrets().delete(placement.token_secret)

    def remaining(self, handle: JobHandle) -> list[str]:
        """What exists of the run in the project, in all zones, with its price by the day."""
        known = self._known(handle.run_id)
        if known is None:
            return []
        _, placement = known
        left = [str(one) for one in teardown.leftovers(self._compute(placement), placement.stem)]
        return [*left, *self._secrets().labelled(placement.project, "muster-run", placement.stem)]

    # ------------------------------------------------------------ below

    def _known(self, run_id: str) -> tuple[Path, Placement] | None:
        """The run's folder on this machine, and its places; None: it was never submitted from here."""
        local = _local_dir(run_id)
        if local is None or not (local / HOME_FILE).exists() or not (local / resolved_file.NAME).exists():
            return None
        spec = RunSpec.model_validate_json(resolved_file.read(local))
        return local, place(spec, run_id=run_id, run_dir=(local / HOME_FILE).read_text().strip())

    def _file(self, placement: Placement) -> JournalFile:
        return JournalFile(store=self._store(), home=placement.home)

    def _compute(self, placement: Placement) -> Compute:
        return Compute(session=self._session(), project=placement.project)

    def _box(self, run_id: str, local: Path, home: Home, name: str) -> Box:
        token = read_token(str(local / "token"))
        return Box(store=self._store(), home=home.uri, name=name, run_id=run_id, token=token, clock=self.clock)

    def _record(self, local: Path, run_id: str, submission: str) -> None:
        record = {"version": 1, "run_id": run_id, "backend": self.name, "submission": int(submission)}
        run_registry.replace_text(local / "job.json", json.dumps(record) + "\n")

    def _handle(self, run_id: str, local: Path, placement: Placement) -> JobHandle:
        return JobHandle(run_id=run_id, backend=self.name, job_id=placement.supervisor, run_dir=str(local))

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
