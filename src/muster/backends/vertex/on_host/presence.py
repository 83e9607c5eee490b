"""Which hosts of a job are there, as each says itself: one small object of its own in the run's home.

``muster status`` reads them for what Vertex does not tell (which host is late, why a host's program failed), and the
chief for the moment when it may end: its exit ends everybody, perhaps in the middle of a last write.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import Literal

from muster.core.errors import MusterError
from muster.core.protocols import Clock, Store
from muster.core.typed_json import Count, Int64, Name, Record, Unreadable, decode, encode
from muster.storage import uris

FOLDER = "vertex-hosts"
LOOK_S = 1.0


@dataclass(frozen=True, kw_only=True)
class HostRecord(Record):
    index: Count
    host: Name
    """With this start's own mark: ``host-2-k3f9a``."""
    address: str = ""
    state: Literal["up", "left", "failed"]
    said: str = ""
    """Why it failed."""
    wall_ns: Int64 = 0


def tell(store: Store, home: str, nonce: str, record: HostRecord) -> None:
    """Replace what this host said before. Raises as the store."""
    store.put(uris.join(home, FOLDER, nonce, f"{record.index}.json"), encode(record))


def hosts(store: Store, home: str, nonce: str) -> list[HostRecord]:
    """What the hosts of the request ``nonce`` say, by index; what cannot be read is left out. Raises as the store."""
    found = []
    for uri in store.list(uris.join(home, FOLDER, nonce)):
        with contextlib.suppress(FileNotFoundError, Unreadable):
            found.append(decode(HostRecord, store.get(uri).data))
    return sorted(found, key=lambda one: one.index)


def wait_for_others(store: Store, home: str, nonce: str, *, limit_s: float, clock: Clock) -> list[HostRecord]:
    """Until no host but the chief is there, or ``limit_s`` has passed; who still is."""
    until = clock.monotonic_ns() + int(limit_s * 1e9)
    while True:
        try:
            left = [one for one in hosts(store, home, nonce) if one.index and one.state == "up"]
        except (MusterError, OSError):
            left = []
        else:
            if not left:
                return []
        if clock.monotonic_ns() >= until:
            return left
        clock.sleep(LOOK_S)
