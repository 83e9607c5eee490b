"""``muster check``: is the hardware sound?"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import NoReturn

import typer

from muster.app import api
from muster.cli import output
from muster.cli.inspect_commands import JSON

HOSTS = typer.Option(
    [],
    "--host",
    help="With --from, or --network and a RUN: only this host. With --network: NAME or NAME=ADDRESS. May be repeated.",
)
REACH = typer.Option(
    "", "--reach", metavar="WORDS", help='With --network: how a program is started on a host, as "ssh {host}".'
)
LARGEST = typer.Option(
    None, "--largest-mib", min=1, help="With --network: the largest message (default 8192; gloo 64)."
)
NCCL_TESTS = typer.Option(
    False, "--nccl-tests", help="With --network: all together by NVIDIA's nccl-tests, which must be installed there."
)


def check(
    target: str | None = typer.Argument(
        None,
        metavar="[RUN.yaml|RUN|FILE]",
        help="A run file: what it names is expected. A live run: look at its hosts. A captured output: judge it.",
    ),
    captures: str | None = typer.Option(
        None, "--from", metavar="DIR", help="Captured outputs instead of this machine: a folder, or one file."
    ),
    hosts: list[str] = HOSTS,
    passive: bool = typer.Option(False, "--passive", help="Load nothing: what the machine tells of itself, 2 s."),
    network: bool = typer.Option(False, "--network", help="Measure collectives between hosts; name a slow host."),
    reach: str = REACH,
    largest_mib: int | None = LARGEST,
    nccl_tests: bool = NCCL_TESTS,
    raw: bool = typer.Option(False, "--raw", help="Print what the probe saw, to be judged by --from elsewhere."),
    json: bool = JSON,
) -> None:
    """Say whether GPUs, copies, memory and disk are sound. Exit code: 0 sound, 6 faulty, 1 not all could be seen."""
    from muster.app.inspect import check as use_case

    if network:
        if captures is not None or passive or raw:
            raise api.UsageError("--network measures hosts; --from, --passive and --raw do not", hint="leave one out")
        _network(target, hosts, reach, largest_mib, nccl_tests=nccl_tests, json=json)
    if reach or largest_mib or nccl_tests:
        raise api.UsageError(
            "--reach, --largest-mib and --nccl-tests go with --network", hint="muster check --network --host ..."
        )
    if captures is None and target is not None and use_case.is_capture(target):
        captures, target = target, None
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
        if not passive and sys.stderr.isatty():
            output.info("looking at this machine, and loading it for 30 s at most (--passive: 2 s)")
        result = use_case.check_machine(target, passive=passive)
    if raw:
        output.result(result.raw.decode(errors="replace").rstrip("\n"))
    elif json:
        output.as_json(result.to_json())
    else:
        _show(result.lines())
    raise typer.Exit(result.exit_code)


def _show(lines: Iterable[str]) -> None:
    for line in lines:
        output.folded(line, 13 if line.startswith(" ") else 2)


def _network(
    target: str | None, hosts: list[str], reach: str, largest_mib: int | None, *, nccl_tests: bool, json: bool
) -> NoReturn:
    from muster.app.inspect.check import check_hosts_network

    say = None if json else output.info
    result, tables = check_hosts_network(
        target, hosts, reach=reach, largest_mib=largest_mib, nccl_tests=nccl_tests, say=say
    )
    if json:
        output.as_json({**result.to_json(), "tables": tables})
    else:
        for line in tables:
            output.result(line)
        _show(result.lines())
    raise typer.Exit(result.exit_code)
