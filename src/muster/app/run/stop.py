"""Stop (save, then end), restart (a corrected file on warm hosts) and down (end now, prove that nothing is left)."""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from muster import backends
from muster.app.inspect.status import job, mirror, spec_of
from muster.app.inspect.supervisor_client import SupervisorUnreachable, backend_of, request
from muster.app.run import submit
from muster.backends.protocols import Launcher
from muster.config import load
from muster.config.spec import RunSpec
from muster.core import event_log, resolved_file
from muster.core.clock import SystemClock
from muster.core.errors import BackendError, ConflictError, MusterError
from muster.core.protocols import Clock
from muster.core.typed_json import JsonObject
from muster.core.types import JobHandle, JobStatus
from muster.policy.load import load_policy
from muster.protocol.client import AskStatus, FromClient, RestartRun, StopRun, SupervisorStatus
from muster.storage import job_record, run_registry
from muster.storage.run_registry import RunDir

#: Beyond the run's own grace: what the supervisor and the agents need to leave.
EXTRA_S = 30.0
#: What the hosts of an ended run have to leave: trackers get the rest (``trackers.main.END_S``), the agent's programs
#: and its memory are given back first.
LEAVE_S = 30.0


@dataclass(frozen=True, kw_only=True)
class Stopping:
    run: RunDir
    status: JobStatus
    was_running: bool
    again: bool = False
    """It ended, and was started again meanwhile."""


def stop(
    reference: str,
    *,
    save: bool = True,
    force: bool = False,
    wait: bool = True,
    clock: Clock | None = None,
    source: str = "muster stop",
) -> Stopping:
    """Ask the supervisor to save and end the run, and wait until it has; an ended run is success. A new start of the
    run meanwhile is left alone. ``source``: who asks, for the log.

    Raises:
        SupervisorUnreachable: the run lives and its supervisor does not answer.
        MusterError: it did not end in time.
    """
    run = run_registry.find(reference)
    launcher, handle = job(run)
    result = launcher.poll(handle)
    if result.state.ended:
        return Stopping(run=run, status=result, was_running=False)
    clock, number = clock or SystemClock(), job_record.submission(run.path)

    def over() -> Stopping | None:
        """The outcome, once the run that was there has ended."""
        found, again = launcher.poll(handle), job_record.submission(run.path) > number > 0
        ended = again or found.state.ended
        return Stopping(run=run, status=found, was_running=True, again=again) if ended else None

    outcome = _request_until_ready(run, StopRun(source=source, save=save, force=force), clock, over)
    number = job_record.submission(run.path)  # whose supervisor has answered
    limit_s = spec_of(run).recovery.grace_s + EXTRA_S
    until = clock.monotonic_ns() + int(limit_s * 1e9)
    while wait and outcome is None and (outcome := over()) is None:
        if clock.monotonic_ns() > until:
            raise MusterError(f"{run.run_id} has not ended within {limit_s:.0f} s", hint=f"muster down {run.run_id}")
        clock.sleep(0.1)
    ended = wait and outcome is not None and not outcome.again
    if ended and backends.get(spec_of(run).backend).capabilities.uses_this_machine:
        _see_out(launcher, handle, clock, lambda: job_record.submission(run.path) > number)
    return outcome or Stopping(run=run, status=result, was_running=True)


def _see_out(launcher: Launcher, handle: JobHandle, clock: Clock, again: Callable[[], bool]) -> None:
    """The hosts of a run that has ended leave by themselves. One whose agent had not connected yet never hears of the
    end, and would wait for a supervisor: it is ended, unless the run was started ``again``."""
    until = clock.monotonic_ns() + int(LEAVE_S * 1e9)
    while launcher.remaining(handle) and not again():
        if clock.monotonic_ns() > until:
            launcher.cancel(handle)
            return
        clock.sleep(0.1)


def restart(reference: str, overrides: Sequence[str] = ()) -> RunDir:
    """Start the run again, with a corrected file, on hosts that are held after a failure of the user's own.

    Raises:
        RunFileError, UsageError: the correction does not hold.
        ConflictError: the run holds no hosts, or not such as the correction needs.
        SupervisorUnreachable: no supervisor holds hosts for this run.
    """
    run = run_registry.find(reference)
    held = request(run, AskStatus())
    if held.phase != "hold":
        raise ConflictError(
            f"{run.run_id} holds no hosts: it is in phase {held.phase}",
            hint=f"muster recover {run.run_id} starts an ended run again",
        )
    loaded = load.loads(resolved_file.read(run.path), overrides, source=str(run.resolved))
    _check_correction(run, spec_of(run), loaded.spec, held)
    resolved = loaded.spec.model_dump_json(indent=1) + "\n"
    submit.log_intent(run, loaded.spec, resolved, ("muster", "restart", reference, *overrides))
    request(run, RestartRun(), resolved=resolved)
    resolved_file.write(run.path, resolved)
    return run


