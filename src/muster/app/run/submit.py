"""Submit: check, write the intent, start, answer with the run's id. The same for every back end."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from muster import __version__, backends
from muster.app.inspect.home_view import home_of
from muster.app.inspect.status import spec_of
from muster.app.planning.prices import priced
from muster.backends.protocols import Launcher
from muster.config.load import Loaded
from muster.config.spec import RunSpec
from muster.core.errors import BackendError, ConflictError, MusterError
from muster.core.redact import redact_argv
from muster.core.typed_json import JsonObject
from muster.core.types import JobHandle, JobRequest
from muster.policy.load import load_policy
from muster.storage import run_registry
from muster.storage.home import FolderHome, Home
from muster.storage.run_registry import RunDir

#: Label that tells one submission of a run from the next.
SUBMISSION = "submission"


@dataclass(frozen=True, kw_only=True)
class Submitted:
    """A run under way."""

    run: RunDir
    spec: RunSpec
    launcher: Launcher
    handle: JobHandle
    again: bool = False
    """It was running already: nothing was started."""


@dataclass(frozen=True, kw_only=True)
class Intent:
    """A run whose folder and intent are written, and nothing started."""

    run: RunDir
    spec: RunSpec
    launcher: Launcher
    request: JobRequest
    new: bool
    """The folder was made for it."""
    running: bool = False


def submit(loaded: Loaded, *, argv: Sequence[str] = ()) -> Submitted:
    """Start the run and return at once; where ``run_dir`` holds the same run, still running, it is left alone.

    Raises:
        ConflictError: ``run_dir`` holds a run that is running with another file.
        CapacityError, AccessError, BackendError: the back end's; nothing of a new run is left then.
    """
    intent = begin(loaded, argv=argv)
    if intent.running:
        handle = intent.launcher.submit(intent.request)
        return Submitted(run=intent.run, spec=intent.spec, launcher=intent.launcher, handle=handle, again=True)
    return Submitted(run=intent.run, spec=intent.spec, launcher=intent.launcher, handle=start(intent, intent.request))


def preview(loaded: Loaded) -> JobRequest:
    """What ``submit`` would send. Looks at the machine, touches nothing."""
    launcher = backends.load(loaded.spec.backend)
    spec = resolve(loaded.spec, launcher)
    run_id = run_registry.new_run_id(spec.name)
    path, _ = _own_folder(spec, launcher)
    return launcher.render(spec, run_id=run_id, run_dir=str(path or run_registry.place(run_id, None)))


def begin(loaded: Loaded, *, argv: Sequence[str] = ()) -> Intent:
    """Resolve what only the machine knows, make the folder, log ``run.submitted``. Starts nothing."""
    launcher = backends.load(loaded.spec.backend)
    spec = resolve(loaded.spec, launcher)
    path, run_id = _own_folder(spec, launcher)
    new = run_id is None
    run_id = run_id or run_registry.new_run_id(spec.name)
    path = path or run_registry.place(run_id, None)
    resolved = spec.model_dump_json(indent=1) + "\n"
    number, running = (1, False) if new else _standing(launcher, RunDir(path=path, run_id=run_id), resolved)
    request = launcher.render(spec, run_id=run_id, run_dir=str(path))
    request = dataclasses.replace(request, labels={**request.labels, SUBMISSION: str(number)})
    run = RunDir(path=path, run_id=run_id)
    intent = Intent(run=run, spec=spec, launcher=launcher, request=request, new=new, running=running)
    if not running:
        run_registry.create(run_id, path, run_file=loaded.text, resolved=resolved)
        log_intent(run, spec, resolved, argv)
    return intent


def _own_folder(spec: RunSpec, launcher: Launcher) -> tuple[Path | None, str | None]:
    """The folder on this machine and the run in it, where the run file names one.

    Where ``run_dir`` is the pods' (a bucket), this machine's folder is found by it: the same folder is the same run.
    """
    if spec.run_dir is None:
        return None, None
    if launcher.remote is None:
        path = run_registry.place("", spec.run_dir)
        return path, run_registry.existing_id(path)
    for run_id, path in run_registry.registry():
        with contextlib.suppress(OSError, ValueError):
            held = json.loads((path / "resolved.json").read_text())
            if (held.get("backend"), held.get("run_dir")) == (spec.backend, spec.run_dir):
                return path, run_id
    return None, None


def start(intent: Intent, request: JobRequest) -> JobHandle:
    """Hand the request to the back end; a new run that could not start leaves no folder."""
    try:
        return intent.launcher.submit(request)
    except MusterError:
        if intent.new:
            discard(intent)
        raise


def discard(intent: Intent) -> None:
    """End what was started of a new run and remove its folder."""
    handle = JobHandle(run_id=intent.run.run_id, backend=intent.spec.backend, job_id="", run_dir=str(intent.run.path))
    intent.launcher.cancel(handle)
    shutil.rmtree(intent.run.path, ignore_errors=True)
    (run_registry.home() / "index" / intent.run.run_id).unlink(missing_ok=True)


def resolve(spec: RunSpec, launcher: Launcher) -> RunSpec:
    """The spec with what the machines decide filled in, and its price where hosts are rented.

    Raises:
        RunFileError: the spec does not fit the machines.
        UsageError: ``recovery.policy`` is not a policy.
    """
    if backends.get(spec.backend).capabilities.uses_this_machine:
        load_policy(spec.recovery.policy)  # an unusable file is reported now, not by a supervisor in the background
        return launcher.resolve(spec)
    return priced(launcher.resolve(spec))


def log_intent(run: RunDir, spec: RunSpec, resolved: str, argv: Sequence[str]) -> None:
    """Write ``run.submitted``, to the disk, before anything is done about it."""
    detail: JsonObject = {
        "spec_digest": run_registry.spec_digest(resolved),
        "backend": spec.backend,
        "version": __version__,
        "argv": redact_argv(argv),
        "name": spec.name,
    }
    log_event(run, "run.submitted", detail)


def log_event(run: RunDir, kind: str, detail: JsonObject) -> None:
    """Write one event of this command to where it outlives this machine: the run's home, or the disk.

    Raises:
        BackendError: the home cannot be written now.
    """
    home = _home(run)
    with contextlib.closing(home.open_log(run.run_id, "client", 0)) as log:
        log.append(kind, detail=detail)
        if not log.sync():
            raise BackendError(f"{home.uri} cannot be written: {log.unsealed}", hint="the same command again")


def _home(run: RunDir) -> Home:
    """A run that was never submitted has no home yet: its back end brings what was written here there, first."""
    with contextlib.suppress(MusterError):
        return home_of(run, backends.load(spec_of(run).backend)) or FolderHome(run.path)
    return FolderHome(run.path)


def submission(run: RunDir) -> int:
    """How often the run has been submitted."""
    try:
        return int(json.loads(run.job.read_text()).get(SUBMISSION, 1))
    except (OSError, ValueError):
        return 0


def _standing(launcher: Launcher, run: RunDir, resolved: str) -> tuple[int, bool]:
    """The submission's number for a folder that holds a run, and whether that run is running as it is."""
    number = submission(run)
    handle = launcher.find(run.run_id)
    status = launcher.poll(handle) if handle else None
    if status is None or number == 0 or status.state.ended:
        return number + 1, False
    same = run.resolved.exists() and run.resolved.read_text() == resolved
    if not same:
        raise ConflictError(
            f"{run.path} holds the run {run.run_id}, which is {status.state}",
            hint=f"muster stop {run.run_id}, or another run_dir",
        )
    return number, True
