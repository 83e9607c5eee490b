"""Submit: check, write the intent, start, answer with the run's id. The same for every back end."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from muster import __version__, backends
from muster.app.inspect.home_view import home_of
from muster.app.inspect.status import spec_of
from muster.app.planning.source_run import located
from muster.app.run import resolve
from muster.app.run.repair import as_submitted
from muster.backends import code_bundle
from muster.backends.protocols import Launcher
from muster.config.load import Loaded, given, loads
from muster.config.run_environment import read_secrets
from muster.config.spec import RunSpec
from muster.core import environment, event_log, resolved_file
from muster.core.errors import BackendError, ConflictError, MusterError, RunFileError, UsageError
from muster.core.processes import open_plain, read_plain
from muster.core.redact import hide_values, redact_argv
from muster.core.resolved_file import DamagedRunFile
from muster.core.typed_json import Json, JsonObject, child, children, parse_object, text, texts
from muster.core.types import JobHandle, JobRequest
from muster.storage import job_record, run_registry, run_secrets, uris
from muster.storage.home import FolderHome, Home
from muster.storage.job_record import SUBMISSION
from muster.storage.run_registry import RunDir
from muster.storage.store import open_store
from muster.storage.store.local import check_conditional_writes
from muster.supervise.process.lease import newest_term

#: Longest wait for a supervisor to hold the run: its imports, and a lease that it has to see expire.
FIRST_WORD_S = 30.0
Tell = Callable[[str], None]


@dataclass(frozen=True, kw_only=True)
class Submitted:
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
    """The run began with it."""
    made: bool = True
    """The folder was made for it; else it was there, empty, and stays."""
    running: bool = False
    lock: BinaryIO | None = None
    """No other submit starts a run there until it is closed, which ``start`` does."""


def submit(
    run_file: Loaded | str | Path,
    overrides: Sequence[str] = (),
    *,
    argv: Sequence[str] = (),
    tell: Tell = lambda _text: None,
) -> Submitted:
    """Start the run and return at once; where ``run_dir`` holds the same run, still running, it is left alone.

    Raises:
        UsageError: ``run_dir`` holds another run; nothing was written.
        ConflictError: ``run_dir`` holds a run that is running with another file, or another submit starts one there
        now. CapacityError, AccessError, BackendError: the back end's; nothing of a new run is left then.
    """
    intent = begin(given(run_file, overrides), argv=argv, tell=tell)
    handle = start(intent, intent.request)
    return Submitted(run=intent.run, spec=intent.spec, launcher=intent.launcher, handle=handle, again=intent.running)


def preview(loaded: Loaded) -> JobRequest:
    """What ``submit`` would send. Looks at the machine, touches nothing."""
    launcher = backends.load(loaded.spec.backend)
    with _placing(loaded):
        spec, _ = resolve.resolved(loaded.spec, launcher)
    run_id = run_registry.new_run_id(spec.name)
    path, held = _own_folder(spec, launcher)
    if path is not None and held is not None:
        check_same_run(RunDir(path=path, run_id=held), located(spec))
    with _placing(loaded):
        return launcher.render(spec, run_id=run_id, run_dir=str(path or run_registry.place(run_id, None)))


@contextlib.contextmanager
def _placing(loaded: Loaded) -> Iterator[None]:
    """What a back end finds wrong with the run file is reported with file and line."""
    try:
        yield
    except RunFileError as error:
        raise loaded.placed(error) from error


def begin(loaded: Loaded, *, argv: Sequence[str] = (), tell: Tell = lambda _text: None) -> Intent:
    """Resolve what only the machine knows, make the folder, log ``run.submitted``. Starts nothing.

    ``tell``: what was packed, in one line.

    Raises as ``submit``.
    """
    launcher = backends.load(loaded.spec.backend)
    with _placing(loaded):
        spec, layout_reason = resolve.resolved(resolve.with_weights(loaded.spec, tell), launcher)
    path, held = _own_folder(spec, launcher)
    if path is not None and held is not None:
        check_same_run(RunDir(path=path, run_id=held), spec)
    made = path is None or not path.exists()
    lock = _alone(spec, launcher)
    try:
        path, held = _own_folder(spec, launcher)  # a faster submit may have made it meanwhile
        intent = _begin(loaded, spec, launcher, path, held, argv, tell)
        if layout_reason is not None and not intent.running:
            tell(layout_reason)
            log_event(intent.run, "run.message", {"text": layout_reason})
        if intent.running and lock is not None:
            lock.close()  # nothing is started
        return dataclasses.replace(intent, made=made, lock=None if intent.running else lock)
    except BaseException:
        if lock is not None:
            if path is not None and launcher.remote is None:
                run_registry.unlock_submit(path, made=made)
            lock.close()
        raise


def _begin(
    loaded: Loaded,
    spec: RunSpec,
    launcher: Launcher,
    path: Path | None,
    run_id: str | None,
    argv: Sequence[str],
    tell: Tell,
) -> Intent:
    new = run_id is None
    secrets = read_secrets(spec.secrets, environment.inherited())
    hide_values(secrets.values())
    run_id = run_id or run_registry.new_run_id(spec.name)
    path = path or run_registry.place(run_id, None)
    run = RunDir(path=path, run_id=run_id)
    code = None
    if spec.workdir is not None and launcher.remote is None:  # to pods it goes at submission
        spec, code = code_bundle.pack(spec, str(path), limit_bytes=code_bundle.SHARED_LIMIT_BYTES)
    resolved = spec.model_dump_json(indent=1) + "\n"
    if not new:
        check_same_run(run, spec)
    number, running = (1, False) if new else _standing(launcher, run, resolved)
    with _placing(loaded):
        request = launcher.render(spec, run_id=run_id, run_dir=str(path))
    request = dataclasses.replace(request, labels={**request.labels, SUBMISSION: str(number)})
    intent = Intent(run=run, spec=spec, launcher=launcher, request=request, new=new, running=running)
    if not running:
        if launcher.remote is None:
            _check_file_systems(spec, path)
        damaged = None if new else _set_damaged_aside(run)
        run_registry.create(run_id, path, run_file=loaded.text, resolved=resolved)
        run_secrets.write(path, secrets)
        if code is not None:
            code_bundle.unpack(code, path)
            tell(code_bundle.described(code))
        if damaged is not None:
            log_event(run, "run.message", {"text": f"{damaged}; this submit rewrites it"})
        log_intent(run, spec, resolved, argv, planned_step_s=loaded.planned_step_s)
    return intent


def _check_file_systems(spec: RunSpec, path: Path) -> None:
    """Raise UsageError where leases, fences or commits cannot be written in the run's folder or its checkpoints'."""
    if not path.parent.exists():  # in one that exists, /tmp for example, the run's folder alone is ours
        run_registry.make_folder(path.parent)
    checkpoints = spec.checkpoint_uri(path)
    named = (path, uris.local_path(checkpoints)) if uris.is_local(checkpoints) else (path,)
    for folder in {folder if folder.is_dir() else folder.parent for folder in named}:
        if os.access(folder, os.W_OK):  # else there is none yet, or `create` says what is wrong with it
            check_conditional_writes(folder)


def _alone(spec: RunSpec, launcher: Launcher) -> BinaryIO | None:
    """The lock of the folder that the run file names, on this machine; None: each submit has a folder of its own.

    Raises:
        ConflictError: another submit holds it.
    """
    if spec.run_dir is None:
        return None
    if launcher.remote is None:
        path = run_registry.place("", spec.run_dir)
        lock = run_registry.lock_submit(path)
    else:  # the pods' folder: this machine's has another name for each run
        name = f".submit.{hashlib.sha256(spec.run_dir.encode()).hexdigest()[:16]}.lock"
        path = None
        lock = run_registry.lock_submit(run_registry.home(), name)
    if lock is None:
        starting = (run_registry.existing_id(path) if path is not None else None) or "a run"
        raise ConflictError(
            f"another muster submit is starting {starting} in {spec.run_dir}", hint="muster status shows it"
        )
    return lock


def check_same_run(run: RunDir, spec: RunSpec) -> None:
    """Raise UsageError where ``spec`` is another run than the one in the folder: of another model, another command,
    other kinds of data, or where nothing there says which one it holds. Any other difference is a change of the same
    run.
    """
    held, before = _held(run)
    now = _identity(parse_object(spec.model_dump_json()))
    for key, value in before.items():
        if now[key] != value:
            words = ", ".join([str(held.get("name")), *_model_words(held), *_step_words(run)])
            raise UsageError(
                f"{run.path} holds {run.run_id} ({words}): its {key} is {_short(value)}, not {_short(now[key])}",
                hint="choose another run_dir",
            )


def _held(run: RunDir) -> tuple[JsonObject, Mapping[str, Json]]:
    """The run in the folder, and its identity: by its run file as given where ``resolved.json`` is damaged; empty where
    that was never written (a submit was killed)."""
    try:
        held = parse_object(resolved_file.read(run.path))
        return held, _identity(held)
    except FileNotFoundError:
        return {}, {}
    except (OSError, DamagedRunFile) as error:
        problem: Exception = error
    try:
        if (found := as_submitted(run, resolve.again)) is not None:
            held = parse_object(found)
        else:
            held = parse_object(loads(read_plain(run.run_file).decode(), environment=False).spec.model_dump_json())
        return held, _identity(held)
    except (OSError, ValueError, MusterError) as error:
        both = f"resolved.json ({problem}) nor run.yaml ({str(error).partition(chr(10))[0]})"
        raise UsageError(
            f"{run.path} holds {run.run_id}, of which neither {both} can be read: it may be another run",
            hint="choose another run_dir, or bring one of the two files back",
        ) from error


def _set_damaged_aside(run: RunDir) -> str | None:
    """What is wrong with ``resolved.json``, of which a copy is kept then; None: nothing, or it is not there."""
    try:
        resolved_file.read(run.path)
    except DamagedRunFile as error:
        resolved_file.set_aside(run.path)
        return f"{error} (kept as {resolved_file.DAMAGED})"
    except OSError:
        pass
    return None


def _identity(resolved: JsonObject) -> Mapping[str, Json]:
    """What makes a run that run. A script's own arguments are no part of it."""
    model, command = child(resolved, "model"), texts(resolved, "command")
    lora = child(model, "lora")
    return {
        "model": {name: model.get(name) for name in ("source", "config", "revision", "tokenizer") if model.get(name)},
        "model.lora": {name: lora.get(name) for name in ("rank", "targets") if lora},
        "command": command[: 2 if command[:1] == ["-m"] else 1],
        "data.sources": sorted({text(source, "type") for source in children(resolved, "data", "sources")}),
    }


