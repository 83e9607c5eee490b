"""Replicators in the test's own process, whose threads do not outlive the test."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from waiting import eventually

from muster.agent.replicator.main import Replicator


class Served:
    """One that serves until ``close``, before which whoever is connected to it has to go."""

    def __init__(self, memory: Path, token: bytes, *, port: int = 0) -> None:
        self.replicator = Replicator(memory=memory, token=token, bind="127.0.0.1", port=port)
        self._thread = threading.Thread(target=self.replicator.serve, daemon=True)
        self._thread.start()

    def close(self) -> None:
        self.replicator.close()
        self._thread.join(10)
        assert not self._thread.is_alive(), "it serves on"
        eventually(lambda: not any("(answer)" in thread.name for thread in threading.enumerate()))


@contextmanager
def serving(memory: Path, token: bytes, *, port: int = 0) -> Iterator[Replicator]:
    served = Served(memory, token, port=port)
    try:
        yield served.replicator
    finally:
        served.close()
