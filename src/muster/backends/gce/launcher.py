"""The ``Launcher`` for Compute Engine: a run is a supervisor's machine, which makes its hosts; all have its label.

The run's folder on the user's machine holds its intent; the run itself, what was asked for (``request_log``) and how
far machines have come are in its bucket. Machines accept no connections: questions go through a mailbox there.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from muster.backends import code_bundle, run_folder, run_home
from muster.backends.gce import reason, requests, teardown
from muster.backends.gce.compute import Compute
from muster.backends.gce.placement import RUNS, Placement, place, rents, resolved
from muster.backends.gce.provision import Instance, instances_of
from muster.backends.gce.requests import Request
from muster.backends.gce.run_file_rules import rules
from muster.backends.google.http import Unreachable
from muster.backends.google.launcher import GoogleLauncher
from muster.backends.google.refusals import Cause, of_reply
from muster.backends.google.request_log import FILE as REQUESTS
from muster.backends.google.request_log import RequestLogFile
from muster.backends.google.secret_manager import SecretManager, variables
from muster.backends.google.session import NotOver
from muster.backends.run_folder import RunFiles
from muster.catalog import offers as catalogue
from muster.catalog.offers import Option
from muster.config.spec import RunSpec
from muster.core.errors import (
    AccessError,
    BackendError,
    CapacityError,
    ConflictError,
    MusterError,
    RunFileError,
    UsageError,
)
from muster.core.protocols import Clock, Store
from muster.core.typed_json import Unreadable, child, children, text
from muster.core.types import JobHandle, JobRequest, JobState, JobStatus, LogChunk, TaskSpec
from muster.storage.job_record import SUBMISSION
from muster.transport.secure_session import read_token

GONE_WITHIN_S = 600.0
"""For `down`: deleting a machine takes a minute or two; one that waits for flex-start took 39."""
BACKEND = "gce"
RESOLVED = "resolved.json"
RUN_LABEL = "muster-run"
GRANT_S = 120.0
"""A role that was just given may not hold yet."""
RETRY_S = 5.0
OPERATION_S = 600.0
ATTEMPTS = 5


@dataclass(kw_only=True)
class GceLauncher(GoogleLauncher[Placement]):
    """Runs jobs on machines in the zones that the run file names."""

    name: str = BACKEND
    follow = None

    # ------------------------------------------------------------ before

    def sold(self) -> Sequence[Option]:
        return rents(catalogue.catalogue())

    def placed(self, spec: RunSpec, run_id: str, run_dir: str | None) -> Placement:
        return place(spec, run_id=run_id, run_dir=run_dir)

    def code_dir(self, run_id: str) -> str:
        return f"{RUNS}/{run_id}"

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
        local, found = Path(request.run_dir), submission_of(request)
        placement = found.placement
        self.begin(local, request.run_id, placement.home)
        file, warnings, handle = self._file(placement), [], self.handle(request.run_id, local, placement.supervisor)
        before, _ = file.read()
        try:
            if not file.begin(request.run_id, int(placement.submission)).closed:
                warnings = found.put(self.opened(), self.secrets(), read_token(str(local / "token")).decode())
                Start(
                    placement=placement, compute=self._compute(placement), file=file, clock=self.clock,
                    report=lambda line: print(f"muster: {line}", file=sys.stderr, flush=True),
                ).run()  # fmt: skip
        except MusterError:
            if before is None:
                with contextlib.suppress(MusterError):
                    self._forget(handle, placement)
            raise
        self.record(local, request.run_id, int(placement.submission))
        return replace(handle, warnings=tuple(warnings))

    def _forget(self, handle: JobHandle, placement: Placement) -> None:
        """A run that never began leaves its home to others, and no machine that came after all."""
        self.cancel(handle)
        for name in (REQUESTS, run_home.RUN_ID):
            with contextlib.suppress(MusterError, FileNotFoundError):
                self.opened().delete(f"{placement.home}/{name}")

    # ------------------------------------------------------------ watch

    def find(self, run_id: str) -> JobHandle | None:
        """By the run's folder on this machine, which says the project, and the label there."""
        known = self.known(run_id)
        if known is None:
            return None
        local, placement = known
        log = None
        with contextlib.suppress(Unreadable):
            log, _ = self._file(placement).read()
        if log is None or log.closed or not instances_of(self._compute(placement), placement.stem):
            return None
        return self.handle(run_id, local, placement.supervisor)

    def poll(self, handle: JobHandle) -> JobStatus:
        """Look once at everything, and say it in one sentence."""
        known = self.known(handle.run_id)
        if known is None:
            return JobStatus(state=JobState.ABSENT, reason="no such run, or it was never submitted")
        local, placement = known
        home = run_home.open_of(local, self.store)
        looked = reason.look(placement, self._compute(placement), self.opened(), self._file(placement))
        end = run_home.end_of(home) if home is not None else None
        return reason.explain(looked, placement, end, self.clock.wall_ns() / 1e9)

    def logs(self, handle: JobHandle, *, after: Mapping[str, int] | None = None) -> Iterator[LogChunk]:
        """What the run's programs wrote, from its home; at most half a minute old."""
        home = self.home(handle.run_id)
        if home is not None:
            yield from run_home.logs(home, after or {})

    def box_of_host(self, run_id: str, placement: Placement, host: int) -> str:
        """By its machine's name: numbers change where one was replaced."""
        machines = instances_of(self._compute(placement), placement.stem)
        hosts = sorted(one.name for one in machines if one.request_number and one.lives)
        if not hosts:
            raise UsageError(f"{run_id} has no host now", hint=f"muster status {run_id}")
        if host >= len(hosts):
            raise UsageError(f"{run_id} has no host {host}: it has {len(hosts)}, counted from 0 ({', '.join(hosts)})")
        return hosts[host]

    # ------------------------------------------------------------ end

    def cancel(self, handle: JobHandle) -> None:
        """Close the log of requests, then remove every machine, disk, group, template, policy and the run's secret.
        Absent is success."""
        known = self.known(handle.run_id)
        if known is None:
            return
        _, placement = known
        with contextlib.suppress(ConflictError, Unreadable):  # written often; what a supervisor makes goes below
            self._file(placement).close()
        teardown.remove(self._compute(placement), placement.stem, self.clock, patience_s=GONE_WITHIN_S)
        with contextlib.suppress(Unreadable):  # of another version: no supervisor is left that reads it
            self._file(placement).close()
        self.secrets().delete(placement.token_secret)

    def remaining(self, handle: JobHandle) -> list[str]:
        """What exists of the run in the project, in all zones, with its price by the day."""
        known = self.known(handle.run_id)
        if known is None:
            return []
        _, placement = known
        left = [str(one) for one in teardown.leftovers(self._compute(placement), placement.stem)]
        return [*left, *self.secrets().labelled(placement.project, "muster-run", placement.stem)]

    # ------------------------------------------------------------ below

    def _file(self, placement: Placement) -> RequestLogFile:
        return RequestLogFile(store=self.opened(), home=placement.home)

    def _compute(self, placement: Placement) -> Compute:
        return Compute(session=self.session(), project=placement.project)


