"""The formats of ``muster render`` for GKE: the manifests as they are sent, or a Helm chart of them."""

from __future__ import annotations

from collections.abc import Mapping

from muster.backends.backend import RenderedFiles
from muster.backends.gke.manifests.cluster_options import Options
from muster.backends.gke.manifests.helm_chart import chart
from muster.backends.gke.manifests.placement import place
from muster.backends.gke.manifests.render import render
from muster.backends.gke.manifests.spec_rules import findings, refuse
from muster.backends.gke.provision import terraform
from muster.config.spec import RunSpec
from muster.core.errors import UsageError
from muster.core.typed_json import JsonObject, convert


def rendered(form: str, spec: RunSpec, *, run_id: str, run_dir: str | None, options: JsonObject) -> RenderedFiles:
    """``form`` is ``yaml``, ``helm`` or ``terraform``; ``options`` are fields of ``Options``.

    Raises:
        RunFileError: rules across keys are broken, each with its reason.
        UsageError: what the form cannot say, or the place is not named.
    """
    chosen = convert(Options, options)
    run_dir = run_dir or spec.run_dir or f"/muster-runs/{run_id}"
    placement = place(spec, run_id=run_id, run_dir=run_dir, options=chosen)
    if placement.slices and form != "yaml":
        raise UsageError(f"slices of TPUs are not rendered as {form} yet", hint="--format yaml, or muster up")
    if form == "terraform":
        refuse(placement)
        files: Mapping[str, str] = terraform.rendered(placement)
    elif form == "helm":
        files = chart(spec, run_id=run_id, run_dir=run_dir, options=chosen)
    else:
        files = render(spec, run_id=run_id, run_dir=run_dir, options=chosen).files
    return RenderedFiles(files=files, warnings=tuple(finding.problem for finding in findings(placement)))
