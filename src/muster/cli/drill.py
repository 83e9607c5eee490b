"""``muster drill``: break a run on purpose, on this machine, and see whether it heals."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

import typer

from muster.app import api
from muster.cli import output
from muster.cli.inspect_commands import JSON
from muster.cli.run_commands import OVERRIDES

if TYPE_CHECKING:
    from muster.app.drill import Fault, Outcome


def drill(
    run_file: str | None = typer.Argument(None, metavar="RUN.yaml", help="The run file."),
    overrides: list[str] = OVERRIDES,
    fault: str | None = typer.Option(None, "--fault", help="What to break; --list names the menu."),
    at_step: int = typer.Option(10, "--at-step", min=1, help="Inject the fault after this step."),
    seed: int = typer.Option(0, "--seed", help="Chooses the target and the times; the same seed, the same faults."),
    keep: bool = typer.Option(False, "--keep", help="Leave the run's folder, also where all went as expected."),
    listed: bool = typer.Option(False, "--list", help="Print the menu of faults."),
    json: bool = JSON,
) -> None:
    """Break a run on purpose, here, and compare the outcome."""
    from muster.app import drill as use_case

    menu = use_case.MENU
    if listed:
        _print_menu(menu, json)
        return
    if run_file is None:
        raise api.UsageError("no run file given", hint=f"muster drill RUN.yaml --fault {fault or next(iter(menu))}")
    if fault is None:
        raise api.UsageError(
            "no fault given", hint=f"muster drill {run_file} --fault {next(iter(menu))}; --list has the others"
        )
    outcome = use_case.drill(
        run_file, overrides or [], fault=fault, at_step=at_step, seed=seed, keep=keep, tell=output.info
    )
    output.damaged(outcome.damaged)
    if json:
        output.as_json(outcome.to_json())
    else:
        _print(outcome)
    if not outcome.as_expected:
        raise typer.Exit(1)


def _print_menu(menu: Mapping[str, Fault], json: bool) -> None:
    from muster.app.drill import menu_entry

    if json:
        output.as_json([menu_entry(fault) for fault in menu.values()])
        return
    for fault in menu.values():
        mark = " (needs root)" if fault.needs_root else " (not for command:)" if fault.own_loop else ""
        output.result(f"{fault.name:<22} {fault.text}{mark}")
        ends = f", then exit code {fault.exit_code}" if fault.exit_code is not None else ""
        output.result(f"{'':<22}   -> {_either(fault.done)}{ends}; taken again: {_again(fault.redone)}")


def _either(ways: Iterable[Iterable[str]]) -> str:
    ways_text = [", ".join(kinds) or "nothing" for kinds in ways]
    return " or ".join(ways_text) if len(ways_text) < 4 else f"{ways_text[0]} to {ways_text[-1]}"


def _again(limit: int | None) -> str:
    return "back to the last checkpoint" if limit is None else f"at most {limit}" if limit else "none"


def _print(outcome: Outcome) -> None:
    fault = outcome.fault
    output.result(f"fault       {fault.name} after step {outcome.at_step}: {fault.text}")
    output.result(f"{'':<12}{'expected':<44}seen")
    rows = [
        ("noticed", " or ".join(fault.noticed) or "nothing to notice", ", ".join(outcome.noticed) or "nothing"),
        ("done", _either(fault.done), ", ".join(outcome.done) or "nothing"),
        ("redone", _again(fault.redone), outcome.redone),
        ("cost", "", f"L = {outcome.lost_s:.2f} s" if outcome.lost_s is not None else "it did not continue"),
        ("exit code", _none(fault.exit_code), _none(outcome.exit_code)),
        ("invariants", "I1-I8 hold", "hold" if not outcome.invariants else f"{len(outcome.invariants)} broken"),
    ]
    for name, promised, was in rows:
        output.result(f"{name:<12}{promised!s:<44}{was}")
    for text in outcome.sentences:
        output.result(f"  {text}")
    for text in outcome.failures:
        output.result(f"NOT AS EXPECTED: {text}")
    output.result("as expected" if outcome.as_expected else f"the run's folder: {outcome.run.path}")


def _none(code: int | None) -> str:
    return "it continues to train" if code is None else str(code)
