"""``muster preflight RUN.yaml``: two steps on one small machine before many are queued for. ``muster accept RUN.yaml``:
does this place really work, within a budget, with a record that others can check."""

from __future__ import annotations

import sys
from pathlib import Path

import typer

from muster.app import api
from muster.cli import output
from muster.cli.run_commands import OVERRIDES, RUN_FILE


def preflight(
    run_file: str = RUN_FILE,
    overrides: list[str] = OVERRIDES,
    machine: str | None = typer.Option(None, "--machine", help="A cheap GPU machine with a pool; default: a CPU node."),
    mode: str | None = typer.Option(None, "--mode", help="With --machine: how it is bought; default: spot."),
    timeout_s: float = typer.Option(1800.0, "--timeout", help="Seconds until it is abandoned."),
) -> None:
    """Rehearse two steps of a run on one small machine.

    Same image, mounts, secrets and data.
    """
    from muster.app.cluster import preflight as use_case

    loaded = api.load(run_file, overrides or [], environment=False)
    argv = ["muster", *sys.argv[1:]]
    result = use_case.preflight(loaded, machine=machine, mode=mode, argv=argv, timeout_s=timeout_s, on_word=output.info)
    output.result(f"preflight passed: {result.reason}")
    output.info("not tested: GPU memory, NCCL, speed")


FOLDER = typer.Option(Path("acceptance"), "--output", help="Folder for the record.")
KEY = typer.Option(None, "--sign", metavar="KEY", help="Sign the record with this SSH key.")
REHEARSAL = typer.Option(None, "--rehearsal", help="What replaces the real place in a rehearsal.")


def accept(
    run_file: str = RUN_FILE,
    overrides: list[str] = OVERRIDES,
    budget: float = typer.Option(
        ...,
        "--budget",
        metavar="USD",
        help="Dollars that it may cost, at most; host-hours where a cluster's price is unknown.",
        min=0.0,
    ),
    backend: str | None = typer.Option(None, "--backend", help="In place of the run file's."),
    folder: Path = FOLDER,
    key: Path | None = KEY,
    rehearsal: str | None = REHEARSAL,
) -> None:
    """Try a place by a ladder, from a dry run to two hosts of which one is killed, and remove everything.

    Stops at the first failure or before the budget is passed.
    """
    from muster.accept import accept as use_case

    result = use_case.accept(
        run_file, [*(overrides or []), *([f"backend={backend}"] if backend else [])], budget=budget, folder=folder,
        key=key, rehearsal=rehearsal, tell=output.info,
    )  # fmt: skip
    for one in result.climbed:
        output.result(f"{one.outcome:<8} {one.name:<10} {one.seconds:7.0f} s  {result.unit(one.spent):>8}  {one.said}")
    output.info(f"record: {result.path}" + (f", signed: {result.signature}" if result.signature else ""))
    if result.evidence is not None:
        output.info(f"for a bug report, without secrets: {result.evidence}")
    if not result.accepted:
        raise typer.Exit(1)
    if result.signature is None:
        output.info("hint: --sign KEY makes it a record for docs/verified.md")
