"""Use cases of ``muster up`` and of giving a cluster back: from an empty project to GPUs, and to an empty project."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from muster.app.cluster import pinned_manifests as released
from muster.backends.gke.google.http import Call, GoogleHttp, Http
from muster.backends.gke.manifests.cluster_options import Options
from muster.backends.gke.manifests.placement import place
from muster.backends.gke.provision.access import preflight
from muster.backends.gke.provision.advice import Advice, capacity_advice
from muster.backends.gke.provision.progress import Began, Changed, Event, Planned, Progress, Row, Said, Tree
from muster.backends.gke.provision.quota import Quota, quota
from muster.backends.gke.provision.resource_names import Site, site, today
from muster.backends.gke.google.session import Session
from muster.backends.gke.provision.software import hashes, parsed, software, unvouched, wanted_software
from muster.backends.gke.provision.up import Down, down_everywhere, requests, up_first
from muster.backends.protocols import Lease
from muster.config.spec import RunSpec
from muster.core.clock import SystemClock
from muster.core.errors import UsageError
from muster.core.protocols import Clock

__all__ = [
    "Began",
    "Changed",
    "Down",
    "Event",
    "Lease",
    "Planned",
    "Progress",
    "Row",
    "Said",
    "Site",
    "Tree",
    "audit_shown",
    "bring_up",
    "dry_run",
    "give_back",
    "pin",
    "place_of",
    "places_of",
    "shown",
    "wanted_software",
]


def place_of(spec: RunSpec, *, zone: str | None = None, adopt: bool = False, options: Options | None = None) -> Site:
    """Project, zone and names for a run file.

    Raises:
        UsageError: not for GKE, or no project, zone or machine.
    """
    if spec.backend != "gke":
        raise UsageError(f"a cluster is for GKE, and this run file's backend is {spec.backend!r}", hint="backend: gke")
    run_dir = spec.run_dir or "/muster-runs"
    placement = place(spec, run_id=spec.name, run_dir=run_dir, options=options or Options())
    return site(placement, zone=zone, adopt=adopt, day=today(SystemClock()))


def places_of(spec: RunSpec, *, zone: str | None = None, adopt: bool = False) -> list[Site]:
    """Every place that the run file names, in its order; ``zone`` alone where given."""
    zones: list[str | None] = [zone] if zone else [*spec.resources.locations] or [None]
    return [place_of(spec, zone=one, adopt=adopt) for one in zones]


def dry_run(where: Site, manifests: Path | None) -> tuple[list[Call], list[str]]:
    """Every request that ``bring_up`` would send to make something, and what it would refuse to go on with.

    Needs no credentials and touches nothing.
    """
    texts = released.at_hand(where, manifests)
    doubts = [f"{one.sentence()}: nobody has vouched for it" for one in unvouched(where, texts, released.pins())]
    return requests(where, parsed(where, texts)), doubts


def pin(where: Site, manifests: Path | None, *, fetch: released.Fetch | None = None) -> tuple[Mapping[str, str], Path]:
    """Record the hashes of the released manifests at hand (fetched where no folder is given), for this user.

    Returns them by address, and the file they are recorded in.
    """
    if manifests is None:
        released.fetch_missing(where, fetch)
    found = hashes(where, released.at_hand(where, manifests))
    return found, released.pin(found, day=today(SystemClock()))


def bring_up(
    places: Sequence[Site],
    manifests: Path | None,
    *,
    hugging_face_token: str | None = None,
    http: Http | None = None,
    clock: Clock | None = None,
    progress: Progress | None = None,
    fetch: released.Fetch | None = None,
    on_advice: Callable[[Advice | Quota], None] | None = None,
) -> tuple[Site, Lease]:
    """Make what is missing at the first place that has room. Again after any interruption goes on where it was.

    Raises:
        UsageError: released manifests are missing from the folder, or nobody has vouched for them.
        AccessError, ConflictError, CapacityError, BackendError: as ``provision.up.up``.
    """
    if manifests is None:
        for line in released.fetch_missing(places[0], fetch):
            (progress or _silent)(Said(text=line))
    texts, pins = released.at_hand(places[0], manifests), released.pins()
    software(places[0], texts, pins=pins)
    session = Session(http=http or GoogleHttp(), clock=clock or SystemClock())
    if on_advice is not None:
        preflight(places[0], session)
        for place_, advice in zip(places, capacity_advice(places, session), strict=True):
            on_advice(advice)
            if found := quota(place_, session):
                on_advice(found)
    return up_first(places, session, texts, pins=pins, token=hugging_face_token, progress=progress)


def give_back(
    places: Sequence[Site],
    *,
    keep_data: bool = False,
    http: Http | None = None,
    clock: Clock | None = None,
    progress: Progress | None = None,
) -> Down:
    """Remove everything of ours in every place that may have it, then look at the project for what still exists."""
    session = Session(http=http or GoogleHttp(), clock=clock or SystemClock())
    return down_everywhere(places, session, keep_data=keep_data, progress=progress)


def shown(call: Call) -> dict[str, Any]:
    """A request for programs; a secret body is left out."""
    found: dict[str, Any] = {"method": call.method, "url": call.url}
    if call.body is not None:
        found["body"] = None if call.secret else call.body
    return found


def audit_shown(where: Site, found: Down) -> dict[str, Any]:
    """What is left after ``give_back``, for programs."""
    rows = [
        {
            "kind": one.kind,
            "name": one.name,
            "kept": one.kept,
            "bills": one.bills,
            "usd_per_day": one.usd_per_day,
        }
        for one in found.leftovers
    ]
    return {
        "project": where.project,
        "clean": found.clean,
        "not_removed": list(found.troubles),
        "left": rows,
        "usd_per_day": sum(one.usd_per_day or 0.0 for one in found.leftovers),
        "prices_not_known": sum(one.bills is not None and one.usd_per_day is None for one in found.leftovers),
    }


def _silent(event: Event) -> None:
    pass
