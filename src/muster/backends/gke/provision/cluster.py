"""The cluster of a run file: from an empty project to GPUs, back to an empty project, and the image for it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from muster.backends.cluster import Down, Image, Progress, Said, silent
from muster.backends.gke.manifests.placement import Options, place
from muster.backends.gke.provision.access import preflight
from muster.backends.gke.provision.image import Build, context, doubts, parts, tag
from muster.backends.gke.provision.inventory.resource_names import Site, site, today
from muster.backends.gke.provision.quota import capacity_advice, quotas
from muster.backends.gke.provision.software import (
    Fetch,
    at_hand,
    fetch_missing,
    hashes,
    parsed,
    pin,
    pins,
    software,
    unpinned,
)
from muster.backends.gke.provision.up import down, requests, up_first
from muster.backends.google.http import Call, GoogleHttp, Http
from muster.backends.google.session import Session
from muster.backends.protocols import Lease
from muster.config.spec import RunSpec
from muster.core.clock import SystemClock
from muster.core.errors import CapacityError, UsageError
from muster.core.protocols import Clock


@dataclass(frozen=True, kw_only=True)
class GkeCluster:
    """Every location that the run file names, in its order; ``backends.cluster.Cluster`` says what each call does."""

    sites: tuple[Site, ...]
    http: Http = field(default_factory=lambda: GoogleHttp())
    clock: Clock = field(default_factory=SystemClock)
    fetch: Fetch | None = None

    @property
    def project(self) -> str:
        return self.sites[0].project

    def session(self) -> Session:
        return Session(http=self.http, clock=self.clock)

    def dry_run(self, manifests: Path | None) -> tuple[list[Call], list[str]]:
        where = self.sites[0]
        texts = at_hand(where, manifests)
        missing = unpinned(where, texts, pins())
        return requests(where, parsed(where, texts)), [
            f"{document.sentence()}: not pinned by hash" for document in missing
        ]

    def look(self) -> list[str]:
        first, session = self.sites[0], self.session()
        preflight(first, session)
        needs = quotas(first, session)
        if short := [need for need in needs if need.short]:
            raise CapacityError("; ".join(need.sentence() for need in short), hint="ask for quota, or another mode")
        return [need.sentence() for need in needs if need.what == "GPUs"]

    def pin(self, manifests: Path | None) -> tuple[Mapping[str, str], Path]:
        where = self.sites[0]
        if manifests is None:
            fetch_missing(where, self.fetch)
        digests = hashes(where, at_hand(where, manifests))
        return digests, pin(digests, day=today(SystemClock()))

    def up(self, manifests: Path | None, *, token: str | None = None, progress: Progress = silent) -> Lease:
        first = self.sites[0]
        if manifests is None:
            for line in fetch_missing(first, self.fetch):
                progress(Said(text=line))
        texts, pinned = at_hand(first, manifests), pins()
        software(first, texts, pins=pinned)
        session = self.session()
        preflight(first, session)
        for where, advice in zip(self.sites, capacity_advice(self.sites, session), strict=True):
            progress(Said(text=f"capacity: {advice.sentence()}"))
            for need in quotas(where, session):
                if need.what == "GPUs" or need.short:
                    progress(Said(text=f"capacity: {need.sentence()}"))
        where, lease = up_first(self.sites, session, texts, pins=pinned, token=token, progress=progress)
        return replace(lease, labels={**lease.labels, "zone": where.zone})

    def down(self, *, keep_data: bool = False, progress: Progress = silent) -> Down:
        return down(self.sites, self.session(), keep_data=keep_data, progress=progress)

    def image(self, *, base: str | None = None, torch: str | None = None, torch_index: str | None = None) -> Image:
        where = self.sites[0]
        made_of = parts(base=base, torch=torch, torch_index=torch_index)
        reducers = bool(where.placement.spec.vertex.reduction_servers)
        result = doubts(made_of, where.placement.family, where.placement.machine, reducers=reducers)
        if wrong := [doubt.message for doubt in result if doubt.wrong]:
            raise UsageError("these do not fit: " + "; ".join(wrong), hint="--base, --torch-index")
        data = context(made_of)
        job = Build(site=where, parts=made_of, tag=tag(made_of, data), data=data)
        said = tuple(doubt.message for doubt in result)
        return Image(name=job.image, doubts=said, calls=job.calls, build=lambda: job.run(self.session()))


def open_cluster(spec: RunSpec, *, zone: str | None = None, adopt: bool = False) -> GkeCluster:
    """The cluster of a run file, at ``zone`` alone where given. Touches nothing.

    Raises:
        UsageError: no project, zone or machine.
    """
    placement = place(spec, run_id=spec.name, run_dir=spec.run_dir or "/muster-runs", options=Options())
    zones: list[str | None] = [zone] if zone else [*spec.resources.locations] or [None]
    day = today(SystemClock())
    return GkeCluster(sites=tuple(site(placement, zone=zone, adopt=adopt, day=day) for zone in zones))
