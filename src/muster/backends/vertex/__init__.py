"""Vertex AI custom jobs: what is asked for (``custom_job``), who asks (``launcher``), and what hosts do (``host``)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from muster.backends.backend import Acceptance, Backend, Capabilities, Checks, Market, RenderedFiles, container_image
from muster.backends.google.stand_in import stand_in
from muster.backends.protocols import Launcher
from muster.backends.vertex.run_file_rules import rules, unused_settings
from muster.catalog.offers import Option
from muster.config.spec import RunSpec
from muster.core.errors import Problem
from muster.core.typed_json import JsonObject


def _launcher() -> Launcher:
    from muster.backends.vertex.launcher import VertexLauncher

    return VertexLauncher()


def _rendered(spec: RunSpec, *, run_id: str, run_dir: str | None, options: JsonObject) -> RenderedFiles:
    from muster.backends.vertex.custom_job import rendered

    return rendered(spec, run_id=run_id, run_dir=run_dir)


def _rents(options: Sequence[Option]) -> Sequence[Option]:
    from muster.backends.vertex.placement import rents

    return rents(options)


def _plan_notes(spec: RunSpec, step_s: float, usd_per_hour: float | None) -> Iterable[str]:
    from muster.backends.vertex.placement import place
    from muster.backends.vertex.reducers import worth

    if spec.resources.hosts > 1:
        yield worth(place(spec, run_id="run", run_dir=None), step_s=step_s, usd_per_hour=usd_per_hour)


def _rules(spec: RunSpec) -> Iterable[Problem]:
    return rules(spec)


BACKEND = Backend(
    name="vertex",
    launcher=_launcher,
    capabilities=Capabilities(secret_manager=True, in_google_cloud=True, in_regions=True, renders_tpus=True),
    checks=Checks(rules=_rules, unused=unused_settings, image=container_image),
    formats={"yaml": _rendered},
    market=Market(rents=_rents, notes=_plan_notes),
    acceptance=Acceptance(stand_in=stand_in),
)