#: What a held host was started with; another value needs other processes, or other machines.
_STARTED_WITH = (
    "backend", "run_dir", "env", "secrets", "workdir", "resources.ranks_per_host", "resources.device",
    "resources.threads_per_rank", "resources.machine", "resources.accelerator", "resources.provisioning_model",
    "resources.locations", "resources.reservation",
    "resources.project", "resources.cluster", "resources.image", "resources.queue",
    "parallelism.pp_schedule", "parallelism.pp_chunks",  # which layers a rank's snapshots in their memory are of
)  # fmt: skip


def _check_correction(run: RunDir, before: RunSpec, after: RunSpec, held: SupervisorStatus) -> None:
    """Refuse now what the held hosts cannot do; otherwise the run would wait indefinitely."""
    hint = f"muster stop {run.run_id}, then muster recover {run.run_id} KEY=VALUE starts new hosts"
    for key in (*_STARTED_WITH, *backends.get(before.backend).checks.fixed_keys):
        if operator.attrgetter(key)(before) != operator.attrgetter(key)(after):
            raise ConflictError(f"{key} cannot change while hosts are held: they were started with it", hint=hint)
    hosts = [host for host in held.hosts.values() if host.connected]
    needed = after.resources.min_hosts or after.resources.hosts
    if hosts and needed > len(hosts):
        raise ConflictError(f"{needed} hosts are needed, and {len(hosts)} are held", hint=hint)
    if backends.get(before.backend).capabilities.uses_this_machine:
        load_policy(after.recovery.policy)


@dataclass(frozen=True, kw_only=True)
class Down:
    run: RunDir
    left: tuple[str, ...]
    """What still exists; empty is the proof."""
    usd_per_hour: float = 0.0
    """Cost that has stopped."""

    def to_json(self) -> JsonObject:
        left, usd = list(self.left), self.usd_per_hour
        return {"run_id": self.run.run_id, "clean": not left, "left": left, "stopped_usd_per_hour": usd}


def down(reference: str) -> Down:
    """End everything of the run and check whether anything is left; absent is success.

    Raises:
        BackendError: something could not be ended.
    """
    run = run_registry.find(reference, any_format=True)
    backend = backend_of(run)
    launcher, handle = job(run, backend)  # works with a damaged run file too
    if not run_registry.is_readable(run.path):  # its records and events are not read, nor written
        launcher.cancel(handle)
        return _proven(Down(run=run, left=tuple(launcher.remaining(handle))))
    before, number = launcher.poll(handle), job_record.submission(run.path)
    before_wall_ns = SystemClock().wall_ns()
    if not before.state.ended and backends.get(backend).capabilities.uses_this_machine:
        with contextlib.suppress(MusterError):  # to a supervisor the SIGTERM that follows means a preemption
            request(run, StopRun(source="muster down", save=False, force=True))
    launcher.cancel(handle)
    left = tuple(launcher.remaining(handle))
    mirror(launcher, run)
    if left and job_record.submission(run.path) > number > 0:
        raise BackendError(
            f"{run.run_id} was ended, and started again meanwhile: {left[0]}", hint="run muster down again"
        )
    if not before.state.ended and not _finished_since(run, before_wall_ns):
        # The supervisor was ended before it could write the end.
        reason = "muster down ended it; the newest checkpoint remains"
        with contextlib.suppress(MusterError):  # a run can be ended while its bucket does not answer
            submit.log_event(run, "run.finished", {"outcome": "stopped", "exit_code": 130, "reason": reason})
    return _proven(Down(run=run, left=left))


def _proven(down: Down) -> Down:
    """Raises BackendError: something is left."""
    if down.left:
        raise BackendError(f"left of {down.run.run_id}: {'; '.join(down.left[:5])}", hint="run muster down again")
    return down


def _finished_since(run: RunDir, wall_ns: int) -> bool:
    return any(event.kind == "run.finished" and event.wall_ns >= wall_ns for _, event in event_log.read(run.events))


def _request_until_ready(
    run: RunDir, message: FromClient, clock: Clock, over: Callable[[], Stopping | None]
) -> Stopping | None:
    """A supervisor that has just been started may not be listening yet; one that has just ended never answers, and
    ``over`` says how."""
    until = clock.monotonic_ns() + 10_000_000_000
    while True:
        try:
            request(run, message)
            return None
        except SupervisorUnreachable:
            if (outcome := over()) is not None:
                return outcome
            if clock.monotonic_ns() > until:
                raise
            clock.sleep(0.2)
