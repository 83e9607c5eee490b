"""Asks NCCL's RAS what it knows of the job: one connection, in the agent's loop, never waiting.

The protocol is of lines: ``CLIENT PROTOCOL 2``, answered by ``SERVER PROTOCOL`` and a number, then ``VERBOSE STATUS``,
answered by a report whose end is the end of the connection. Source: ``src/ras/client.cc`` of NCCL (read 2026-11-23).
RAS itself waits for processes that do not answer, for 5 s and more: such a report comes too late, and what has come by
then is told as cut.
"""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Callable, Mapping

from muster.transport.connections import ConnectionPool

#: Of a report; what is larger is cut.
MOST_BYTES = 1 << 18
#: NCCL's own default, and the variable that changes it.
ADDRESS, VARIABLE = "localhost:28028", "NCCL_RAS_ADDR"
#: To a socket of this machine: only a full queue keeps it waiting.
_CONNECT_S = 0.02


class RasQuery:
    """One question. ``report`` is what has come."""

    def __init__(self, hub: ConnectionPool, environ: Mapping[str, str], on_done: Callable[[], None]) -> None:
        self.report, self.problem, self.done = "", "", True
        self._hub, self._on_done = hub, on_done
        self._received, self._asked = bytearray(), False
        self._socket: socket.socket | None = None
        host, _, port = environ.get(VARIABLE, ADDRESS).rpartition(":")
        if environ.get("NCCL_RAS_ENABLE") == "0" or not port.isdecimal():
            return
        try:
            self._socket = socket.create_connection((host.strip("[]"), int(port)), timeout=_CONNECT_S)
            self._socket.setblocking(False)
            self._socket.send(b"CLIENT PROTOCOL 2\n")
        except (OSError, OverflowError, UnicodeError):  # no NCCL runs, or it is too old, or its address is another's
            self._close()
            return
        self.done = False
        hub.watch(self._socket.fileno(), self._on_readable)

    def end(self) -> None:
        """What has not come by now is missing."""
        if not self.done:
            self._finish("did not end in time" if self._asked else "does not answer")

    def _on_readable(self) -> None:
        assert self._socket is not None
        try:
            received = self._socket.recv(65536)
        except BlockingIOError:
            return
        except OSError as error:
            self._finish(str(error.strerror))
            return
        self._received += received
        if not self._asked and b"\n" in self._received:
            self._ask()
        elif not received:
            self._finish("" if self._asked else "closed the connection")
        elif len(self._received) > MOST_BYTES:
            self._finish(f"is larger than {MOST_BYTES} bytes")

    def _ask(self) -> None:
        line, _, rest = bytes(self._received).partition(b"\n")
        self._received = bytearray(rest)
        if not line.upper().startswith(b"SERVER PROTOCOL "):
            self._finish(f"speaks another protocol: {line[:60].decode(errors='replace')!r}")
            return
        assert self._socket is not None
        self._asked = True
        try:
            self._socket.send(b"VERBOSE STATUS\n")
        except OSError as error:
            self._finish(str(error.strerror))

    def _finish(self, problem: str) -> None:
        self.done = True
        if self._asked:
            self.report = bytes(self._received[:MOST_BYTES]).decode(errors="replace")
        self.problem = f"NCCL's RAS: {problem}" if problem else ""
        if self._socket is not None:
            self._hub.unwatch(self._socket.fileno())
        self._close()
        self._on_done()

    def _close(self) -> None:
        if self._socket is not None:
            with contextlib.suppress(OSError):
                self._socket.close()
            self._socket = None
