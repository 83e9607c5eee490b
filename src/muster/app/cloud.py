"""Use cases of ``muster up`` and of giving a cluster back: from an empty project to GPUs, and to an empty project."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path

from muster.backends.gke.options import Options
from muster.backends.gke.placement import place
from muster.backends.gke.provision.advice import Advice, capacity_advice
from muster.backends.gke.provision.engine import Progress
from muster.backends.gke.provision.http import Call, GoogleHttp, Http
from muster.backends.gke.provision.quota import Quota, quota
from muster.backends.gke.provision.session import Session
from muster.backends.gke.provision.site import Site, site
from muster.backends.gke.provision.up import Down, down_everywhere, requests, software, up_first, wanted_software
from muster.core.clock import SystemClock
from muster.core.errors import UsageError
from muster.core.seams import Clock, Lease
from muster.core.spec import RunSpec


def place_of(spec: RunSpec, *, zone: str | None = None, adopt: bool = False, options: Options | None = None) -> Site:
    """Project, zone and names for a run file.

    Raises:
        UsageError: not for GKE, or no project, zone or machine.
    """
    if spec.backend != "gke":
        raise UsageError(f"a cluster is for GKE, and this run file's backend is {spec.backend!r}", hint="backend: gke")
    run_dir = spec.run_dir or "/muster-runs"
    return site(place(spec, run_id=spec.name, run_dir=run_dir, options=options or Options()), zone=zone, adopt=adopt)


def places_of(spec: RunSpec, *, zone: str | None = None, adopt: bool = False) -> list[Site]:
    """Every place that the run file names, in its order; ``zone`` alone where given."""
    zones: list[str | None] = [zone] if zone else [*spec.resources.locations] or [None]
    return [place_of(spec, zone=one, adopt=adopt) for one in zones]


def dry_run(where: Site, manifests: Path | None) -> list[Call]:
    """Every request that ``bring_up`` would send to make something. Needs no credentials and touches nothing."""
    return requests(where, software(where, _texts(where, manifests), hugging_face_token=None))


def bring_up(
    places: Sequence[Site],
    manifests: Path | None,
    *,
    hugging_face_token: str | None = None,
    http: Http | None = None,
    clock: Clock | None = None,
    progress: Progress | None = None,
    on_advice: Callable[[Advice | Quota], None] | None = None,
) -> tuple[Site, Lease]:
    """Make what is missing at the first place that has room. Again after any interruption goes on where it was.

    Raises:
        UsageError: released manifests are missing from the folder.
        AccessError, ConflictError, CapacityError, BackendError: as ``provision.up.up``.
    """
    texts = _texts(places[0], manifests)
    software(places[0], texts)
    session = Session(http=http or GoogleHttp(), clock=clock or SystemClock())
    if on_advice is not None:
        for place_, advice in zip(places, capacity_advice(places, session), strict=True):
            on_advice(advice)
            if found := quota(place_, session):
                on_advice(found)
    return up_first(places, session, texts, token=hugging_face_token, progress=progress)


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


def _texts(where: Site, folder: Path | None) -> dict[str, str]:
    if folder is None:
        return {}
    return {
        name: (folder / name).read_text(encoding="utf-8")
        for name in wanted_software(where)
        if os.path.isfile(folder / name)
    }
