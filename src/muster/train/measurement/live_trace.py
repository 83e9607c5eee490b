"""Traces of steps of a process that trains: no restart, no changed bit.

A profiler (``Recorder``) records what the process does between a step's begin and another's end; nothing that is
computed depends on it. While a trace is written the rank is blocked, and the others wait for it in their next sum.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from muster.protocol.ranks import AgentClient
from muster.protocol.values import TraceSteps

#: More steps in one trace than anybody reads, and than a page in a browser takes.
MOST_STEPS = 100
#: How long the first use of the profiler, or the writing of a trace, counts as progress.
LIMIT_S = 600.0


class Recorder(Protocol):
    """Of what a process does between two moments: torch's profiler, or XLA's (``train_jax.trace``)."""

    def start(self) -> object: ...

    def stop(self) -> object: ...

    def export_chrome_trace(self, path: str) -> object: ...


def torch_profiler() -> Recorder:
    """Raises RuntimeError where a script's own is at work: to prepare another one would disturb it."""
    import torch  # a user's own loop may have none

    if torch.autograd.profiler._is_profiler_enabled:
        raise RuntimeError("a profiler of the script's own is at work")
    return torch.profiler.profile(record_shapes=True)


class LiveTrace:
    """One trace at a time: a request of ``muster profile`` that comes meanwhile waits. Never raises: if the profiler
    fails, the run goes on without its trace.

    Writes ``DIRECTORY/step-K.rank-R.json`` or ``steps-K-L.rank-R.json`` (Chrome trace format), under this name once it
    is whole, and reports it as ``trace.written``.
    """

    def __init__(
        self,
        agent: AgentClient,
        *,
        directory: Path,
        rank: int,
        recorder: Callable[[], Recorder] = torch_profiler,
    ) -> None:
        self._agent, self._directory, self._rank, self._recorder = agent, directory, rank, recorder
        self._request: TraceSteps | None = None
        self._running: Recorder | None = None
        self._first = self._left = 0

    def begin(self, step: int, asked: TraceSteps | None = None) -> None:
        """A step begins. ``asked``: this very step is to be traced; what is being traced is given up for it."""
        if asked is not None:
            self.close()
        if self._request is not None:
            return
        self._request = asked or self._agent.next_trace()
        if self._request is None:
            return
        self._first, self._left = step, min(max(1, self._request.steps), MOST_STEPS)
        self._agent.progress(for_s=LIMIT_S)
        try:
            self._running = self._recorder()
            self._running.start()
        except Exception as error:  # noqa: BLE001 (any error of a library: training goes on)
            self._fail(f"the profiler cannot start: {error}")
        self._agent.progress()

    def end(self, step: int) -> None:
        """A step ends: once it is the last one of the trace, write it.

        Steps are counted, not subtracted: in a user's own loop their numbers may jump or restart.
        """
        if self._request is None or self._running is None:
            return
        self._left -= 1
        if self._left > 0:
            return
        self._agent.progress(for_s=LIMIT_S)
        began = time.monotonic_ns()
        steps = f"step-{step}" if step == self._first else f"steps-{self._first}-{step}"
        path = self._directory / f"{steps}.rank-{self._rank}.json"
        try:
            size = _write(self._running, path)
        except Exception as error:  # noqa: BLE001 (as above)
            self._fail(f"the trace cannot be written: {error}", step=step)
        else:
            request, self._request, self._running = self._request, None, None
            self._agent.emit(
                "trace.written",
                step=step,
                request=request.request,
                first_step=self._first,
                file=f"{self._directory.name}/{path.name}",
                bytes=size,
                write_ns=time.monotonic_ns() - began,
            )
        self._agent.progress()

    def close(self) -> None:
        """Give up what was begun: no step follows in this world, or another trace begins."""
        if self._running is not None:
            with contextlib.suppress(Exception):
                self._running.stop()
            self._fail("the attempt or the run ended before its last step, or training.profile traces the step")

    def _fail(self, problem: str, *, step: int | None = None) -> None:
        request, self._request, self._running = self._request, None, None
        assert request is not None
        text = " ".join(problem.split())[:500]
        self._agent.emit("trace.written", step=step, request=request.request, first_step=self._first, problem=text)


def _write(trace: Recorder, path: Path) -> int:
    """Bytes. Under its name once it is whole; what is not is removed."""
    part = path.with_suffix(".part")
    trace.stop()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        trace.export_chrome_trace(str(part))
        with part.open("rb") as file:  # the profiler's writer says nothing of a disk that is full
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - 64))
            if not file.read().rstrip().endswith(b"}"):
                raise OSError(f"it is cut after {size} bytes")
        os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)
    return size
