"""One run file planned over several back ends, or for GPUs and for TPUs: where it is cheapest, and why the others are
not, or cannot be."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Literal

from muster.app.planning.plan import Planned, plan
from muster.config import load
from muster.config.backends import BACKENDS
from muster.core.errors import MusterError, RunFileError, UsageError
from muster.core.typed_json import JsonObject

#: Name in a comparison -> ``resources.device``.
DEVICES = {"gpu": "cuda", "tpu": "tpu"}


@dataclass(frozen=True, kw_only=True)
class Place:
    """The best plan of one back end or device, or why it has none."""

    name: str
    by: str
    """What it is the name of: a backend, or a device."""
    planned: Planned | None
    reason: str
    """In a sentence: what it costs compared with the cheapest, or why there is no plan."""
    wrong: bool = False
    """Because of the run file."""

    @property
    def usd(self) -> float | None:
        return self.planned.chosen.cost.usd_p50 if self.planned is not None else None

    def to_json(self) -> JsonObject:
        chosen = self.planned.to_json()["chosen"] if self.planned is not None else None
        assumptions = list(self.planned.plan.assumptions) if self.planned is not None else []
        return {self.by: self.name, "chosen": chosen, "reason": self.reason, "assumptions": assumptions}


def places(
    run_file: str | Path,
    overrides: Sequence[str] = (),
    *,
    names: Sequence[str],
    by: Literal["backend", "device"] = "backend",
    fastest: bool = False,
    now: datetime | None = None,
    home: Path | None = None,
) -> list[Place]:
    """The cheapest first (``fastest``: the fastest); those without a plan last, those without a known price before.
    Where ``resources.locations`` has zones, a back end whose machines are in regions is planned in their regions.

    ``names``: of back ends, or of ``DEVICES``.

    Raises:
        UsageError: there is none of that name.
    """
    known, what = (BACKENDS.names(), "back end") if by == "backend" else (list(DEVICES), "device")
    for name in names:
        if name not in known:
            raise UsageError(f"there is no {what} {name!r}", hint=" ".join(known))
    found: list[Place] = []
    for name in dict.fromkeys(names):
        own = (
            [*overrides, f"backend={name}", *_located(run_file, overrides, names, name)]
            if by == "backend"
            else overrides
        )
        device = None if by == "backend" else DEVICES[name]
        try:
            planned = plan(run_file, own, fastest=fastest, now=now, home=home, environment=False, device=device)
        except RunFileError as error:
            found.append(Place(name=name, by=by, planned=None, reason=error.in_one_line(), wrong=True))
        except MusterError as error:
            found.append(Place(name=name, by=by, planned=None, reason=str(error)))
        else:
            found.append(Place(name=name, by=by, planned=planned, reason=""))
    found.sort(key=lambda one: _order(one, fastest))
    return [_explained(one, found[0], fastest) for one in found]


def _located(run_file: str | Path, overrides: Sequence[str], names: Sequence[str], name: str) -> list[str]:
    """The regions of the run file's zones, as an override, for a back end that wants regions."""
    if not BACKENDS.get(name).capabilities.in_regions:
        return []
    for other in names:  # the file may hold for one of them alone
        try:
            loaded = load.load(run_file, [*overrides, f"backend={other}"], environment=False, to_plan=True)
        except MusterError:
            continue
        given = loaded.spec.resources.locations
        regions = dict.fromkeys(re.sub(r"(?<=\d)-[a-z]$", "", location) for location in given)
        return [f"resources.locations={json.dumps(list(regions))}"] if list(regions) != given else []
    return []


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
    return replace(place, reason=reason)
