"""The judge of SQL as its caller sees it: one child a process, started when first asked, ended when a query will not.

Ranks have threads and a CUDA context: the child is a new program that inherits none of their descriptors.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import select
import signal
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import dataclass, replace
from typing import IO, Literal

from muster.core import environment
from muster.core.errors import MusterError, UsageError
from muster.core.typed_json import Unreadable, decode, encode
from muster.tasks.text2sql.judge import Ask, Begun, Said, Usable
from muster.tasks.text2sql.sql_execution import Outcome

#: Beyond a query's own limit, at which the child itself stops all but a single slow function.
GRACE_S = 0.5
#: Of a new child until it has said so: imports on a machine under load.
_START_LIMIT_S = 120.0


class JudgeProcess:
    """A child that judges. One caller at a time; safe among threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._child: _Child | None = None

    def judge(self, ask: Ask) -> Outcome:
        """The outcome of ``ask.predicted``. Never raises for what that query does or holds.

        Raises:
            UsageError: the database is missing or unreadable, or a gold query does not run.
            MusterError: the child cannot be started, or failed by itself: that is no verdict on a query.
        """
        found = self._ask(ask)
        if isinstance(found, _Ended):
            is_gold = found.stage != "predicted"
            return Outcome(correct=False, reason=f"gold query: {found.why}" if is_gold else found.why)
        assert found.verdict is not None
        return Outcome(correct=found.verdict.correct, reason=found.verdict.reason, rows=found.verdict.rows)

    def unusable(self, ask: Ask) -> tuple[str | None, ...]:
        """For each of ``ask.golds`` why it cannot be used; None: it runs and returns rows. Errors as ``judge``."""
        problems: list[str | None] = []
        for gold in ask.golds:  # apart: the end of one says nothing of the others
            found = self._ask(Ask(golds=(gold,), timeout_s=ask.timeout_s, path=ask.path))
            usable = found.usable or () if isinstance(found, Said) else (Usable(problem=found.why),)
            problems += [each.problem for each in usable]
        return tuple(problems)

    def close(self) -> None:
        """End the child; the next question starts another."""
        with self._lock:
            if self._child is not None:
                self._child.end()
                self._child = None

    def forget(self) -> None:
        """In a fork: the child is the parent's."""
        self._lock, self._child = threading.Lock(), None

    def _ask(self, ask: Ask) -> Said | _Ended:
        """The answer, or in which query the child was ended. Raises as ``judge``."""
        if ask.path is not None:
            ask = replace(ask, path=os.path.abspath(ask.path))  # the child is elsewhere
        with self._lock:
            for attempt in range(2):
                child = self._child or _Child()
                self._child = None  # where this is interrupted, its answer must not be taken for the next question's
                try:
                    found = child.ask(ask)
                    if isinstance(found, Said):
                        self._child = child
                finally:
                    wrote = child.end() if self._child is None else ""
                if isinstance(found, Said):
                    return _without_failure(found)
                if found.stage == "start" and (found.code is None or found.code >= 0):
                    raise MusterError(f"the judge of SQL does not start: {wrote}")
                if found.code is not None and found.code >= 0:
                    raise MusterError(f"the judge of SQL failed with code {found.code}; it wrote: {wrote}")
                if found.stage not in ("start", "opening") and (found.why == "timeout" or attempt):
                    return found  # ended by a signal once, it may have been anybody's; twice, it is the query
            raise MusterError(f"the judge of SQL ended twice before a query began; it wrote: {wrote}")


def _without_failure(said: Said) -> Said:
    if said.failure is None:
        return said
    kind = UsageError if said.failure.exit_code == UsageError.exit_code else MusterError
    raise kind(said.failure.error, hint=said.failure.hint)


