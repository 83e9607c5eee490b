"""Requests to a run's supervisor from another terminal: found by its lease, authenticated by the run's token.

Where the run's folder cannot be reached (pods in a cluster), the launcher's ``remote`` carries the request there.
"""

from __future__ import annotations

import contextlib
import time

from muster import backends
from muster.core import resolved_file
from muster.core.errors import BackendError, MusterError
from muster.core.event_details.run import RunFinished
from muster.core.event_log.names import files_of
from muster.core.processes import open_plain, read_plain
from muster.core.typed_json import Unreadable, parse_object, text
from muster.protocol.client import FromClient, SupervisorStatus
from muster.protocol.lease import read_lease
from muster.protocol.values import Address
from muster.storage.run_registry import RunDir
from muster.transport.client import ask_supervisor
from muster.transport.secure_session import run_token

#: A supervisor checks and repairs its lease every few seconds: a client waits for that at most this long.
LEASE_AGAIN_S = 4.0
_TAIL_BYTES = 1 << 14


class SupervisorUnreachable(MusterError):
    """No supervisor of the run can be reached."""


def request(
    run: RunDir, message: FromClient, *, timeout_s: float = 5.0, resolved: str | None = None
) -> SupervisorStatus:
    """Send one message and return the answer; ``resolved`` replaces the run file before it.

    Raises:
        SupervisorUnreachable: there is no supervisor, or it does not answer in time.
        OtherVersion: it is of another version of Muster.
        AccessError: the token cannot be read, or does not prove us.
    """
    remote = backends.load(backend_of(run)).remote
    if remote is not None:
        try:
            return remote.ask(run.run_id, message, timeout_s=timeout_s, resolved=resolved)
        except BackendError as error:
            raise SupervisorUnreachable(str(error), hint=error.hint) from error
    if resolved is not None:
        resolved_file.write(run.path, resolved)
    return request_here(run, message, timeout_s=timeout_s)


def request_here(run: RunDir, message: FromClient, *, timeout_s: float = 5.0) -> SupervisorStatus:
    """The same, where the run's folder is: over the supervisor's own socket. Raises as ``request``."""
    address = _address(run, min(timeout_s, LEASE_AGAIN_S))
    if address is None:
        raise SupervisorUnreachable(f"no supervisor holds {run.run_id}", hint=f"muster recover {run.run_id}")
    token = run_token(run.path)
    try:
        return ask_supervisor(address, token, message, timeout_s=timeout_s)
    except (OSError, Unreadable) as error:
        reason = (isinstance(error, OSError) and error.strerror) or str(error)
        raise SupervisorUnreachable(
            f"the supervisor of {run.run_id} does not answer: {reason}",
            hint=f"muster recover {run.run_id} takes over, muster down {run.run_id} ends everything",
        ) from error


def _address(run: RunDir, patience_s: float) -> Address | None:
    """Where the run's supervisor listens; None: no supervisor holds the run.

    A lease that is damaged or gone is written again by the supervisor that holds the run: it is waited for, where the
    events say that there is one.
    """
    until = time.monotonic() + patience_s
    while True:
        try:
            return read_lease(read_plain(run.lease), me="this command").address
        except (OSError, Unreadable):
            if time.monotonic() >= until or not _goes_on(run):
                return None
        time.sleep(0.1)


def _goes_on(run: RunDir) -> bool:
    """Whether a supervisor has written events, and none of its last ones is the run's end."""
    files = files_of(run.events, "supervisor")
    try:
        newest = max(files, key=lambda path: path.stat().st_mtime_ns, default=None)
        if newest is None:
            return False
        with open_plain(newest) as file:
            file.seek(max(0, newest.stat().st_size - _TAIL_BYTES))
            return RunFinished.kind.encode() not in file.read()
    except OSError:
        return False


def backend_of(run: RunDir) -> str:
    """By its run file or, where that is damaged or gone, by the record of its job."""
    with contextlib.suppress(OSError, ValueError):
        return text(parse_object(resolved_file.read(run.path)), "backend", default="local")
    with contextlib.suppress(OSError, ValueError):
        return text(parse_object(read_plain(run.job)), "backend", default="local")
    return "local"
