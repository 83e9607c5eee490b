"""Recover: continue a run whose supervisor is gone, or that was stopped. A closed laptop is the same case."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Sequence

from muster import backends
from muster.app.inspect.status import job, spec_of
from muster.app.run import resolve, submit, train
from muster.app.run.event_writer import Sink
from muster.app.run.repair import repair_run_file
from muster.app.run.submit import Intent, Submitted
from muster.app.run.train import Ended
from muster.backends import code_bundle
from muster.config import load
from muster.config.spec import RunSpec
from muster.core import event_log, resolved_file
from muster.core.errors import ConflictError, UsageError
from muster.core.event_log import Damage
from muster.core.processes import read_plain
from muster.core.typed_json import Unreadable
from muster.core.types import JobState
from muster.policy.load import load_policy
from muster.protocol.lease import read_lease
from muster.storage import job_record, run_registry
from muster.storage.job_record import SUBMISSION
from muster.storage.run_registry import RunDir
from muster.transport.secure_session import run_token


def recover(
    reference: str, overrides: Sequence[str] = (), *, argv: Sequence[str] = (), copy_on: str | None = None
) -> Submitted:
    """Start what is missing of the run, detached: living agents are adopted, training resumes where it can.
    ``copy_on``: the host whose copy is to be the run's home from now on.

    Raises:
        ConflictError: a supervisor holds the run, or another command is starting one.
        BackendError: the supervisor ended at once; what was started with it is ended.
        UsageError: agents of another version run; the run has succeeded and nothing in it was changed; its resolved run
            file is damaged, and nothing tells what it was.
    """
    moved = [_move(reference, copy_on, overrides)] if copy_on is not None else []
    intent = _intent(reference, overrides, argv)
    damaged: list[Damage] = []
    for _ in event_log.read(intent.run.events, on_damage=damaged.append):  # its supervisor goes on without it
        pass
    handle = submit.start(intent, intent.request)
    handle = dataclasses.replace(handle, warnings=(*moved, *handle.warnings, *event_log.in_words(damaged)))
    return Submitted(run=intent.run, spec=intent.spec, launcher=intent.launcher, handle=handle)


def _move(reference: str, host: str, overrides: Sequence[str]) -> str:
    run = run_registry.find(reference)
    backend = backends.get(spec_of(run).backend)
    if backend.move is None:
        raise UsageError(f"--from {host}: hosts of backend: {backend.name} keep no copy of a run's home")
    return backend.move(run.run_id, host, _asked(run, overrides))


def _asked(run: RunDir, overrides: Sequence[str]) -> RunSpec:
    """The run file to go on with."""
    if not overrides:
        return spec_of(run)
    spec = load.loads(resolved_file.read(run.path), overrides, source=str(run.resolved)).spec
    submit.check_same_run(run, spec)
    resolve.refuse(spec)
    return spec


def recover_here(
    reference: str,
    overrides: Sequence[str] = (),
    *,
    argv: Sequence[str] = (),
    on_start: Callable[[RunDir, tuple[str, ...]], None] | None = None,
    sinks: Sequence[Sink] = (),
) -> Ended:
    """The same with the supervisor in the foreground.

    Raises as ``recover``, and:
        UsageError: the run is on another back end.
    """
    run = run_registry.find(reference)
    _mend(run)
    backend = backends.get(spec_of(run).backend)
    if not backend.capabilities.supervised_in_terminal:
        raise UsageError(
            f"--watch needs a supervisor in this terminal, which backend: {backend.name} does not have",
            hint=f"muster recover {run.run_id}, then muster watch {run.run_id}",
        )
    return train.supervise(_intent(reference, overrides, argv), on_start=on_start, sinks=sinks)


def _intent(reference: str, overrides: Sequence[str], argv: Sequence[str]) -> Intent:
    run = run_registry.find(reference)
    lock = run_registry.lock_submit(run.path)
    if lock is None:
        raise ConflictError(f"another command is starting {run.run_id}", hint=f"muster status {run.run_id} shows it")
    with contextlib.ExitStack() as held:
        held.enter_context(lock)
        _mend(run)
        intent = _checked(run, overrides, argv)
        held.pop_all()  # ``submit.start`` closes it
    return dataclasses.replace(intent, lock=lock)


def _checked(run: RunDir, overrides: Sequence[str], argv: Sequence[str]) -> Intent:
    launcher, handle = job(run)
    status = launcher.poll(handle)
    if status.tasks.get("supervisor", "").startswith("running"):
        raise ConflictError(
            f"a supervisor holds {run.run_id} ({status.tasks['supervisor']})", hint=f"muster logs -f {run.run_id}"
        )
    if status.state is JobState.SUCCEEDED and not overrides:
        further = f"muster recover {run.run_id} training.steps=... goes further"
        if spec_of(run).command is not None:
            further = f"change the script, then muster submit with run_dir={run.path} goes further"
        raise UsageError(f"{run.run_id} is done: {status.reason}", hint=further)
    if overrides and not status.state.ended:
        raise ConflictError(f"agents of {run.run_id} still run with the old file", hint=f"muster down {run.run_id}")
    spec = _asked(run, overrides)
    if overrides and spec.workdir is not None and spec.workdir != spec_of(run).workdir and launcher.remote is None:
        spec, code = code_bundle.pack(spec, str(run.path), limit_bytes=code_bundle.SHARED_LIMIT_BYTES)
        code_bundle.unpack(code or b"", run.path)
    if launcher.remote is None:
        if not status.state.ended:
            _check_agents(run)
        _check_folder(run)
        load_policy(spec.recovery.policy)
    resolved = spec.model_dump_json(indent=1) + "\n"
    submit.log_intent(run, spec, resolved, argv)
    resolved_file.write(run.path, resolved)
    request = launcher.render(spec, run_id=run.run_id, run_dir=str(run.path))
    number = job_record.submission(run.path) + 1
    request = dataclasses.replace(request, labels={**request.labels, SUBMISSION: str(number)})
    return Intent(run=run, spec=spec, launcher=launcher, request=request, new=False, running=not status.state.ended)


def _mend(run: RunDir) -> None:
    if (said := repair_run_file(run, resolve.again)) is not None:
        submit.log_event(run, "run.message", {"text": said})


def _check_agents(run: RunDir) -> None:
    """Raise OtherVersion where the agents that live are of another version: they serve no supervisor of this one."""
    with contextlib.suppress(OSError, Unreadable):
        read_lease(read_plain(run.lease), me="this command")


def _check_folder(run: RunDir) -> None:
    """What a supervisor reads first: a lost token is reported here, not in a log that is not read.

    Raises:
        AccessError: the token is gone, or others can read it.
    """
    run_token(run.path)
