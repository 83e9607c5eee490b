"""Programs with a limit that holds even for one that cannot be killed (a driver's call that never returns)."""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from typing import BinaryIO

_LARGEST = 64 << 20
#: For a program that is asked to end.
_ENDING_S = 5.0


def output_of(
    argv: Sequence[str],
    *,
    limit_s: float,
    env: Mapping[str, str] | None = None,
    silence_s: float | None = None,
    errors: bool = False,
) -> tuple[bytes, int | None]:
    """(what it printed, its exit code); the code is None where the limit ended it: what it said until then is there.

    ``silence_s``: the limit holds also for the time between two outputs; such a program is asked to end first, as it
    may have others to end. ``errors``: what it printed as errors is among its output.

    Raises:
        OSError: it cannot be started.
    """
    child = subprocess.Popen(
        list(argv),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT if errors else subprocess.DEVNULL,
        env=None if env is None else dict(env),
        start_new_session=True,
    )
    assert child.stdout is not None
    deadline, parts, size = time.monotonic() + limit_s, list[bytes](), 0
    code: int | None = None
    try:
        with child.stdout, selectors.DefaultSelector() as selector:
            selector.register(child.stdout, selectors.EVENT_READ)
            while size < _LARGEST:
                left = max(0.0, deadline - time.monotonic())
                if not selector.select(left if silence_s is None else min(left, silence_s)):
                    deadline = time.monotonic()
                    break
                part = os.read(child.stdout.fileno(), 1 << 16)
                if not part:
                    break
                parts.append(part)
                size += len(part)
        with contextlib.suppress(subprocess.TimeoutExpired):
            code = child.wait(max(0.0, deadline - time.monotonic()))
    finally:  # also after Ctrl-C, which its own session does not hear of
        if code is None:
            if silence_s is not None:
                with contextlib.suppress(ProcessLookupError, subprocess.TimeoutExpired):
                    os.killpg(child.pid, signal.SIGTERM)
                    child.wait(_ENDING_S)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)
            with contextlib.suppress(subprocess.TimeoutExpired):  # stuck in the kernel: left behind
                child.wait(0.2)
    return b"".join(parts), code


def command(*, full: bool, folder: str = "") -> list[str]:
    """How the probe is started."""
    argv = [sys.executable, "-P", "-m", "muster.probe.main", "--part", "full" if full else "passive"]
    return [*argv, "--folder", folder] if folder else argv


def network_command(address: str = "", *, peer: str = "", python: str = "") -> list[str]:
    """How a host's part of the network test is started there, with ``python`` (default: this one's)."""
    argv = [python or sys.executable, "-P", "-m", "muster.probe.network"]
    argv += ["--address", address] if address else []
    return [*argv, "--peer", peer] if peer else argv


def conversation(argv: Sequence[str], *, errors: BinaryIO) -> subprocess.Popen[bytes]:
    """A program that is spoken with by its input and output; a session of its own, so that Ctrl-C leaves it to us.

    Raises:
        OSError: it cannot be started.
    """
    return subprocess.Popen(
        list(argv), stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, bufsize=0,
        start_new_session=True,
    )  # fmt: skip
