"""One run file planned over several back ends: where it is cheapest, and why the others are not, or cannot be."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from muster.app.planning.plan import Planned, plan
from muster.config.backends import BACKENDS
from muster.core.errors import MusterError, UsageError
from muster.core.typed_json import JsonObject


@dataclass(frozen=True, kw_only=True)
class Place:
    """The best plan of one back end, or why it has none."""

    backend: str
    planned: Planned | None
    reason: str
    """In a sentence: what it costs beside the cheapest, or why there is no plan."""

    @property
    def usd(self) -> float | None:
        return self.planned.chosen.cost.usd_p50 if self.planned is not None else None

    def to_json(self) -> JsonObject:
        chosen = self.planned.to_json()["chosen"] if self.planned is not None else None
        return {"backend": self.backend, "chosen": chosen, "reason": self.reason}


def places(
    run_file: str | Path,
    overrides: Sequence[str] = (),
    *,
    names: Sequence[str],
    fastest: bool = False,
    now: datetime | None = None,
    home: Path | None = None,
) -> list[Place]:
    """The cheapest first (``fastest``: the fastest); those without a plan last, those whose price nobody knows before.

    Raises:
        UsageError: no such back end.
    """
    found: list[Place] = []
    for name in dict.fromkeys(names):
        if name not in BACKENDS.names():
            raise UsageError(f"there is no back end {name!r}", hint=" ".join(BACKENDS.names()))
        try:
            own = [*overrides, f"backend={name}"]
            planned = plan(run_file, own, fastest=fastest, now=now, home=home, environment=False)
            found.append(Place(backend=name, planned=planned, reason=""))
        except MusterError as error:
            found.append(Place(backend=name, planned=None, reason=str(error)))
    found.sort(key=lambda one: _order(one, fastest))
    return [_explained(one, found[0], fastest) for one in found]


def _order(place: Place, fastest: bool) -> tuple[int, float]:
    if place.planned is None:
        return (2, 0.0)
    if fastest:
        return (0, place.planned.chosen.cost.hours_p50)
    return (0, place.usd) if place.usd is not None else (1, 0.0)


def _explained(place: Place, best: Place, fastest: bool) -> Place:
    if place.planned is None or best.planned is None:
        return place
    if place is best:
        reason = "the fastest" if fastest else "the cheapest"
    elif fastest:
        more = place.planned.chosen.cost.hours_p50 / best.planned.chosen.cost.hours_p50 - 1
        reason = f"{more:.0%} more time than {best.backend}"
    elif place.usd is None or best.usd is None:
        reason = "its price is not known"
    elif best.usd == 0 or place.usd == best.usd:
        reason = f"as {best.backend}" if place.usd == best.usd else f"{best.backend} is free"
    else:
        reason = f"{place.usd / best.usd - 1:.0%} dearer than {best.backend}"
    return Place(backend=place.backend, planned=place.planned, reason=reason)
