"""Work that takes time, one daemon thread for each job; results reach the loop as events."""

from __future__ import annotations

import collections
import functools
import os
import socket
import threading
from collections.abc import Callable, Iterator

from muster.agent.values.events import Event, SupervisorUnreachable
from muster.protocol.values import Address
from muster.transport.connections import ConnectionPool

CONNECT_S = 0.5


class Background:
    """The token of its descriptor is the object itself."""

    def __init__(self, pool: ConnectionPool) -> None:
        self._results: collections.deque[Event | socket.socket] = collections.deque()
        self._woken = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        pool.watch(self._woken, self)

    def run(self, name: str, job: Callable[[], Event | socket.socket]) -> None:
        """Its result is posted."""

        def work() -> None:
            self.post(job())

        threading.Thread(target=work, name=name, daemon=True).start()

    def post(self, result: Event | socket.socket) -> None:
        """From any thread, or a signal handler."""
        self._results.append(result)
        os.eventfd_write(self._woken, 1)

    def results(self) -> Iterator[Event | socket.socket]:
        os.eventfd_read(self._woken)
        while self._results:
            yield self._results.popleft()

    def connect(self, address: Address) -> None:
        self.run("connect", functools.partial(_connected, address))


def _connected(address: Address) -> Event | socket.socket:
    try:
        return socket.create_connection(address, timeout=CONNECT_S)
    except OSError:
        return SupervisorUnreachable()
