"""How often a home in a bucket is written to: what ships there and what prices it read the same numbers."""

from __future__ import annotations

import math

#: Age of the oldest line that waits, in seconds, at which the lines of a writer are sealed.
SEAL_S = 4.0
#: The same for the output of processes (``logs/*.log``).
LOGS_S = 32.0
#: So many segments become one of the next level.
FAN = 8
#: The supervisor writes the run's status this often, in seconds; at changes of its phase at most ``STATUS_LEAST_S``.
STATUS_S = 30.0
STATUS_LEAST_S = 2.0
#: Each host copies the lease this often, in seconds, while it is connected and while it looks for a supervisor.
LEASE_COPY_S = 3.0
LEASE_COPY_LONELY_S = 1.0
#: The supervisor reads what other writers sealed this often, in seconds.
MIRROR_S = 600.0
#: The holder renews the lease this often, in seconds.
LEASE_RENEWAL_S = 10.0 / 3


def writes_an_hour(hosts: int) -> int:
    """Writes and lists (class A requests) of a run in an hour, at most: every writer has a line in each interval."""
    sealed = (hosts + 1) * (3600 / SEAL_S + 3600 / LOGS_S) * FAN / (FAN - 1)
    return round(sealed + 3600 / LEASE_RENEWAL_S + 3600 / STATUS_LEAST_S)


def reads_an_hour(hosts: int) -> int:
    """Reads (class B requests) of a run in an hour, at most, without followers and takeovers."""
    levels = 1 + int(math.log(MIRROR_S / SEAL_S, FAN))
    segments = levels * (FAN - 1)
    return round(hosts * (3600 / LEASE_COPY_S + 3600 / MIRROR_S * segments))
