"""Status: one look at a run, or at every run of this machine."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from muster import backends
from muster.app.inspect.event_format import total_steps
from muster.app.inspect.home_view import as_of_now, fetch, home_of, status_in
from muster.app.inspect.supervisor_client import request
from muster.backends.protocols import Launcher
from muster.config.load import first_problem
from muster.config.spec import RunSpec
from muster.core import resolved_file
from muster.core.clock import SystemClock
from muster.core.errors import MusterError
from muster.core.event_log import Damage
from muster.core.resolved_file import DamagedRunFile
from muster.core.typed_json import JsonObject
from muster.core.types import JobHandle, JobState, JobStatus
from muster.protocol.client import AskStatus, SupervisorStatus
from muster.protocol.lease import HomeStatus
from muster.storage import run_registry
from muster.storage.run_registry import RunDir

if TYPE_CHECKING:
    from muster.report.log_folder import Progress


@dataclass(frozen=True, kw_only=True)
class Summary:
    """How far a run is: from its events, or in its supervisor's words."""

    name: str | None
    attempt: int
    last_step: int | None
    final_loss: float | None
    tokens: int
    tokens_per_s: float | None
    incident_count: int
    snapshots: str | None = None
    """How often the ranks take snapshots in memory, and why; None: not said yet, or not known here."""
    total_steps: int | None = None
    began_ns: int | None = None
    """Wall clock of its submission."""
    ended_ns: int | None = None
    step_every_s: float | None = None
    """From step to step, lately, evaluations and saves included."""
    usd: float | None = None
    """So far; None: not known."""

    @staticmethod
    def of_events(progress: Progress, run: RunDir, spec: RunSpec, now_ns: int) -> Summary:
        """``now_ns``: until then hosts that it holds are paid for."""
        view = progress.view
        return Summary(
            name=view.name,
            attempt=view.attempt,
            last_step=progress.last_step,
            final_loss=progress.final_loss,
            tokens=progress.tokens,
            tokens_per_s=progress.speed.tokens_per_s,
            incident_count=view.incident_count,
            snapshots=view.snapshots.reason if view.snapshots else None,
            total_steps=total_steps(spec, view.data),
            began_ns=view.began_ns if view.began_ns is not None else _made_ns(run),
            ended_ns=view.newest_ns if view.outcome else None,
            step_every_s=progress.step_every_s,
            usd=view.usd(None if view.outcome else now_ns),
        )

    @staticmethod
    def of_home(said: HomeStatus, run: RunDir, spec: RunSpec) -> Summary:
        """What it costs is not in there: it is in its events (``muster report``)."""
        return Summary(
            name=spec.name,
            total_steps=spec.training.steps,
            began_ns=_made_ns(run),
            attempt=said.status.attempt,
            last_step=said.status.step or None,
            final_loss=said.loss,
            tokens=said.tokens,
            tokens_per_s=said.tokens_per_s,
            incident_count=said.incidents,
        )


@dataclass(frozen=True, kw_only=True)
class RunStatus:
    run: RunDir
    backend: str
    status: JobStatus
    summary: Summary
    live: SupervisorStatus | None = None
    """The supervisor's own status, where one answers."""
    damaged: tuple[Damage, ...] = ()
    """Places of the event log that were left out."""

    @property
    def eta_s(self) -> float | None:
        """Seconds that its steps still take at the pace of the last ones; None: it does not train, or is too new."""
        made, total = self.summary.last_step, self.summary.total_steps
        pace = self.summary.step_every_s
        trains = self.status.state is JobState.RUNNING and (self.live is None or self.live.phase == "run")
        return max(0, total - made) * pace if trains and made and total and pace is not None else None

    def to_json(self) -> JsonObject:
        summary = self.summary
        return {
            "run_id": self.run.run_id,
            "run_dir": str(self.run.path),
            "name": summary.name,
            "backend": self.backend,
            "state": self.status.state.value,
            "reason": self.status.reason,
            "now": self.live.reason if self.live else None,
            "exit_code": self.status.exit_code,
            "tasks": dict(self.status.tasks),
            "phase": self.live.phase if self.live else None,
            "attempt": summary.attempt,
            "step": summary.last_step,
            "total_steps": summary.total_steps,
            "eta_s": self.eta_s,
            "began": _moment(summary.began_ns),
            "ended": _moment(summary.ended_ns),
            "usd": summary.usd,
            "loss": summary.final_loss,
            "tokens": summary.tokens,
            "tokens_per_s": summary.tokens_per_s,
            "snapshots": summary.snapshots,
            "incidents": summary.incident_count,
            "damaged": [damage.to_json() for damage in self.damaged],
        }