def _model_words(resolved: JsonObject) -> list[str]:
    model = child(resolved, "model")
    words = text(model, "source") or text(model, "config", "model_type") or text(model, "config")
    return [words or " ".join(texts(resolved, "command")[:2])]


def _step_words(run: RunDir) -> list[str]:
    with contextlib.suppress(MusterError, OSError):
        steps = [event.step for event in event_log.merged(run.events) if event.kind == "step"]
        return [f"step {max(step or 0 for step in steps)}"] if steps else ["no step yet"]
    return []


def _short(value: Json) -> str:
    words = json.dumps(value)
    return words if len(words) <= 100 else f"{words[:97]}..."


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
        with contextlib.suppress(OSError, ValueError, MusterError):
            held, _ = _held(RunDir(path=path, run_id=run_id))
            if (held.get("backend"), held.get("run_dir")) == (spec.backend, spec.run_dir):
                return path, run_id
    return None, None


def start(intent: Intent, request: JobRequest) -> JobHandle:
    """Hand the request to the back end, wait for a supervisor of this machine, and let others submit; a new run that
    could not start leaves nothing.

    Raises:
        BackendError: the supervisor ended before it held the run, with its reason; or as the back end.
    """
    is_here = backends.get(intent.spec.backend).capabilities.supervised_in_terminal
    try:
        if is_here and any(task.name == "supervisor" for task in request.tasks):
            return _start_supervised(intent, request)
        return intent.launcher.submit(request)
    except MusterError as error:
        if intent.new:
            discard(intent, error)
        raise
    finally:
        if intent.lock is not None:
            intent.lock.close()


