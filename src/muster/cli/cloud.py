"""``muster up RUN.yaml`` and ``muster down RUN.yaml``: create and remove the cluster of a run file."""

from __future__ import annotations

import os
from pathlib import Path

import typer

from muster.app import api
from muster.cli import output

RUN_FILE = typer.Argument(..., metavar="RUN.yaml", help="The run file.")
OVERRIDES = typer.Argument(None, metavar="[KEY.PATH=VALUE]...", help="Values that replace the file's.")
MANIFESTS = typer.Option(
    None,
    "--manifests",
    "--wheels",
    help="Folder with the released kueue.yaml, jobset.yaml and installers, or (SSH) wheels; default: fetched.",
)
ZONE = typer.Option(None, "--zone", help="Zone; default: the first of resources.locations.")
JSON = typer.Option(False, "--json", help="The outcome as JSON on stdout; a line for each change on stderr.")


def up(
    run_file: str = RUN_FILE,
    overrides: list[str] = OVERRIDES,
    manifests: Path | None = MANIFESTS,
    zone: str | None = ZONE,
    adopt: bool = typer.Option(
        False, "--adopt", help="Use a cluster or network of that name that Muster did not create."
    ),
    pin: bool = typer.Option(False, "--pin", help="Pin the released manifests: record their sha256, then continue."),
    dry_run: bool = typer.Option(False, "--dry-run", help="Print every request; change nothing."),
    as_json: bool = JSON,
) -> None:
    """Create what a run file needs in your project.

    Networks, cluster, node pools, queue and bucket; after an interruption, the same command resumes.
    """
    from muster.app.cluster import up_down
    from muster.cli.tree import watched

    loaded = api.load(run_file, overrides or [], environment=False)
    cluster = up_down.cluster_of(loaded.spec, zone=zone, adopt=adopt)
    if dry_run:
        _dry_run(cluster, manifests, as_json)
        return
    if pin:
        hashes, path = cluster.pin(manifests)
        for url, digest in hashes.items():
            output.info(f"pinned sha256 {digest}\n  of {url}")
        output.info(f"in {path}")
    flags = [*(["--manifests", str(manifests)] if manifests else []), *(["--adopt"] if adopt else [])]
    lease = watched(
        lambda progress: cluster.up(manifests, token=os.environ.get("HF_TOKEN"), progress=progress),
        again=_command("up", run_file, overrides, zone, *flags),
        undo=_command("down", run_file, overrides, zone),
        live=not as_json,
    )
    if as_json:
        output.as_json({"project": cluster.project, "zone": lease.labels["zone"], "resources": lease.resources})
        return
    output.info(f"in {lease.labels['zone']}:")
    for key in lease.resources:
        output.result(key)
    output.info(f"hint: muster submit {run_file}; remove it with: muster down {run_file}")


def give_back(
    run_file: str = RUN_FILE,
    overrides: list[str] = OVERRIDES,
    zone: str | None = ZONE,
    keep_data: bool = typer.Option(False, "--keep-data", help="Keep the run file's buckets."),
    as_json: bool = JSON,
) -> None:
    """Remove what `up` created and list what still exists; fails while anything of ours is billed."""
    from muster.app.cluster import up_down
    from muster.cli.tree import watched

    spec = api.load(run_file, overrides or [], environment=False).spec
    cluster = up_down.cluster_of(spec, zone=zone)
    result = watched(
        lambda progress: cluster.down(keep_data=keep_data, progress=progress),
        again=_command("down", run_file, overrides, zone, *(["--keep-data"] if keep_data else [])),
        live=not as_json,
    )
    if as_json:
        output.as_json(up_down.down_to_json(cluster, result))
        if not result.clean:
            raise typer.Exit(6)
        return
    for trouble in result.troubles:
        output.info(f"not removed: {trouble}")
    for left in result.leftovers:
        output.result(left.sentence())
    if total := sum(left.usd_per_day or 0.0 for left in result.leftovers):
        output.info(f"together about ${total:.2f} per day, where prices are known")
    if not result.clean:
        raise typer.Exit(6)
    output.info(
        f"no resource of Muster is left in {cluster.project}" + (" except what was kept" if result.leftovers else "")
    )


def _dry_run(cluster: api.Cluster, manifests: Path | None, as_json: bool) -> None:
    calls, doubts = cluster.dry_run(manifests)
    if as_json:
        output.as_json([call.to_json() for call in calls])
    else:
        for call in calls:
            output.result(call.shown())
    for doubt in doubts:
        output.info(f"warning: {doubt}; up needs --pin")


def _command(verb: str, run_file: str, overrides: list[str] | None, zone: str | None, *more: str) -> str:
    """The same command once more, as a person would type it."""
    import shlex

    return shlex.join(["muster", verb, run_file, *(overrides or []), *(["--zone", zone] if zone else []), *more])
