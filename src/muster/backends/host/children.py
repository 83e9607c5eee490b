"""The programs of a container's first process: started, watched, and everything that ends below it collected.

A first process is the parent of all orphans: it has to collect strangers too, and must not take from a thread
that waits for a program of its own (``run``) what that program ended with.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from muster.core import processes
from muster.core.errors import BackendError

KILLED = 128
"""The least exit code of a program that a signal ended."""
KILL_S = 5.0


@dataclass(frozen=True, kw_only=True)
class Finished:
    """What a program of ``run`` printed and ended with; ``code`` None: it ran past its time and was killed."""

    code: int | None
    out: bytes
    err: bytes


class Children(Protocol):
    """Programs by name, one of each at a time."""

    def start(self, name: str, argv: Sequence[str], env: Mapping[str, str], log: Path | None) -> int:
        """Start it; its output goes to the file ``log``, or where this process's goes. Returns its process id.

        Raises:
            BackendError: it cannot be started.
        """
        ...

    def pid(self, name: str) -> int | None:
        """None: it does not run."""
        ...

    def ended(self) -> list[tuple[str, int]]:
        """(name, exit code) of those that have ended since the last call; of a signal: 128 and its number."""
        ...

    def send(self, name: str, number: signal.Signals) -> None: ...

    def run(self, argv: Sequence[str], env: Mapping[str, str], *, line: bytes, timeout_s: float) -> Finished:
        """Run another program to its end, with ``line`` as its input, in a session of its own; for any thread.

        Raises:
            BackendError: it cannot be started.
        """
        ...


@dataclass(kw_only=True)
class RealChildren:
    """``Children`` as processes of this one."""

    _named: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)
    _others: dict[int, subprocess.Popen[bytes]] = field(default_factory=dict)
    """Programs of ``run``, by process id: their threads collect them."""
    collects_strangers: bool = field(default_factory=lambda: os.getpid() == 1)
    """As a container's first process has to. Else a thread's own child could be taken from it."""
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def start(self, name: str, argv: Sequence[str], env: Mapping[str, str], log: Path | None) -> int:
        with contextlib.ExitStack() as stack, self._lock:
            output = stack.enter_context(processes.open_log(log)) if log is not None else None
            try:
                child = subprocess.Popen(
                    list(argv), env=dict(env), stdin=subprocess.DEVNULL, stdout=output, stderr=output
                )
            except OSError as error:
                raise BackendError(f"cannot start {argv[0]}: {error.strerror}") from error
            self._named[name] = child
        return child.pid

    def pid(self, name: str) -> int | None:
        child = self._named.get(name)
        return child.pid if child is not None else None

    def ended(self) -> list[tuple[str, int]]:
        found = []
        with self._lock:
            for name, child in list(self._named.items()):
                if (code := child.poll()) is not None:
                    del self._named[name]
                    found.append((name, KILLED - code if code < 0 else code))
            if self.collects_strangers:
                self._collect_strangers()
        return found

    def _collect_strangers(self) -> None:
        """Collect other ended processes; nothing is started meanwhile, so an unknown child is a stranger."""
        known = {child.pid for child in (*self._named.values(), *self._others.values())}
        with contextlib.suppress(ChildProcessError):
            while (one := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)) is not None:
                if one.si_pid in known:
                    return  # its own collector comes; those behind it wait for the next call
                os.waitpid(one.si_pid, 0)

    def send(self, name: str, number: signal.Signals) -> None:
        with self._lock:
            if (child := self._named.get(name)) is not None and child.returncode is None:
                child.send_signal(number)

    def run(self, argv: Sequence[str], env: Mapping[str, str], *, line: bytes, timeout_s: float) -> Finished:
        with self._lock:
            try:
                child = subprocess.Popen(
                    list(argv), env=dict(env), stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                    start_new_session=True,
                )  # fmt: skip
            except OSError as error:
                raise BackendError(f"cannot start {argv[0]}: {error.strerror}") from error
            self._others[child.pid] = child
        try:
            return self._communicate(child, line, timeout_s)
        finally:
            with self._lock:
                del self._others[child.pid]

    def _communicate(self, child: subprocess.Popen[bytes], line: bytes, timeout_s: float) -> Finished:
        try:
            out, err = child.communicate(line, timeout=timeout_s)
            code = child.returncode
            return Finished(code=KILLED - code if code < 0 else code, out=out, err=err)
        except subprocess.TimeoutExpired:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)
            with contextlib.suppress(subprocess.TimeoutExpired):  # something in another session holds its outputs
                child.communicate(timeout=KILL_S)
            return Finished(code=None, out=b"", err=b"")