def _start_supervised(intent: Intent, request: JobRequest) -> JobHandle:
    log = intent.run.logs / "supervisor.log"
    lease, store = str(intent.run.lease), open_store()
    term, log_bytes = newest_term(store, lease), log.stat().st_size if log.exists() else 0
    handle = intent.launcher.submit(request)
    until = time.monotonic() + FIRST_WORD_S
    while time.monotonic() < until:
        task = intent.launcher.poll(handle).tasks.get("supervisor")
        if task is None or newest_term(store, lease) > term:
            return handle
        if not task.startswith("running"):
            if not intent.running:
                intent.launcher.cancel(handle)  # what was started with it; the lock keeps other submits out
            raise _last_words(log, log_bytes)
        time.sleep(0.05)
    late = f"its supervisor has not begun in {FIRST_WORD_S:g} s; muster logs {intent.run.run_id} shows why"
    return dataclasses.replace(handle, warnings=(*handle.warnings, late))


def _last_words(log: Path, after: int) -> BackendError:
    """What a supervisor that ended at once wrote beyond ``after`` bytes of its output."""
    lines = []
    with contextlib.suppress(OSError), open_plain(log) as file:
        file.seek(after)
        lines = file.read().decode(errors="replace").splitlines()
    errors = [line.removeprefix("error: ") for line in lines if line.startswith("error: ")]
    hints = [line.removeprefix("hint: ") for line in lines if line.startswith("hint: ")]
    reason = (errors or lines or ["it wrote nothing"])[-1]
    return BackendError(f"the supervisor ended at once: {reason}", hint=hints[-1] if hints else f"see {log}")


