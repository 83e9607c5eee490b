"""Waiting for what other processes and threads do."""

import contextlib
import socket
import time
from collections.abc import Callable


def eventually(what: Callable[[], object], seconds: float = 30.0, *, every_s: float = 0.02) -> None:
    """Return once ``what()`` holds."""
    until = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < until, f"it did not happen within {seconds:g} s"
        time.sleep(every_s)


def listens(address: str, port: int) -> bool:
    with contextlib.suppress(OSError), socket.create_connection((address, port), timeout=5):
        return True
    return False
