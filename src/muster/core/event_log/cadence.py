"""How often, and how much, a home in a bucket is written: what ships there and what prices it read the same numbers."""

from __future__ import annotations

#: Age of the oldest line that waits, in seconds, at which the lines of a writer are uploaded.
SEAL_S = 4.0
#: The same for the output of processes (``logs/*.log``).
LOGS_S = 32.0
#: A file's newest object is rewritten until it is as large as this. Larger ones cost more bytes for each write, smaller
#: ones more objects in each list.
OBJECT_BYTES = 1 << 20
#: The supervisor writes the run's status this often, in seconds; at changes of its phase at most ``STATUS_LEAST_S``.
STATUS_S = 30.0
STATUS_LEAST_S = 2.0
#: Each host copies the lease this often, in seconds, while it is connected and while it looks for a supervisor.
LEASE_COPY_S = 3.0
LEASE_COPY_SEEKING_S = 1.0
#: The supervisor reads what other writers uploaded this often, in seconds.
MIRROR_S = 600.0
#: The holder renews the lease this often, in seconds.
LEASE_RENEWAL_S = 10.0 / 3


def uploads_an_hour(hosts: int, logs: int) -> float:
    """Objects that hosts and supervisor write of their event file and ``logs`` files of output each, at most: each has
    something new in each interval."""
    return (hosts + 1) * (3600 / SEAL_S + logs * 3600 / LOGS_S)


def writes_an_hour(hosts: int, logs: int = 1) -> int:
    """Writes and lists (class A requests) of a run in an hour, at most, without followers and takeovers."""
    return round(uploads_an_hour(hosts, logs) + 3600 / LEASE_RENEWAL_S + 3600 / STATUS_LEAST_S + 3600 / MIRROR_S)


def uploaded_bytes_an_hour(hosts: int, logs: int = 1) -> int:
    """Bytes of them, at most: half an object each time, where files are long."""
    return round(uploads_an_hour(hosts, logs) * OBJECT_BYTES / 2)


def reads_an_hour(hosts: int) -> int:
    """Reads (class B requests) of a run in an hour, at most: hosts copy the lease, the supervisor reads their files."""
    return round(hosts * (3600 / LEASE_COPY_S + 3600 / MIRROR_S * 2))