def render(spec: RunSpec, *, run_id: str, run_dir: str) -> JobRequest:
    """The requests by file, and the run file. Pure.

    Raises:
        RunFileError: rules across keys are broken; all of them at once, with reasons.
        UsageError: no such machine.
    """
    if problems := list(rules(spec)):
        raise RunFileError(problems)
    placement = place(spec, run_id=run_id, run_dir=run_dir)
    supervisor = ("python", "-m", "muster.app.supervisor", "--run-id", run_id)
    host = ("python", "-m", "muster.agent.watchdog", "--run-id", run_id)
    shown = {name: requests.text(rows) for name, rows in requests.files(placement).items()}
    return JobRequest(
        run_id=run_id,
        backend=BACKEND,
        run_dir=run_dir,
        tasks=(TaskSpec(name="supervisor", argv=supervisor), TaskSpec(name="agent", argv=host, count=placement.hosts)),
        labels={RUN_LABEL: run_id},
        files={**shown, RESOLVED: spec.model_dump_json(indent=1) + "\n"},
    )


@dataclass(frozen=True, kw_only=True)
class Submission:
    """A request with the user's own code as it is now."""

    placement: Placement
    files: RunFiles

    def put(self, store: Store, secrets: SecretManager, token: str) -> list[str]:
        """The run's files into its home, its token into a secret that both accounts may read; the same again changes
        nothing. Returns warnings.

        Raises:
            UsageError: a secret that hosts are to read is not there.
            ConflictError: the secret holds another token.
            AccessError, BackendError: refused.
        """
        version, asked = self.placement.token_secret, self.placement.spec.gce
        warnings = secrets.require(variables(self.placement.spec.secrets, asked.hugging_face_secret))
        run_folder.put(store, self.placement.home, self.files.encoded())
        secrets.create(version, token.encode(), {RUN_LABEL: self.placement.stem})
        return [*warnings, *secrets.share(version, (asked.service_account, asked.supervisor_service_account))]


