"""Use case: a run file as what would be sent, offline: manifests or a Helm chart for GKE, a script for Slurm."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from muster.backends.gke.manifests.cluster_options import Options
from muster.backends.gke.manifests.helm_chart import chart
from muster.backends.gke.manifests.placement import place
from muster.backends.gke.manifests.render import render as render_manifests
from muster.backends.gke.manifests.spec_rules import Finding, findings
from muster.backends.slurm import toolkit
from muster.backends.slurm.script import SCRIPT, script
from muster.config.spec import RunSpec
from muster.core.errors import UsageError
from muster.storage import run_registry

Format = Literal["yaml", "helm", "toolkit"]


@dataclass(frozen=True, kw_only=True)
class Rendered:
    """Texts by relative file name, and what will surprise."""

    run_id: str
    files: dict[str, str]
    warnings: tuple[Finding, ...]


def render(
    spec: RunSpec,
    *,
    format: Format = "yaml",
    run_id: str | None = None,
    run_dir: str | None = None,
    options: Options | None = None,
) -> Rendered:
    """Everything that a run needs on a cluster, without project, credentials or network.

    ``run_id`` and ``run_dir`` default to the run file's name and folder, so that the same file gives the same text.

    Raises:
        RunFileError: rules across keys are broken, each with its reason.
        UsageError: the run file is for another back end, or names no folder.
    """
    if spec.backend == "slurm":
        return _for_slurm(spec, format, run_id, run_dir)
    if spec.backend != "gke":
        raise UsageError(f"manifests are for GKE, and this run file's backend is {spec.backend!r}", hint="backend: gke")
    if format == "toolkit":
        raise UsageError("a Cluster Toolkit blueprint is for Slurm", hint="backend: slurm")
    run_id = run_id or run_registry.slug(spec.name, run_registry.MAX_ID)
    run_dir = run_dir or spec.run_dir or f"/muster-runs/{run_id}"
    options = options or Options()
    if format == "helm":
        files = chart(spec, run_id=run_id, run_dir=run_dir, options=options)
    else:
        files = dict(render_manifests(spec, run_id=run_id, run_dir=run_dir, options=options).files)
    placement = place(spec, run_id=run_id, run_dir=run_dir, options=options)
    return Rendered(run_id=run_id, files=files, warnings=tuple(findings(placement)))


def _for_slurm(spec: RunSpec, format: Format, run_id: str | None, run_dir: str | None) -> Rendered:
    """The job's script, or a blueprint of the cluster that it runs on."""
    if format == "helm":
        raise UsageError("a chart is for GKE, and this run file's backend is 'slurm'", hint="--format yaml or toolkit")
    run_id = run_id or run_registry.slug(spec.name, run_registry.MAX_ID)
    if format == "toolkit":
        return Rendered(run_id=run_id, files=toolkit.blueprint(spec), warnings=())
    run_dir = run_dir or str(run_registry.place(run_id, spec.run_dir))
    return Rendered(run_id=run_id, files={SCRIPT: script(spec, run_id=run_id, run_dir=run_dir)}, warnings=())


def write(rendered: Rendered, folder: Path) -> list[Path]:
    """Write every file below ``folder``; return their paths.

    Raises:
        UsageError: one cannot be written.
    """
    written = []
    for name, text in rendered.files.items():
        path = folder / name
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
        except OSError as error:
            raise UsageError(f"cannot write {path}: {error.strerror}", hint="--output names a folder") from error
        written.append(path)
    return written
