"""The record of a run's lease: who supervises it, since when, and what it speaks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from muster.core.typed_json import Count, Int64, Record, decode, parse_object
from muster.protocol.values import Address
from muster.protocol.version import MINE, OtherVersion, Version, incompatible, stated


@dataclass(frozen=True, kw_only=True)
class LeaseRecord(Record):
    """``lease.json`` in the run's folder."""

    version: Version
    term: Annotated[Count, "rises by one with each holder"]
    address: Annotated[Address | None, "where it listens; None: it was given back"]
    pid: Annotated[Count, "0: it was given back"]
    machine: str
    boot_id: str
    expires_wall_ns: Annotated[Int64, "0: it was given back"]
    expires_mono_ns: Annotated[Int64, "by the holder's monotonic clock"]


def read_lease(data: bytes, *, me: str) -> LeaseRecord:
    """The record in ``data``. ``me``: who reads it.

    Raises:
        OtherVersion: a supervisor of another protocol wrote it; both are named.
        Unreadable: it holds no such record.
    """
    reason = incompatible(MINE, stated(parse_object(data)), me=me, them="the run's supervisor")
    if reason is not None:
        raise OtherVersion(reason)
    return decode(LeaseRecord, data)
