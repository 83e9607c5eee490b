"""Google Kubernetes Engine: what is sent (render), why a run is where it is (explain), and the hardware (provision)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial

from muster.backends.backend import (
    Acceptance,
    Backend,
    Capabilities,
    Checks,
    Provisioning,
    RenderedFiles,
    container_image,
)
from muster.backends.cluster import Cluster
from muster.backends.google.stand_in import stand_in
from muster.backends.protocols import Launcher
from muster.config.spec import RunSpec
from muster.core.errors import Problem
from muster.core.typed_json import JsonObject
from muster.core.types import JobRequest


def _launcher() -> Launcher:
    """The launcher, with Google's credentials looked for when they are first needed."""
    from muster.backends.gke.launcher import GkeLauncher

    return GkeLauncher()


def _rules(spec: RunSpec) -> Iterable[Problem]:
    from muster.backends.gke.manifests.spec_rules import rules

    return rules(spec)


def _rendered(form: str, spec: RunSpec, *, run_id: str, run_dir: str | None, options: JsonObject) -> RenderedFiles:
    from muster.backends.gke.formats import rendered

    return rendered(form, spec, run_id=run_id, run_dir=run_dir, options=options)


def _cluster(spec: RunSpec, *, zone: str | None = None, adopt: bool = False) -> Cluster:
    from muster.backends.gke.provision.cluster import open_cluster

    return open_cluster(spec, zone=zone, adopt=adopt)


def _access(spec: RunSpec, request: JobRequest) -> Sequence[str]:
    from muster.backends.gke.launcher import GkeLauncher

    return GkeLauncher().look(request)


def _rehearse(spec: RunSpec, *, machine: str | None = None, mode: str | None = None) -> RunSpec:
    """Through the run's own queue, on the nodes of its supervisor: what keeps that from starting is seen there."""
    from muster.backends.cluster import rehearsal
    from muster.backends.gke.manifests.placement import Options, place

    placed = place(spec, run_id="run", run_dir="/unused", options=Options())
    return rehearsal(spec, machine=machine, mode=mode, queue=placed.queue if placed.kueue else None)


def _drain(node: str, reason: str) -> str:
    from muster.backends.gke.operate.cordon import cordon

    return cordon(node, reason)


BACKEND = Backend(
    name="gke",
    launcher=_launcher,
    capabilities=Capabilities(ships_code=True, in_google_cloud=True, trains_on_tpus=True),
    checks=Checks(rules=_rules, image=container_image),
    formats={form: partial(_rendered, form) for form in ("yaml", "helm", "terraform")},
    provisioning=Provisioning(cluster=_cluster, drain=_drain),
    acceptance=Acceptance(access=_access, rehearse=_rehearse, stand_in=stand_in),
)
