"""Machines of Compute Engine: what is asked for (``requests``), and how hosts start (``startup.sh``)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from muster.backends.backend import Acceptance, Backend, Capabilities, Checks, Market, Provisioning, RenderedFiles
from muster.backends.cluster import Cluster
from muster.backends.gce.run_file_rules import rules, unused_settings
from muster.backends.google.stand_in import stand_in
from muster.backends.protocols import Launcher
from muster.catalog.offers import Option
from muster.config.spec import RunSpec
from muster.core.errors import Problem
from muster.core.typed_json import JsonObject


def _launcher() -> Launcher:
    from muster.backends.gce.launcher import GceLauncher

    return GceLauncher()


def _rendered(spec: RunSpec, *, run_id: str, run_dir: str | None, options: JsonObject) -> RenderedFiles:
    from muster.backends.gce.requests import rendered

    return rendered(spec, run_id=run_id, run_dir=run_dir)


def _terraform(spec: RunSpec, *, run_id: str, run_dir: str | None, options: JsonObject) -> RenderedFiles:
    from muster.backends.gce.inventory import rendered
    from muster.backends.gce.project import open_project

    return RenderedFiles(files=rendered(open_project(spec).sites[0].placement))


def _cluster(spec: RunSpec, *, zone: str | None = None, adopt: bool = False) -> Cluster:
    from muster.backends.gce.project import open_project

    return open_project(spec, zone=zone, adopt=adopt)


def _rents(options: Sequence[Option]) -> Sequence[Option]:
    from muster.backends.gce.placement import rents

    return rents(options)


def _rules(spec: RunSpec) -> Iterable[Problem]:
    return rules(spec)


BACKEND = Backend(
    name="gce",
    launcher=_launcher,
    capabilities=Capabilities(in_zones=True, secret_manager=True, in_google_cloud=True, renders_tpus=True),
    checks=Checks(rules=_rules, unused=unused_settings, image=lambda spec: spec.gce.image),
    formats={"yaml": _rendered, "terraform": _terraform},
    market=Market(rents=_rents),
    provisioning=Provisioning(cluster=_cluster),
    acceptance=Acceptance(stand_in=stand_in),
)
