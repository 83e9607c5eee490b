"""The ``Provisioner`` seam for GKE: hardware is a cluster, named by the run file and shared by runs of its kind."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from muster.backends.gke.google.http import Http
from muster.backends.gke.google.session import Session
from muster.backends.gke.manifests.cluster_options import Options
from muster.backends.gke.manifests.placement import place
from muster.backends.gke.provision.resource_names import Site, site, today
from muster.backends.gke.provision.up import down_everywhere, resources, up_first
from muster.backends.protocols import Lease
from muster.config.spec import RunSpec
from muster.core.clock import SystemClock
from muster.core.protocols import Clock


@dataclass(kw_only=True)
class GkeProvisioner:
    """Makes and removes what one run file needs; ``find`` and ``release`` speak of that run file's cluster."""

    http: Http
    spec: RunSpec
    manifests: Mapping[str, str] = field(default_factory=dict)
    """Name -> text of the released manifests (``kueue.yaml``...)."""
    pins: Mapping[str, str] = field(default_factory=dict)
    """Address of a released manifest -> the sha256 that the user recorded, where the table has none."""
    clock: Clock = field(default_factory=SystemClock)
    options: Options = field(default_factory=Options)
    workers: int = 8

    def ensure(self, spec: RunSpec, *, run_id: str) -> Lease:
        """Make what is missing at the first place with room; what is there already is left alone."""
        where, lease = up_first(
            self._sites(spec, run_id), self._session(), self.manifests, pins=self.pins, workers=self.workers
        )
        return Lease(run_id=run_id, resources=lease.resources, labels={**lease.labels, "zone": where.zone})

    def find(self, run_id: str) -> Lease | None:
        """What exists of the run file's resources, in any of its places; None where nothing of ours does."""
        session = self._session()
        for where in self._sites(self.spec, run_id):
            there = []
            for resource in resources(where, None):
                result = resource.look(session)
                if result.state != "absent" and result.ours:
                    there.append(resource.key)
            if there:
                return Lease(run_id=run_id, resources=tuple(there), labels={"managed-by": "muster", "zone": where.zone})
        return None

    def release(self, run_id: str) -> list[str]:
        """Remove everything of ours in all places; returns what still exists afterwards."""
        result = down_everywhere(self._sites(self.spec, run_id), self._session(), workers=self.workers)
        return [*result.troubles, *(f"{one.kind}/{one.name}" for one in result.leftovers)]

    def _sites(self, spec: RunSpec, run_id: str) -> list[Site]:
        placement = place(spec, run_id=run_id, run_dir=spec.run_dir or "/muster-runs", options=self.options)
        day = today(self.clock)
        return [site(placement, zone=zone, day=day) for zone in spec.resources.locations] or [site(placement, day=day)]

    def _session(self) -> Session:
        return Session(http=self.http, clock=self.clock)
