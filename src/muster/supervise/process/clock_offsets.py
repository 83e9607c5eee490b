"""Hosts' monotonic clocks against the supervisor's, by round trips."""

from __future__ import annotations

from dataclasses import dataclass, field

from muster.protocol.to_agent import Ping
from muster.protocol.to_supervisor import Pong
from muster.supervise.recovery.inputs import SECOND_NS

#: An offset that has not changed is logged again after this time.
AGAIN_S = 600.0


@dataclass(frozen=True, kw_only=True)
class Offset:
    """Of ``host``: add ``offset_ns`` to its monotonic clock; ``error_ns``: its greatest error."""

    host: str
    offset_ns: int
    error_ns: int
    at_ns: int


@dataclass
class ClockOffsets:
    """Pings that are not answered yet, and the offset last logged of each host."""

    _asked: dict[int, tuple[str, int]] = field(default_factory=dict)
    _logged: dict[str, Offset] = field(default_factory=dict)
    _number: int = 0

    def ping(self, host: str, now_ns: int) -> Ping:
        """The message for a host."""
        self._number += 1
        self._asked[self._number] = (host, now_ns)
        return Ping(number=self._number)

    def pong(self, message: Pong, now_ns: int) -> Offset | None:
        """The host's offset; None where it adds nothing to what is logged."""
        host, sent_ns = self._asked.pop(message.number, ("", 0))
        if not host:
            return None
        half_ns = (now_ns - sent_ns) // 2  # half the round trip is the greatest error (Cristian 1989)
        offset = Offset(host=host, offset_ns=sent_ns + half_ns - message.mono_ns, error_ns=half_ns, at_ns=now_ns)
        if not self._is_news(offset, self._logged.get(host)):
            return None
        self._logged[host] = offset
        return offset

    def _is_news(self, offset: Offset, logged: Offset | None) -> bool:
        """Whether it has certainly changed, is known much better, or was not logged for long."""
        if logged is None or offset.at_ns - logged.at_ns >= AGAIN_S * SECOND_NS:
            return True
        change_ns = abs(offset.offset_ns - logged.offset_ns)
        return change_ns > offset.error_ns + logged.error_ns or offset.error_ns < logged.error_ns // 2

    def forget(self, host: str) -> None:
        """Host disconnected: drop pending pings and the offset; it may have rebooted when it reconnects."""
        self._asked = {number: asked for number, asked in self._asked.items() if asked[0] != host}
        self._logged.pop(host, None)
