"""``muster render RUN.yaml``: what would be sent, as text."""

from __future__ import annotations

import sys
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from muster.app import api


class Format(StrEnum):
    YAML = "yaml"
    HELM = "helm"
    TOOLKIT = "toolkit"
    TERRAFORM = "terraform"


class Network(StrEnum):
    AUTO = "auto"
    ANNOTATIONS = "annotations"
    CLAIMS = "claims"


class Nccl(StrEnum):
    NODE = "node"
    CATALOGUE = "catalogue"


def render(
    run_file: Annotated[Path, typer.Argument(help="The run file.", metavar="RUN.yaml")],
    overrides: Annotated[list[str] | None, typer.Argument(help="key.path=value, as for train.")] = None,
    format: Annotated[
        Format, typer.Option(help="As sent; a chart (GKE); a Toolkit blueprint (Slurm); Terraform (GKE, gce).")
    ] = Format.YAML,
    output: Annotated[Path | None, typer.Option(help="Folder to write to; default for yaml: standard output.")] = None,
    namespace: Annotated[str, typer.Option(help="Kubernetes namespace.")] = "default",
    network: Annotated[Network, typer.Option(help="How data NICs are attached; claims: DRANET.")] = Network.AUTO,
    nccl: Annotated[Nccl, typer.Option(help="NCCL's environment: Google's script on the node, or ours.")] = Nccl.NODE,
    run_claim: Annotated[str | None, typer.Option(help="ReadWriteMany claim for run folders, not a bucket.")] = None,
    kueue: Annotated[bool, typer.Option(help="Queue through Kueue.")] = True,
) -> None:
    """Print what would be sent to GKE, Vertex AI, Compute Engine or Slurm, offline.

    Needs no project and no credentials.
    """
    from muster.app.cluster import render as use_case

    if format in (Format.HELM, Format.TERRAFORM) and output is None:
        raise api.UsageError(f"{format.value} is a folder of files", hint="--output FOLDER")
    options = {
        "namespace": namespace, "network": network.value, "nccl": nccl.value, "kueue": kueue, "run_claim": run_claim,
    }  # fmt: skip
    spec = api.load(run_file, overrides or [], environment=False).spec
    rendered = use_case.render(spec, format=format.value, options=options)
    for warning in rendered.warnings:
        print(f"warning: {warning.key}: {warning.message}", file=sys.stderr)
    if output is None:
        print("---\n".join(rendered.files.values()), end="")
    else:
        for path in use_case.write(rendered, output):
            print(path)
