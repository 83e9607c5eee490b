"""What a supervisor says and writes, for the tests of those who ask it."""

from muster.core.typed_json import encode
from muster.protocol.client import HostStatus, SupervisorStatus
from muster.protocol.lease import LeaseRecord
from muster.protocol.version import MINE


def status(phase="run", *, reason="", step=0, hosts=()):
    """``hosts``: (name, whether it is connected)."""
    known = {name: HostStatus(connected=up, ready=up, active=up, ranks=()) for name, up in hosts}
    return SupervisorStatus(phase=phase, reason=reason, attempt=1, step=step, hosts=known)


def lease(address, **changes):
    """A lease file's bytes."""
    given = {"term": 1, "pid": 1, "machine": "m", "boot_id": "b", "expires_wall_ns": 1, "expires_mono_ns": 1}
    return encode(LeaseRecord(version=MINE, address=address, **(given | changes)))
