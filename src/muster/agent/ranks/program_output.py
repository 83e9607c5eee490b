"""What a program of this host prints, a line at a time, through the agent's selector."""

from __future__ import annotations

import contextlib
import os
import subprocess
from collections.abc import Callable

from muster.transport.connections import ConnectionPool


class ProgramOutput:
    """What a program prints, a line at a time, while it runs."""

    def __init__(self, hub: ConnectionPool, child: subprocess.Popen[bytes], on_line: Callable[[bytes], None]) -> None:
        assert child.stdout is not None
        self._hub, self._file, self._on_line, self._rest = hub, child.stdout, on_line, b""
        os.set_blocking(self._file.fileno(), False)
        hub.watch(self._file.fileno(), self.read)

    def read(self) -> None:
        """Take what is there. A program of its own that outlived it may hold the other end: nothing waits for that."""
        with contextlib.suppress(BlockingIOError):
            while data := os.read(self._file.fileno(), 1 << 16):
                *lines, self._rest = (self._rest + data).split(b"\n")
                for line in lines:
                    self._on_line(line)
            self._hub.unwatch(self._file.fileno())

    def close(self) -> None:
        """The program has ended: take the rest."""
        self.read()
        if self._rest:
            self._on_line(self._rest)
        self._hub.unwatch(self._file.fileno())
        self._file.close()