def submission_of(request: JobRequest) -> Submission:
    """Raises UsageError: more code than is shipped."""
    spec = RunSpec.model_validate_json(request.files[RESOLVED])
    placement = place(spec, run_id=request.run_id, run_dir=request.run_dir)
    shipped, code = code_bundle.pack(spec, f"{RUNS}/{request.run_id}")
    files = requests.run_files(shipped, placement, code)
    sha256, number = run_folder.digest(files.encoded()), request.labels.get(SUBMISSION, "1")
    return Submission(placement=replace(placement, submission=number, files_sha256=sha256), files=files)


@dataclass(kw_only=True)
class Start:
    """Makes the supervisor's machine, once, in the first zone that has one."""

    placement: Placement
    compute: Compute
    file: RequestLogFile
    clock: Clock
    report: Callable[[str], None]

    def run(self) -> None:
        """Until it is made. Killed anywhere and run again it makes none twice.

        Raises:
            ConflictError: machines of an older submission are still being removed.
            CapacityError: no zone has one.
            AccessError, BackendError: Google refuses.
        """
        log = self.file.begin(self.placement.run_id, int(self.placement.submission))
        if log.closed:  # `down` came first
            return
        there = instances_of(self.compute, self.placement.stem)
        if any(submission_number(one) != self.placement.submission for one in there):
            self.report("removing the machines of the run's last submission")
            stem, within_s = self.placement.stem, GONE_WITHIN_S
            if left := teardown.remove(self.compute, stem, self.clock, patience_s=within_s):
                raise ConflictError(f"still being removed: {left[0]}", hint="submit again in a minute")
            there = []
        if any(one.name == self.placement.supervisor and one.status not in teardown.GOING for one in there):
            return
        zones = self.placement.zones
        if log.supervisor_zone in zones:  # a request there may be under way
            zones = zones[zones.index(log.supervisor_zone) :]
        reasons = []
        for zone in zones:
            self._intend(zone)
            if (reason := self._in(zone)) is None:
                return
            self.report(f"the supervisor's machine is not to be had in {zone}: {reason}")
            reasons.append(f"{zone}: {reason}")
        self._intend("")
        raise CapacityError("no zone has a machine for the supervisor: " + "; ".join(reasons))

    def _intend(self, zone: str) -> None:
        log, generation = self.file.read()
        if log is not None and log.supervisor_zone != zone:
            self.file.write(replace(log, supervisor_zone=zone), generation)

    def _in(self, zone: str) -> str | None:
        """None: it is there; else why ``zone`` has none."""
        own = self.compute.url(f"zones/{zone}/instances/{self.placement.supervisor}")
        for attempt in range(ATTEMPTS):
            if (reason := self._once(requests.supervisor(self.placement, zone, attempt), zone)) is not None:
                return reason
            if self.compute.get(own) is not None:
                return None
        raise BackendError(f"{own} is made and is gone again, {ATTEMPTS} times", hint="submit again in a minute")

    def _once(self, request: Request, zone: str) -> str | None:
        """As ``_in``, of one request, which may be an old one that was carried out."""
        waited_s = 0.0
        while True:
            try:
                reply = self.compute.send("POST", request.url, request.body)
            except Unreachable:
                if waited_s >= GRANT_S:
                    raise
                self._pause()
                waited_s += RETRY_S
                continue
            if reply.status < 300:
                return self._waited(self.compute.address(text(reply.body, "selfLink")))
            trouble = of_reply(reply)
            if trouble.cause is Cause.EXISTS:
                return None
            if trouble.cause in (Cause.NO_MACHINES, Cause.QUOTA):
                return str(trouble)
            transient = trouble.cause in (Cause.RATE, Cause.ACCESS) or reply.status >= 500
            if not transient or waited_s >= GRANT_S:
                kind = AccessError if trouble.cause is Cause.ACCESS else BackendError
                raise kind(
                    f"{request.what} in {zone}: {trouble}", hint="docs/how-to/gce.md lists accounts, roles, networks"
                )
            self._pause()
            waited_s += RETRY_S

    def _waited(self, operation: str) -> str | None:
        """At its end a request may turn out to have failed, although its answer was 200."""
        waited_s = 0.0
        while True:
            found = self.compute.get(operation)
            if found is None or text(found, "status") == "DONE":
                break
            if waited_s >= OPERATION_S:
                raise NotOver(f"the supervisor's machine is not made after {waited_s:.0f} s", hint="submit again")
            self._pause()
            waited_s += RETRY_S
        trouble = self.compute.why(found) if found is not None else None
        if trouble is None or trouble.cause is Cause.EXISTS:
            return None
        return str(trouble)

    def _pause(self) -> None:
        self.clock.sleep(RETRY_S)


def submission_number(machine: Instance) -> str:
    """Of the submission that a machine was made for."""
    items = children(child(machine.row, "metadata"), "items")
    return next((text(one, "value") for one in items if text(one, "key") == "muster-submission"), "")
