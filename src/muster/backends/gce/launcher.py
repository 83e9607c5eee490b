"""The ``Launcher`` for Compute Engine: a run is a supervisor's machine, which makes its hosts; all have its label.

The run's folder on the user's machine holds its intent; the run itself, what was asked for (``request_log``) and how
far machines have come are in its bucket. Machines accept no connections: questions go through a mailbox there.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from muster.backends import run_home
from muster.backends.gce import reason, teardown
from muster.backends.gce.compute import Compute
from muster.backends.gce.offers import rents
from muster.backends.gce.placement import RUNS, Placement, place, resolved
from muster.backends.gce.provision import instances_of
from muster.backends.gce.submission import BACKEND, Start, render, submission_of
from muster.backends.google.launcher import GoogleLauncher
from muster.backends.google.request_log import FILE as REQUESTS
from muster.backends.google.request_log import RequestLogFile
from muster.catalog import offers as catalogue
from muster.catalog.offers import Option
from muster.config.spec import RunSpec
from muster.core.errors import ConflictError, MusterError, UsageError
from muster.core.typed_json import Unreadable
from muster.core.types import JobHandle, JobRequest, JobState, JobStatus, LogChunk
from muster.transport.secure_session import read_token

GONE_WITHIN_S = 600.0
"""For `down`: deleting a machine takes a minute or two; one that waits for flex-start took 39."""


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
        hosts = sorted(one.name for one in machines if one.turn and one.lives)
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
