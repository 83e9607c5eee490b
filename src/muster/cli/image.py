"""``muster image RUN.yaml``: build the image that a run file's machine needs."""

from __future__ import annotations

import typer

from muster.app import api
from muster.cli import output
from muster.cli.run_commands import OVERRIDES, RUN_FILE


def image(
    run_file: str = RUN_FILE,
    overrides: list[str] = OVERRIDES,
    zone: str | None = typer.Option(None, "--zone", help="Zone; default: the first of resources.locations."),
    base: str | None = typer.Option(None, "--base", help="Base image; default: the table's."),
    torch: str | None = typer.Option(None, "--torch", help="Version of torch; default: the table's."),
    torch_index: str | None = typer.Option(None, "--torch-index", help="pip index of torch; its name says which CUDA."),
    dry_run: bool = typer.Option(False, "--dry-run", help="Print every request; change nothing."),
) -> None:
    """Build the image that a run needs with Cloud Build.

    Prints its name; needs no docker here; the same parts are built once.
    """
    from muster.app.cluster.up_down import cluster_of

    spec = api.load(run_file, overrides or [], environment=False).spec
    result = cluster_of(spec, zone=zone).image(base=base, torch=torch, torch_index=torch_index)
    for doubt in result.doubts:
        output.info(f"warning: {doubt}")
    if dry_run:
        for call in result.calls():
            output.result(call.shown())
        return
    output.info(f"building {result.name}: about 20 minutes the first time")
    built = result.build()
    output.result(result.name)
    output.info(("built" if built else "it existed already") + f"; hint: resources.image: {result.name}")
