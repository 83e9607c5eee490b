"""Asks NCCL's RAS what it knows of the job: one connection, in a thread.

The protocol is of lines: ``CLIENT PROTOCOL 2``, answered by ``SERVER PROTOCOL`` and a number, then ``VERBOSE STATUS``,
answered by a report whose end is the end of the connection. Source: ``src/ras/client.cc`` of NCCL (read 2026-11-23).
RAS itself waits for processes that do not answer, for 5 s and more: such a report comes too late, and what has come by
then is reported as cut.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Mapping

#: Of a report; what is larger is cut.
MOST_BYTES = 1 << 18
#: NCCL's own default, and the variable that changes it.
ADDRESS, VARIABLE = "localhost:28028", "NCCL_RAS_ADDR"
#: To a socket of this machine: only a full queue keeps it waiting.
_CONNECT_S = 0.02
#: The answer is taken so much before the limit, to be there when the gathering ends.
_BEFORE_S = 0.02


class _Problem(Exception):
    """What is missing of the report."""


def ask(environ: Mapping[str, str], limit_s: float) -> tuple[str, str]:
    """(report, what is missing of it); both empty where no NCCL runs, or it is too old, or its address is another's."""
    host, _, port = environ.get(VARIABLE, ADDRESS).rpartition(":")
    if environ.get("NCCL_RAS_ENABLE") == "0" or not port.isdecimal():
        return "", ""
    until_s = time.monotonic() + limit_s - _BEFORE_S
    try:
        sock = socket.create_connection((host.strip("[]"), int(port)), timeout=_CONNECT_S)
    except (OSError, OverflowError, UnicodeError):
        return "", ""
    report = bytearray()
    with sock:
        try:
            _report(sock, until_s, report)
        except _Problem as problem:
            return report[:MOST_BYTES].decode(errors="replace"), f"NCCL's RAS: {problem}"
    return report.decode(errors="replace"), ""


def _report(sock: socket.socket, until_s: float, report: bytearray) -> None:
    greeting = bytearray()
    _send(sock, b"CLIENT PROTOCOL 2\n")
    while b"\n" not in greeting:
        received = _receive(sock, until_s, "does not answer")
        if not received:
            raise _Problem("closed the connection")
        greeting += received
        if len(greeting) > MOST_BYTES:
            raise _Problem(f"is larger than {MOST_BYTES} bytes")
    line, _, rest = bytes(greeting).partition(b"\n")
    if not line.upper().startswith(b"SERVER PROTOCOL "):
        raise _Problem(f"speaks another protocol: {line[:60].decode(errors='replace')!r}")
    report += rest
    _send(sock, b"VERBOSE STATUS\n")
    while received := _receive(sock, until_s, "did not end in time"):
        report += received
        if len(report) > MOST_BYTES:
            raise _Problem(f"is larger than {MOST_BYTES} bytes")


def _send(sock: socket.socket, line: bytes) -> None:
    try:
        sock.send(line)
    except OSError as error:
        raise _Problem(str(error.strerror)) from error


def _receive(sock: socket.socket, until_s: float, late: str) -> bytes:
    left_s = until_s - time.monotonic()
    if left_s <= 0:
        raise _Problem(late)
    sock.settimeout(left_s)
    try:
        return sock.recv(65536)
    except TimeoutError as error:
        raise _Problem(late) from error
    except OSError as error:
        raise _Problem(str(error.strerror)) from error
