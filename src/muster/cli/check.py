"""``muster check``: is the hardware sound?"""

from __future__ import annotations

import typer

from muster.app import api
from muster.cli import output
from muster.cli.inspect_commands import JSON

HOSTS = typer.Option([], "--host", help="With --from: only this host; may be repeated.")


def check(
    target: str | None = typer.Argument(
        None,
        metavar="[RUN.yaml|RUN]",
        help="A run file: hold this machine against the one that it names. A live run: look at its hosts, beside it.",
    ),
    captures: str | None = typer.Option(
        None, "--from", metavar="DIR", help="Captured outputs instead of this machine: a folder, or one file."
    ),
    hosts: list[str] = HOSTS,
    passive: bool = typer.Option(False, "--passive", help="Load nothing: what the machine tells of itself, 2 s."),
    raw: bool = typer.Option(False, "--raw", help="Print what the probe saw, to be judged by --from elsewhere."),
    json: bool = JSON,
) -> None:
    """Say whether GPUs, copies, memory and disk are sound. Exit code: 0 sound, 6 faulty, 1 not all could be seen."""
    from muster.app.inspect import check as use_case

    if captures is not None and (passive or raw):
        raise api.UsageError("--passive and --raw look at this machine, and --from does not", hint="leave one out")
    if hosts and captures is None:
        raise api.UsageError("--host goes with --from", hint="muster check --from DIR --host NAME")
    run = target is not None and captures is None and use_case.is_run(target)
    if run and raw:
        raise api.UsageError("--raw looks at this machine, and a run has hosts", hint="--json has what they found")
    if run:
        result = use_case.check_run(target or "")
    elif captures is not None:
        result = use_case.check_captures(captures, target, hosts=hosts)
    else:
        result = use_case.check_machine(target, passive=passive)
    if raw:
        output.result(result.raw.decode(errors="replace").rstrip("\n"))
    elif json:
        output.as_json(result.to_json())
    else:
        for line in result.lines():
            output.result(line)
    raise typer.Exit(result.exit_code)
