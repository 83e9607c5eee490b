"""Signals of the supervisor's process, which wake its loop."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Callable, Iterator

from muster.transport.connections import ConnectionPool


@contextlib.contextmanager
def caught(pool: ConnectionPool, handle: Callable[[int], None], *, leaving: Callable[[], bool]) -> Iterator[None]:
    """Call ``handle`` with each signal's number. ``leaving``: asked at the end; if true, a late one must not kill."""
    try:
        before = {
            number: signal.signal(number, lambda number, _frame: handle(number))
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
        }
        old_fd = pool.wake_on_signals()
    except ValueError:  # not the main thread: a test
        yield
        return
    try:
        yield
    finally:
        signal.set_wakeup_fd(old_fd)
        # Ignored, not left to `handle`: an interpreter that ends resets handlers to the default, which kills.
        for number, handler in before.items():
            signal.signal(number, signal.SIG_IGN if leaving() else handler)