def status(reference: str) -> RunStatus:
    """The run that ``reference`` names.

    Raises:
        UsageError: there is no such run.
    """
    run = run_registry.find(reference)
    launcher, handle = job(run)
    result = launcher.poll(handle)
    home = home_of(run, launcher)
    said = status_in(home) if home is not None else None
    live: SupervisorStatus | None = None
    damaged: list[Damage] = []
    now_ns, spec = SystemClock().wall_ns(), spec_of(run)
    if said is not None:  # a run in a bucket is not read event by event for one look
        summary = Summary.of_home(said, run, spec)
        live = None if result.state.ended else as_of_now(said, now_ns)
    else:
        mirror(launcher, run, damaged.append)
        # numpy, which verbs that only look a run up do without
        from muster.report import log_folder
        from muster.report.log_folder import progress

        folder = log_folder.read(run.events)
        damaged += folder.damaged
        summary = Summary.of_events(progress(folder), run, spec, now_ns)
        live = None if result.state.ended else supervisor_status(run)
    return RunStatus(run=run, backend=launcher.name, status=result, summary=summary, live=live, damaged=tuple(damaged))


def all_runs(*, on_unreadable: Callable[[str, str], None] = lambda run_id, reason: None) -> list[RunStatus]:
    """Every run of this user on this machine, newest first; ``on_unreadable`` gets (id, reason) of the others."""
    result = []
    for run_id, _ in run_registry.registry():
        try:
            result.append(status(run_id))
        except MusterError as error:
            on_unreadable(run_id, str(error))
    return sorted(result, key=lambda found: found.summary.began_ns or 0, reverse=True)


def supervisor_status(run: RunDir, *, timeout_s: float = 1.0) -> SupervisorStatus | None:
    """What the run's supervisor says of it; None where none answers in time."""
    try:
        return request(run, AskStatus(), timeout_s=timeout_s)
    except MusterError:
        return None


def job(run: RunDir, backend: str | None = None) -> tuple[Launcher, JobHandle]:
    """The run's back end (by name, or as its run file says) and its handle there. Raises as ``spec_of``."""
    launcher = backends.load(backend or spec_of(run).backend)
    handle = launcher.find(run.run_id) or JobHandle(
        run_id=run.run_id, backend=launcher.name, job_id="", run_dir=str(run.path)
    )
    return launcher, handle


def mirror(launcher: Launcher, run: RunDir, on_damage: Callable[[Damage], None] = lambda damage: None) -> None:
    """Bring the events of a run whose folder is elsewhere; what cannot be reached now stays as it was.

    ``on_damage``: called with what is damaged there.
    """
    if (home := home_of(run, launcher)) is not None:
        fetch(home, run, "events", on_damage)
    elif launcher.remote is not None:
        with contextlib.suppress(MusterError):
            launcher.remote.mirror(run.run_id, run.events)


def spec_of(run: RunDir) -> RunSpec:
    """The run's resolved file.

    Raises:
        MusterError: it is absent or of another version.
    """
    try:
        return RunSpec.model_validate_json(resolved_file.read(run.path))
    except OSError as error:
        raise MusterError(f"{run.path} holds no resolved.json", hint="was the submit interrupted?") from error
    except DamagedRunFile as error:
        raise DamagedRunFile(str(error), hint=f"muster recover {run.run_id} rewrites it") from error
    except ValueError as error:
        raise MusterError(
            f"{run.resolved} was not written by this version of Muster: {first_problem(error)}"
        ) from error


def _made_ns(run: RunDir) -> int | None:
    """Of its token, which is written once, by the submission."""
    try:
        return run.token.stat().st_mtime_ns
    except OSError:
        return None


def _moment(wall_ns: int | None) -> str | None:
    if wall_ns is None:
        return None
    return datetime.fromtimestamp(wall_ns / 1e9, tz=UTC).isoformat(timespec="seconds").replace("+00:00", "Z")
