"""The real clock and the real shell; tests and the simulator have virtual ones."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from muster.core.errors import BackendError, BusyError
from muster.core.protocols import Completed


@dataclass(frozen=True)
class SystemClock:
    """The machine's own time."""

    def monotonic_ns(self) -> int:
        return time.monotonic_ns()

    def wall_ns(self) -> int:
        return time.time_ns()

    def sleep(self, seconds: float) -> None:
        time.sleep(seconds)


@dataclass(frozen=True)
class SystemShell:
    """Runs real programs, found on PATH, without a shell in between."""

    own_group: bool = False
    """Ctrl-C at the terminal does not reach them: what they have begun is done, and known."""

    def run(
        self,
        argv: Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        stdin: str | None = None,
        timeout_s: float | None = None,
    ) -> Completed:
        try:
            done = subprocess.run(
                list(argv), env={**os.environ, **env} if env else None, input=stdin, capture_output=True,
                timeout=timeout_s, text=True, errors="replace", check=False,
                process_group=0 if self.own_group else None,
            )  # fmt: skip
        except FileNotFoundError as error:
            raise BackendError(f"program {argv[0]!r} not found", hint="install it or fix PATH") from error
        except subprocess.TimeoutExpired as error:
            raise BusyError(f"{argv[0]} did not finish within {timeout_s} s") from error
        return Completed(argv=tuple(argv), returncode=done.returncode, stdout=done.stdout, stderr=done.stderr)
