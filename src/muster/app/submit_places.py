"""Submit to the first of several places that takes the run: the plan's order of back ends, machines, modes and zones.

One request at a time: the next place is asked when the one before has refused, or was left, and holds nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from muster.app.inspect.status import status
from muster.app.planning.places import places
from muster.app.planning.plan import Planned, format, settings_of
from muster.app.run import remove, stop
from muster.app.run.submit import Submitted, Tell, submit
from muster.config import load
from muster.core.clock import SystemClock
from muster.core.errors import AccessError, CapacityError, NoPlanError, RunFileError, UsageError
from muster.core.protocols import Clock
from muster.core.types import JobState, JobStatus
from muster.plan import plan_file

LOOK_S = 30.0
"""Between two looks at a run that waits."""


@dataclass(frozen=True, kw_only=True)
class Way:
    place: str
    title: str
    """Back end, machines, mode, location and cost, in words."""
    usd: float | None
    overrides: tuple[str, ...]
    """What makes the run file this request."""


def ways(
    run_file: str | Path,
    overrides: Sequence[str] = (),
    *,
    names: Sequence[str],
    now: datetime | None = None,
    home: Path | None = None,
) -> tuple[list[Way], list[str]]:
    """What to ask for, the cheapest first and those without a known price last; and why a place has nothing.

    A place's ways are its plan's: the chosen one, and of each other machine, mode and location the cheapest of those
    that are faster for more money.

    Raises:
        UsageError: there is no back end of that name, or the run file is wrong for each.
        NoPlanError: no place has a plan.
    """
    found: list[Way] = []
    without: list[str] = []
    wrong = True
    for each in places(run_file, overrides, names=names, now=now, home=home):
        if each.planned is None:
            without.append(f"{each.name}: {each.reason}")
            wrong = wrong and each.wrong
            continue
        possible = _ways(each.name, each.planned)
        try:  # a plan does without names that a request needs
            load.load(run_file, possible[0].overrides)
        except RunFileError as error:
            without.append(f"{each.name}: {error.in_one_line()} (muster show {run_file} backend={each.name})")
        else:
            found += possible
    if not found:
        raise (UsageError if wrong else NoPlanError)("no place can be asked: " + "; ".join(without))
    return sorted(found, key=lambda way: (way.usd is None, way.usd or 0.0)), without


def _ways(name: str, planned: Planned) -> list[Way]:
    result: dict[tuple[str, str, str], Way] = {}
    others = sorted(planned.outcome.frontier, key=lambda one: (one.cost.usd_p50 is None, one.cost.usd_p50 or 0.0))
    for candidate in (planned.chosen, *others):
        offer, cost = candidate.option.offer, candidate.cost
        settings = dict(settings_of(planned, candidate))
        if planned.spec.resources.locations:  # the back end asks them one after the other, as the file has them
            settings.pop("resources.locations", None)
        where = ",".join(planned.spec.resources.locations) or offer.location
        way = Way(
            place=name,
            title=f"{name}: {candidate.title}, {format.dollars(cost.usd_p50)}",
            usd=cost.usd_p50,
            overrides=(*planned.plan.overrides, *plan_file.settings_as_overrides(settings)),
        )
        result.setdefault((offer.machine, offer.mode, where), way)
    return list(result.values())


def submit_to_first(
    run_file: str | Path,
    overrides: Sequence[str] = (),
    *,
    names: Sequence[str],
    patience_s: float | None = None,
    argv: Sequence[str] = (),
    tell: Tell = lambda _text: None,
    clock: Clock | None = None,
) -> Submitted:
    """Start the run at the first place that takes it: lack of machines or quota, and a refusal of access, lead to the
    next one. ``patience_s``: wait that long for its hosts, else cancel the request and ask the next place (the last
    one is not waited for); None: return as soon as a place has taken it, into a queue too.

    Raises:
        NoPlanError: no place has a plan.
        UsageError: no such back end, the run file is wrong for each, or all would use one ``run_dir`` and leave it half
            used.
        CapacityError: no place takes it; every reason.
        ConflictError, BackendError: a place's; it may hold something, so no other place was asked.
    """
    clock = clock or SystemClock()
    asked, refused = ways(run_file, overrides, names=names)
    for reason in refused:
        tell(f"left out: {reason}")
    if patience_s is not None and load.load(run_file, asked[0].overrides).spec.run_dir is not None:
        raise UsageError("run_dir names one folder, and each place that is left needs another", hint="leave it out")
    for number, way in enumerate(asked, 1):
        tell(f"asking {way.title}")
        try:
            result = submit(load.load(run_file, way.overrides), argv=argv, tell=tell)
        except (CapacityError, AccessError) as error:
            tell(f"refused: {error}")
            refused.append(f"{way.place}: {error}")
            continue
        if patience_s is None or number == len(asked):
            return result
        at_most = format.duration(patience_s / 3600)
        tell(f"{result.run.run_id} waits for its hosts, {at_most} at most; Ctrl-C leaves it there")
        found = _watched(result, patience_s, clock)
        if not _moves_on(found):
            return result
        tell(f"cancelled: {found.reason}")
        refused.append(f"{way.place}: {found.reason}")
        stop.down(result.run.run_id)  # raises where something is left: two requests would be under way
        remove.remove(remove.removal(result.run.run_id))
    raise CapacityError("no place takes the run: " + "; ".join(refused), hint="muster plan --all shows every offer")


def _watched(result: Submitted, patience_s: float, clock: Clock) -> JobStatus:
    """The last look: at a run that runs or has ended, or that has waited long enough."""
    waited_s = 0.0
    while True:
        found = status(result.run.run_id).status
        if found.state is not JobState.WAITING or waited_s >= patience_s:
            return found
        clock.sleep(LOOK_S)
        waited_s += LOOK_S


def _moves_on(found: JobStatus) -> bool:
    """Whether the place has no machines for the run, as far as anybody can tell now."""
    if found.state is JobState.FAILED:
        return found.exit_code == CapacityError.exit_code
    return found.state is JobState.WAITING
