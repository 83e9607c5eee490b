"""``muster preflight RUN.yaml``: two steps on one small machine before many are queued for."""

from __future__ import annotations

import sys

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
