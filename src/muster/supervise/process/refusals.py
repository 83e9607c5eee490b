"""A connection whose message cannot be read ends; the run does not, and its log says why."""

from __future__ import annotations

from dataclasses import dataclass, field

from muster.core.typed_json import JsonObject

#: A peer that has not sent its greeting yet.
NEW = "a new connection"
#: It is logged this often for each peer: what connects again does so at once.
EVERY_NS = 60 * 10**9


@dataclass
class Refusals:
    """Which of them to log."""

    _logged_ns: dict[tuple[str, str], int] = field(default_factory=dict)

    def add(self, who: str, reason: str, *, now_ns: int, about: str = "") -> JsonObject | None:
        """The detail of the event; None: this peer's was logged a moment ago. ``about``: tells peers apart that are
        all the same ``who``."""
        self._logged_ns = {key: at_ns for key, at_ns in self._logged_ns.items() if now_ns - at_ns < EVERY_NS}
        if (who, about) in self._logged_ns:
            return None
        self._logged_ns[who, about] = now_ns
        return {"who": who or NEW, "reason": reason[:300]}
