"""Signals of the supervisor's process, as something its loop wakes up for."""

from __future__ import annotations

import contextlib
import functools
import signal
import socket
from collections.abc import Callable, Iterator

from muster.transport.connections import ConnectionPool


@contextlib.contextmanager
def caught(hub: ConnectionPool, act: Callable[[int], None], *, leaving: Callable[[], bool]) -> Iterator[None]:
    """``act`` is called with each signal's number. ``leaving``: asked at the end; then a late one must not kill."""
    wake_r, wake_w = socket.socketpair()
    wake_w.setblocking(False)
    hub.watch(wake_r.fileno(), functools.partial(_empty, wake_r))
    try:
        before = {
            number: signal.signal(number, lambda number, _frame: act(number))
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
        }
        old_fd = signal.set_wakeup_fd(wake_w.fileno(), warn_on_full_buffer=False)
    except ValueError:  # not the main thread: a test drives us
        yield
        return
    try:
        yield
    finally:
        signal.set_wakeup_fd(old_fd)
        for number, handler in before.items():
            if not leaving():
                signal.signal(number, handler)


def _empty(sock: socket.socket) -> None:
    sock.recv(256)
