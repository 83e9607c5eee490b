"""One submission of a run to Compute Engine: what is put where, and the supervisor's machine, which asks for hosts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from muster.backends import code_bundle, run_folder
from muster.backends.gce import requests, teardown
from muster.backends.gce.compute import Compute
from muster.backends.gce.placement import RUNS, Placement, place
from muster.backends.gce.provision import Instance, instances_of
from muster.backends.gce.requests import Request
from muster.backends.gce.run_file_rules import rules
from muster.backends.google.http import Unreachable
from muster.backends.google.refusals import Cause, of_reply
from muster.backends.google.request_log import RequestLogFile
from muster.backends.google.secret_manager import SecretManager, variables
from muster.backends.google.session import NotOver
from muster.backends.run_folder import RunFiles
from muster.backends.run_home import SUBMISSION
from muster.config.spec import RunSpec
from muster.core.errors import AccessError, BackendError, CapacityError, ConflictError, RunFileError
from muster.core.protocols import Clock, Store
from muster.core.typed_json import child, children, text
from muster.core.types import JobRequest, TaskSpec

BACKEND = "gce"
RESOLVED = "resolved.json"
RUN_LABEL = "muster-run"
GONE_WITHIN_S = 600.0
GRANT_S = 120.0
"""A role that was just given may not hold yet."""
RETRY_S = 5.0
OPERATION_S = 600.0
ATTEMPTS = 5


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
