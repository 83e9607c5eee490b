"""Hosts' monotonic clocks against the supervisor's, by round trips."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from muster.supervise.recovery.state import SECOND_NS

#: An offset that did not move is said again after so long.
AGAIN_S = 600.0


@dataclass(frozen=True, kw_only=True)
class Offset:
    """Add ``offset_ns`` to the host's monotonic clock; ``error_ns``: the most that it can be wrong."""

    offset_ns: int
    error_ns: int
    at_ns: int


@dataclass
class ClockOffsets:
    """What was asked and not yet answered, and what was last said of each host."""

    _asked: dict[int, tuple[str, int]] = field(default_factory=dict)
    _told: dict[str, Offset] = field(default_factory=dict)
    _number: int = 0

    def ping(self, host: str, now_ns: int) -> dict[str, Any]:
        """What to ask a host."""
        self._number += 1
        self._asked[self._number] = (host, now_ns)
        return {"t": "ping", "id": self._number}

    def pong(self, message: Mapping[str, Any], now_ns: int) -> tuple[str, Offset] | None:
        """The host and its offset; None where that says nothing that is not known."""
        host, sent_ns = self._asked.pop(int(message["id"]), ("", 0))
        if not host:
            return None
        half_ns = (now_ns - sent_ns) // 2  # half the round trip is the most that it can be wrong (Cristian 1989)
        found = Offset(offset_ns=sent_ns + half_ns - int(message["mono_ns"]), error_ns=half_ns, at_ns=now_ns)
        if not self._news(found, self._told.get(host)):
            return None
        self._told[host] = found
        return host, found

    def _news(self, found: Offset, told: Offset | None) -> bool:
        """Whether it moved for certain, is much better known, or was not said for long."""
        if told is None or found.at_ns - told.at_ns >= AGAIN_S * SECOND_NS:
            return True
        moved_ns = abs(found.offset_ns - told.offset_ns)
        return moved_ns > found.error_ns + told.error_ns or found.error_ns < told.error_ns // 2

    def forget(self, host: str) -> None:
        """It went: nothing that it was asked will be answered, and whoever comes may have been booted anew."""
        self._asked = {number: asked for number, asked in self._asked.items() if asked[0] != host}
        self._told.pop(host, None)