def discard(intent: Intent, error: MusterError) -> None:
    """End what was started of a new run, and remove its folder or, where that was there before, what is in it.

    Raises:
        BackendError: it could not be ended, so it is not known what is left; the folder stays, for `muster down`.
    """
    run_id = intent.run.run_id
    handle = JobHandle(run_id=run_id, backend=intent.spec.backend, job_id="", run_dir=str(intent.run.path))
    try:
        if error.asked:
            intent.launcher.cancel(handle)
    except MusterError as problem:
        text = f"{error}; what there may be of {run_id} could not be ended: {problem}"
        raise BackendError(text, hint=f"muster down {run_id} tries again") from error
    run_registry.clear(intent.run.path, made=intent.made)
    (run_registry.home() / "index" / intent.run.run_id).unlink(missing_ok=True)


def log_intent(
    run: RunDir, spec: RunSpec, resolved: str, argv: Sequence[str], *, planned_step_s: Mapping[str, float] | None = None
) -> None:
    """Write ``run.submitted``, to the disk, before anything is done about it."""
    detail: JsonObject = {
        "spec_digest": resolved_file.digest(resolved),
        "backend": spec.backend,
        "version": __version__,
        "argv": redact_argv(argv),
        "name": spec.name,
        **({"plan": {"step_s_by_item": planned_step_s}} if planned_step_s else {}),
    }
    log_event(run, "run.submitted", detail)


def log_event(run: RunDir, kind: str, detail: JsonObject) -> None:
    """Write one event of this command to where it outlives this machine: the run's home, or the disk.

    Raises:
        BackendError: the home, or the disk, cannot be written now.
    """
    home = _home(run)
    with contextlib.closing(home.open_log(run.run_id, "client", 0)) as log:
        log.append(kind, detail=detail)
        if not log.sync():
            raise BackendError(f"{home.uri} cannot be written: {log.unsealed}", hint="the same command again")
        if log.trouble is not None:  # it would be gone with this process
            raise BackendError(f"{log.path} cannot be written: {log.trouble}", hint="make room, then the same command")


def _home(run: RunDir) -> Home:
    """A run that was never submitted has no home yet: its back end brings what was written here there, first."""
    with contextlib.suppress(MusterError):
        return home_of(run, backends.load(spec_of(run).backend)) or FolderHome(run.path)
    return FolderHome(run.path)


def _standing(launcher: Launcher, run: RunDir, resolved: str) -> tuple[int, bool]:
    """The submission's number for a folder that holds a run, and whether that run is running as it is."""
    number = job_record.submission(run.path)
    handle = launcher.find(run.run_id)
    status = launcher.poll(handle) if handle else None
    if status is None or number == 0 or status.state.ended:
        return number + 1, False
    try:
        same = resolved_file.read(run.path) == resolved
    except (OSError, DamagedRunFile):  # its supervisor rewrites it
        same = False
    if not same:
        raise ConflictError(
            f"{run.path} holds the run {run.run_id}, which is {status.state}",
            hint=f"muster stop {run.run_id}, or another run_dir",
        )
    return number, True
