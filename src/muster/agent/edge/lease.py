"""The run's lease as a host reads it: where its supervisor listens, and whether the run has ended."""

from __future__ import annotations

import os
from pathlib import Path

from muster.core.typed_json import Unreadable
from muster.protocol.lease import LeaseRecord, read_lease
from muster.protocol.values import Address


def read(run_dir: Path, *, me: str) -> LeaseRecord | None:
    """None: there is none that can be read. One without an address was released: the last supervisor ended of its own
    will, which is the end of the run. ``me``: who reads it.

    Raises OtherVersion: that supervisor is of another version.
    """
    try:
        return read_lease((run_dir / "lease.json").read_bytes(), me=me)
    except (OSError, Unreadable):
        return None


def supervisor_address(run_dir: Path, *, me: str) -> Address | None:
    """Where the supervisor listens; None while there is none. ``me``: who reads it.

    Raises OtherVersion: that supervisor is of another version.
    """
    lease = read(run_dir, me=me)
    return None if lease is None else lease.address


def lease_file(run_dir: Path) -> tuple[int, int, int] | None:
    """What differs once the file was written again; None: it cannot be opened.

    Opened, not only looked up: a network file system asks its server then.
    """
    try:
        fd = os.open(run_dir / "lease.json", os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        status = os.fstat(fd)
    finally:
        os.close(fd)
    return status.st_ino, status.st_mtime_ns, status.st_size
