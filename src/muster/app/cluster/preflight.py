"""Use case of ``muster preflight``: two steps on one small machine of the cluster, before many are queued for."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

from muster import backends
from muster.app.inspect.status import job, mirror
from muster.app.run import submit
from muster.app.run.resolve import resolved
from muster.config.load import Loaded
from muster.core.clock import SystemClock
from muster.core.errors import MusterError, UsageError
from muster.core.protocols import Clock
from muster.core.types import JobState, JobStatus
from muster.storage.run_registry import RunDir

LOOK_EVERY_S = 5.0


def preflight(
    loaded: Loaded,
    *,
    machine: str | None = None,
    mode: str | None = None,
    argv: Sequence[str] = (),
    timeout_s: float = 1800.0,
    on_word: Callable[[str], None] | None = None,
    clock: Clock | None = None,
) -> JobStatus:
    """Ask the place about the run itself, then run the rehearsal to its end, remove it from the cluster in every case,
    and say how it ended.

    Raises:
        UsageError: the back end has no preflight, or would never start the run.
        MusterError: it failed, or did not end in time; with the last sentence about it.
    """
    clock = clock or SystemClock()
    backend = backends.get(loaded.spec.backend)
    rehearse = backend.acceptance.rehearse
    if rehearse is None:
        able = backends.names_where(lambda backend: backend.acceptance.rehearse is not None)
        raise UsageError(f"there is no preflight for the back end {loaded.spec.backend!r}", hint=f"backend: {able}")
    if backend.acceptance.access is not None:
        spec, _ = resolved(loaded.spec, backends.load(loaded.spec.backend))
        for sentence in backend.acceptance.access(spec, submit.preview(loaded)):
            if on_word is not None:
                on_word(sentence)
    small = dataclasses.replace(loaded, spec=rehearse(loaded.spec, machine=machine, mode=mode), warnings=())
    run = submit.submit(small, argv=argv).run
    launcher, handle = job(run)
    try:
        status = _wait(run, clock, timeout_s, on_word)
        mirror(launcher, run)
    finally:
        launcher.cancel(handle)
    if status.state is not JobState.SUCCEEDED:
        raise MusterError(f"the preflight ended as {status.state}: {status.reason}", hint=f"muster logs {run.run_id}")
    return status


def _wait(run: RunDir, clock: Clock, timeout_s: float, on_word: Callable[[str], None] | None) -> JobStatus:
    launcher, handle = job(run)
    until, last = clock.monotonic_ns() + int(timeout_s * 1e9), ""
    while not (status := launcher.poll(handle)).state.ended:
        if status.reason != last and on_word is not None:
            on_word(status.reason)
        last = status.reason
        mirror(launcher, run)
        if clock.monotonic_ns() > until:
            raise MusterError(
                f"no end after {timeout_s:.0f} s: {last}", hint="what it waits for, the real run would too"
            )
        clock.sleep(LOOK_EVERY_S)
    return status
