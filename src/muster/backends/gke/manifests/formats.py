"""The formats of ``muster render`` for GKE: the manifests as they are sent, or a Helm chart of them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from muster.backends.backend import RenderedFiles
from muster.backends.gke.manifests.cluster_options import Options
from muster.backends.gke.manifests.helm_chart import chart
from muster.backends.gke.manifests.placement import place
from muster.backends.gke.manifests.render import render
from muster.backends.gke.manifests.spec_rules import findings
from muster.config.spec import RunSpec
from muster.core.errors import Problem


def manifests(spec: RunSpec, *, run_id: str, run_dir: str | None, options: Mapping[str, Any]) -> RenderedFiles:
    """``options`` are fields of ``Options``.

    Raises:
        RunFileError: rules across keys are broken, each with its reason.
    """
    run_dir, chosen = _folder(spec, run_id, run_dir), Options(**options)
    files = render(spec, run_id=run_id, run_dir=run_dir, options=chosen).files
    return RenderedFiles(files=files, warnings=_warnings(spec, run_id, run_dir, chosen))


def helm(spec: RunSpec, *, run_id: str, run_dir: str | None, options: Mapping[str, Any]) -> RenderedFiles:
    """The same as a chart. Raises as ``manifests``."""
    run_dir, chosen = _folder(spec, run_id, run_dir), Options(**options)
    files = chart(spec, run_id=run_id, run_dir=run_dir, options=chosen)
    return RenderedFiles(files=files, warnings=_warnings(spec, run_id, run_dir, chosen))


def _folder(spec: RunSpec, run_id: str, run_dir: str | None) -> str:
    return run_dir or spec.run_dir or f"/muster-runs/{run_id}"


def _warnings(spec: RunSpec, run_id: str, run_dir: str, options: Options) -> tuple[Problem, ...]:
    placement = place(spec, run_id=run_id, run_dir=run_dir, options=options)
    return tuple(
        Problem(key=each.key, message=f"{each.message}: {each.reason}", hint=each.hint) for each in findings(placement)
    )
