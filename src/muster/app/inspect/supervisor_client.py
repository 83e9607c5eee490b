"""Requests to a run's supervisor from another terminal: found by its lease, authenticated by the run's token.

Where the run's folder cannot be reached (pods in a cluster), the launcher's ``remote`` carries the request there.
"""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Mapping
from typing import Any

from muster import backends
from muster.core.errors import AccessError, MusterError
from muster.storage import run_registry
from muster.storage.run_registry import RunDir
from muster.transport.secure_session import Session, read_token


class SupervisorUnreachable(MusterError):
    """No supervisor of the run can be reached."""


def request(
    run: RunDir, message: Mapping[str, Any], *, timeout_s: float = 5.0, resolved: str | None = None
) -> dict[str, Any]:
    """Send one message and return the answer; ``resolved`` replaces the run file before it.

    Raises:
        SupervisorUnreachable: there is no supervisor, or it does not answer in time.
        AccessError: the token cannot be read, or does not prove us.
    """
    remote = backends.load(_backend(run)).remote
    if remote is not None:
        reply = remote.ask(run.run_id, message, timeout_s=timeout_s, resolved=resolved)
        if "answer" not in reply:
            raise SupervisorUnreachable(str(reply.get("error", "no answer")), hint=reply.get("hint"))
        answer: dict[str, Any] = reply["answer"]
        return answer
    if resolved is not None:
        run_registry.replace_text(run.resolved, resolved)
    return request_here(run, message, timeout_s=timeout_s)


def request_here(run: RunDir, message: Mapping[str, Any], *, timeout_s: float = 5.0) -> dict[str, Any]:
    """The same, where the run's folder is: over the supervisor's own socket. Raises as ``request``."""
    address = _address(run)
    if address is None:
        raise SupervisorUnreachable(f"no supervisor holds {run.run_id}", hint=f"muster recover {run.run_id}")
    session = Session(read_token(str(run.token)), server=False)
    session.send({"t": "hello", "role": "client"})
    session.send(message)
    until = time.monotonic() + timeout_s
    try:
        with socket.create_connection(address, timeout=timeout_s) as sock:
            while True:
                sock.settimeout(max(0.01, until - time.monotonic()))
                sock.sendall(session.outgoing())
                data = sock.recv(1 << 16)
                if not data:
                    raise SupervisorUnreachable(
                        f"the supervisor of {run.run_id} closed the connection", hint=f"muster status {run.run_id}"
                    )
                answers = session.receive(data)
                sock.sendall(session.outgoing())
                if answers:
                    return answers[0]
    except AccessError:
        raise
    except OSError as error:
        raise SupervisorUnreachable(
            f"the supervisor of {run.run_id} does not answer: {error.strerror or error}",
            hint=f"muster recover {run.run_id} takes over, muster down {run.run_id} ends everything",
        ) from error


def _backend(run: RunDir) -> str:
    try:
        return str(json.loads(run.resolved.read_text()).get("backend", "local"))
    except (OSError, ValueError):
        return "local"


def _address(run: RunDir) -> tuple[str, int] | None:
    try:
        result = json.loads(run.lease.read_text())
        host, port = result["address"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return str(host), int(port)
