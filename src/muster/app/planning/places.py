"""One run file planned over several back ends, or for GPUs and for TPUs: where it is cheapest, and why the others are
not, or cannot be."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from muster.app.planning.plan import Planned, plan
from muster.config.backends import BACKENDS
from muster.core.errors import MusterError, UsageError
from muster.core.typed_json import JsonObject

#: Name in a comparison -> ``resources.device``.
DEVICES = {"gpu": "cuda", "tpu": "tpu"}


@dataclass(frozen=True, kw_only=True)
class Place:
    """The best plan of one back end or device, or why it has none."""

    name: str
    planned: Planned | None
    reason: str
    """In a sentence: what it costs beside the cheapest, or why there is no plan."""

    @property
    def usd(self) -> float | None:
        return self.planned.chosen.cost.usd_p50 if self.planned is not None else None

    def to_json(self) -> JsonObject:
        chosen = self.planned.to_json()["chosen"] if self.planned is not None else None
        assumptions = list(self.planned.plan.assumptions) if self.planned is not None else []
        named = "device" if self.name in DEVICES else "backend"
        return {named: self.name, "chosen": chosen, "reason": self.reason, "assumptions": assumptions}


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
    for name in names:
        if name not in BACKENDS.names():
            raise UsageError(f"there is no back end {name!r}", hint=" ".join(BACKENDS.names()))

    def planned(name: str) -> Planned:
        own = [*overrides, f"backend={name}"]
        return plan(run_file, own, fastest=fastest, now=now, home=home, environment=False)

    return _compared(names, planned, fastest)


def devices(
    run_file: str | Path,
    overrides: Sequence[str] = (),
    *,
    names: Sequence[str],
    fastest: bool = False,
    now: datetime | None = None,
    home: Path | None = None,
) -> list[Place]:
    """GPU or TPU? Ordered as ``places``; ``names``: of ``DEVICES``.

    Raises:
        UsageError: no such device.
    """
    for name in names:
        if name not in DEVICES:
            raise UsageError(f"there is no device {name!r} to compare", hint=",".join(DEVICES))

    def planned(name: str) -> Planned:
        device = DEVICES[name]
        return plan(run_file, overrides, fastest=fastest, now=now, home=home, environment=False, device=device)

    return _compared(names, planned, fastest)


def _compared(names: Sequence[str], planned: Callable[[str], Planned], fastest: bool) -> list[Place]:
    found: list[Place] = []
    for name in dict.fromkeys(names):
        try:
            found.append(Place(name=name, planned=planned(name), reason=""))
        except MusterError as error:
            found.append(Place(name=name, planned=None, reason=str(error)))
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
        reason = f"{more:.0%} more time than {best.name}"
    elif place.usd is None or best.usd is None:
        reason = "its price is not known"
    elif best.usd == 0 or place.usd == best.usd:
        reason = f"as {best.name}" if place.usd == best.usd else f"{best.name} is free"
    else:
        reason = f"{place.usd / best.usd - 1:.0%} dearer than {best.name}"
    return Place(name=place.name, planned=place.planned, reason=reason)