@dataclass(frozen=True)
class _Ended:
    """A child gave no answer: at which stage, and why."""

    stage: Literal["start", "opening", "predicted", "gold"]
    code: int | None
    """Its exit code, negative for a signal; None: it goes on, beyond its limit."""

    @property
    def why(self) -> str:
        if self.code in (None, -signal.SIGXCPU):
            return "timeout"
        # Only the kernel kills it, for lack of memory; a failed allocation may end it by a signal, too.
        is_memory = self.code in (-signal.SIGKILL, -signal.SIGSEGV, -signal.SIGABRT)
        return "memory" if is_memory else f"error: ended with {self.code}"


class _Child:
    """One process and its two pipes."""

    def __init__(self) -> None:
        """Starts it; the first ``ask`` waits until it can answer. Raises MusterError."""
        self._stderr: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 (the child's, for as long as it lives)
        try:
            # Nothing of the current folder is imported: not by -P, nor by an empty PYTHONPATH entry, hence cwd.
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", "muster.tasks.text2sql.judge"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._stderr,
                close_fds=True,
                cwd="/",
                env=_environment(),
            )
        except OSError as error:
            raise MusterError(f"the judge of SQL cannot be started: {error.strerror}") from error
        self._buffer = b""
        self._is_started = False

    def ask(self, ask: Ask) -> Said | _Ended:
        """The answer, or what became of it; then it must be ended. Raises MusterError: it says what no judge does."""
        assert self._process.stdin is not None
        if not self._is_started:
            line = self._line(time.monotonic() + _START_LIMIT_S)
            if line is None or _said(line).begun is None:
                return _Ended("start", self._code())
            self._is_started = True
        try:
            self._process.stdin.write(encode(ask) + b"\n")
            self._process.stdin.flush()
        except OSError:
            return _Ended("opening", self._code())
        begun = Begun(stage="gold" if ask.predicted is None else "predicted", limit_s=ask.timeout_s)
        while True:
            line = self._line(time.monotonic() + begun.limit_s + GRACE_S)
            if line is None:
                return _Ended(begun.stage, self._code())
            said = _said(line)
            if said.begun is None:
                return said
            begun = said.begun

    def end(self) -> str:
        """Kill it and free what it held; the end of what it wrote to stderr."""
        self._process.kill()
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            with contextlib.suppress(OSError):  # a line that it never read
                pipe.close()
        self._process.wait()
        self._stderr.seek(max(0, self._stderr.seek(0, os.SEEK_END) - 2000))
        wrote = self._stderr.read().decode("utf-8", "replace").strip()
        self._stderr.close()
        return wrote or "nothing"

    def _line(self, deadline: float) -> bytes | None:
        """The next line; None: none by then, or the child has ended."""
        assert self._process.stdout is not None
        stdout = self._process.stdout.fileno()
        poll = select.poll()
        poll.register(stdout, select.POLLIN)
        while b"\n" not in self._buffer:
            left_s = deadline - time.monotonic()
            if left_s <= 0 or not poll.poll(left_s * 1000):
                return None
            part = os.read(stdout, 1 << 16)
            if not part:
                return None
            self._buffer += part
        line, _, self._buffer = self._buffer.partition(b"\n")
        return line

    def _code(self) -> int | None:
        """Of its end; None: it goes on."""
        with contextlib.suppress(subprocess.TimeoutExpired):  # it may be about to end: its pipe has
            return self._process.wait(timeout=0.1)
        return None


def _said(line: bytes) -> Said:
    try:
        return decode(Said, line)
    except Unreadable as error:
        raise MusterError(
            f"the judge of SQL says what no judge does: {error}", hint="something else writes to its stdout"
        ) from error


def _environment() -> dict[str, str]:
    """This process's, with the paths of PYTHONPATH as they are meant here; an empty one means the current folder."""
    environ = environment.inherited()
    paths = [os.path.abspath(path) for path in environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    return {**environ, "PYTHONPATH": os.pathsep.join(paths)}


JUDGE = JudgeProcess()
"""This process's."""
atexit.register(JUDGE.close)
os.register_at_fork(after_in_child=JUDGE.forget)
