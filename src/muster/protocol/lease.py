"""Small records in a run's home: who supervises it, where it is, and how it ended."""

from __future__ import annotations

import json
import zlib
from dataclasses import dataclass, replace
from typing import Annotated

from muster.core.typed_json import Count, Int64, JsonObject, Record, Unreadable, decode, encode, parse_object
from muster.protocol.client import SupervisorStatus
from muster.protocol.values import Address
from muster.protocol.version import MINE, OtherVersion, Version, incompatible, stated

#: A holder that has not renewed for this time may be replaced (one whose process is dead on this host at once).
LEASE_S = 10.0


@dataclass(frozen=True, kw_only=True)
class LeaseRecord(Record):
    """``lease.json`` in the run's folder."""

    version: Version
    term: Annotated[Count, "rises by one with each holder"]
    address: Annotated[Address | None, "where it listens; None: released"]
    pid: Annotated[Count, "0: released"]
    machine: str
    boot_id: str
    expires_wall_ns: Annotated[Int64, "0: released"]
    expires_mono_ns: Annotated[Int64, "by the holder's monotonic clock"]
    checksum: Annotated[Count, "CRC-32 of the rest as JSON with sorted keys; 0: not stated"] = 0


@dataclass(frozen=True, kw_only=True)
class HomeStatus(Record):
    """``status.json`` of a home in a bucket: one look at the run, written by the supervisor every 30 s, when its phase
    changes, and at the end; ``muster status`` reads it instead of the events."""

    wall_ns: Annotated[Int64, "when it was written"]
    term: Count
    status: SupervisorStatus
    loss: Annotated[float | None, "of the last applied step"] = None
    tokens: Count = 0
    tokens_per_s: Annotated[float | None, "median of clean steps"] = None
    incidents: Count = 0


@dataclass(frozen=True, kw_only=True)
class EndRecord(Record):
    """``end.json`` of a home in a bucket, written before the lease is released: this allocation's run is over, and a
    supervisor that is started again for the same job and submission ends with ``exit_code`` at once."""

    job: Annotated[str, "the back end's own name for it (a JobSet)"]
    submission: str
    term: Count
    outcome: str
    exit_code: Int64
    reason: str
    wall_ns: Int64


def write_lease(record: LeaseRecord) -> bytes:
    """``record`` with its checksum, as ``read_lease`` reads it."""
    return encode(replace(record, checksum=_checksum(parse_object(encode(record)))))


def read_lease(data: bytes, *, me: str, any_version: bool = False) -> LeaseRecord:
    """The record in ``data``. ``me``: who reads it. ``any_version``: also one that another protocol's supervisor wrote,
    whose fields are the same: it shows the run's lease holder, or that there is none.

    Raises:
        OtherVersion: a supervisor of another protocol wrote it; both are named.
        Unreadable: it holds no such record, or not the one that was written.
    """
    fields = parse_object(data)
    if fields.get("checksum", 0) not in (0, _checksum(fields)):
        raise Unreadable("lease.json does not match its checksum: damaged")
    reason = incompatible(MINE, stated(fields), me=me, them="the run's supervisor")
    if reason is not None and not any_version:
        raise OtherVersion(reason)
    return decode(LeaseRecord, data)


def _checksum(fields: JsonObject) -> int:
    """Agents follow the address of a lease, and a holder yields to a higher term: one flipped bit must do neither."""
    rest = {name: value for name, value in fields.items() if name != "checksum"}
    return zlib.crc32(json.dumps(rest, sort_keys=True, separators=(",", ":")).encode()) or 1
