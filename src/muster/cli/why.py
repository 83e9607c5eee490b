"""``muster why``: the culprit of a run's incidents, or of captures."""

from __future__ import annotations

import typer

from muster.app import api
from muster.cli import output
from muster.cli.inspect_commands import JSON


def why(
    run: str | None = typer.Argument(None, metavar="[RUN]", help="A run's id, its folder, or `last`."),
    captures: str | None = typer.Option(
        None, "--from", metavar="DIR", help="Captures of one moment instead of a run: a folder, or one file."
    ),
    everything: bool = typer.Option(False, "--all", help="All lines, not ten."),
    json: bool = JSON,
) -> None:
    """Name what went wrong in a run and which rank held it up, or who is to blame in captures of a hang."""
    from muster.app.inspect import why as use_case

    if run is not None and captures is not None:
        raise api.UsageError("a run and --from were given", hint="muster why RUN, or muster why --from DIR")
    result = use_case.why(run, captures)
    output.damaged(result.damaged)
    if json:
        output.as_json(result.to_json())
        return
    for line in result.lines(whole=everything):
        output.folded(line, 2 + len(line) - len(line.lstrip()))
