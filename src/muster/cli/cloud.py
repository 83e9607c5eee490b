"""``muster up RUN.yaml`` and its counterpart: a cluster for the run file, and everything gone again."""

from __future__ import annotations

import os
from pathlib import Path

import typer

RUN_FILE = typer.Argument(..., metavar="RUN.yaml", help="The run file.")
OVERRIDES = typer.Argument(None, metavar="[KEY.PATH=VALUE]...", help="Values that replace the file's.")
MANIFESTS = typer.Option(None, "--manifests", help="Folder with the released kueue.yaml, jobset.yaml and installers.")
ZONE = typer.Option(None, "--zone", help="Zone; default: the first of resources.locations.")


def register(app: typer.Typer) -> None:
    """Add the commands; ``muster down RUN.yaml`` is ``give_back``."""
    app.command()(up)


def up(
    run_file: str = RUN_FILE,
    overrides: list[str] = OVERRIDES,
    manifests: Path | None = MANIFESTS,
    zone: str | None = ZONE,
    adopt: bool = typer.Option(False, "--adopt", help="Use a cluster or network of that name that somebody else made."),
    dry_run: bool = typer.Option(False, "--dry-run", help="Print every request; touch nothing."),
) -> None:
    """Make networks, cluster, node pools, queue and bucket in a Google Cloud project; again resumes it."""
    from muster.app import cloud
    from muster.cli import say
    from muster.core import runfile

    loaded = runfile.load(run_file, overrides or [], environment=False)
    places = cloud.places_of(loaded.spec, zone=zone, adopt=adopt)
    if dry_run:
        for call in cloud.dry_run(places[0], manifests):
            say.data(call.shown())
        return
    where, lease = cloud.bring_up(
        places,
        manifests,
        hugging_face_token=os.environ.get("HF_TOKEN"),
        progress=lambda key, step: say.talk(f"{step:>9}  {key}"),
        on_advice=lambda advice: say.talk(f"capacity: {advice.sentence()}"),
    )
    say.talk(f"in {where.zone}:")
    for key in lease.resources:
        say.data(key)
    say.talk(f"hint: muster submit {run_file}; give it back with: muster down {run_file}")


def give_back(
    run_file: str = RUN_FILE,
    overrides: list[str] = OVERRIDES,
    zone: str | None = ZONE,
    keep_data: bool = typer.Option(False, "--keep-data", help="Keep the run file's buckets."),
) -> None:
    """Remove what `up` made, in order, and list what still exists; fails while anything of ours bills."""
    from muster.app import cloud
    from muster.cli import say
    from muster.core import runfile

    places = cloud.places_of(runfile.load(run_file, overrides or [], environment=False).spec, zone=zone)
    where = places[0]
    found = cloud.give_back(places, keep_data=keep_data, progress=lambda key, step: say.talk(f"{step:>9}  {key}"))
    for trouble in found.troubles:
        say.talk(f"not removed: {trouble}")
    for left in found.leftovers:
        say.data(left.sentence())
    if total := sum(left.usd_per_day or 0.0 for left in found.leftovers):
        say.talk(f"together about ${total:.2f} a day, where prices are known")
    if not found.clean:
        raise typer.Exit(6)
    say.talk(f"nothing of ours is left in {where.project}" + (" but what was kept" if found.leftovers else ""))
