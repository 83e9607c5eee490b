"""A connection whose message cannot be read ends; the run does not, and its log says why."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeVar

from muster.core.typed_json import Unreadable
from muster.protocol.channel import Channel
from muster.protocol.codec import reader_of

#: Who it is that has not said so yet.
NEW = "a new connection"
#: It is logged this often for each peer: what connects again does so at once.
EVERY_NS = 60 * 10**9
Message = TypeVar("Message")


@dataclass
class Refusals:
    """Logs them: ``log(who, reason)``."""

    log: Callable[[str, str], None]
    clock_ns: Callable[[], int]
    _logged_ns: dict[tuple[str, str], int] = field(default_factory=dict)

    def add(self, who: str, reason: str, *, about: str = "") -> None:
        """``about``: tells peers apart that are all the same ``who``."""
        now = self.clock_ns()
        self._logged_ns = {key: at_ns for key, at_ns in self._logged_ns.items() if now - at_ns < EVERY_NS}
        if (who, about) not in self._logged_ns:
            self._logged_ns[who, about] = now
            self.log(who, reason[:300])

    def reader(self, channel: Channel[Message], who: object) -> Callable[[bytes], Message]:
        """``codec.reader_of``, and what it cannot read is logged."""
        return self.noting(reader_of(channel), who)

    def noting(self, read: Callable[[bytes], Message], who: object) -> Callable[[bytes], Message]:
        """``read``; where it raises Unreadable, that is logged."""

        def reading(frame: bytes) -> Message:
            try:
                return read(frame)
            except Unreadable as error:
                self.add(str(who), str(error))
                raise

        return reading
