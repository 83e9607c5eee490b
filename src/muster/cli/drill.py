"""``muster drill``: break a run on purpose, on this machine, and see whether it heals."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

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
    outcome = use_case.drill(run_file, overrides or [], fault=fault, at_step=at_step, seed=seed, tell=output.info)
    if json:
        output.as_json(outcome.to_json())
    else:
        _print(outcome)
    if not outcome.as_expected:
        raise typer.Exit(1)


def _print_menu(menu: Mapping[str, Fault], json: bool) -> None:
    if json:
        output.as_json([_entry(each) for each in menu.values()])
        return
    for each in menu.values():
        mark = " (needs root)" if each.needs_root else " (not for command:)" if each.own_loop else ""
        output.result(f"{each.name:<22} {each.what}{mark}")
        expected = _entry(each)
        ends = f", then exit code {each.exit_code}" if each.exit_code is not None else ""
        output.result(f"{'':<22}   -> {_either(expected['done'])}{ends}; taken again: {_again(each.redone)}")


def _entry(fault: Fault) -> dict[str, Any]:
    from muster.app.drill import expected

    return {
        "name": fault.name,
        "what": fault.what,
        "numbers": list(fault.numbers),
        **expected(fault),
        "needs_root": fault.needs_root,
        "own_loop_only": fault.own_loop,
    }


def _either(ways: list[list[str]]) -> str:
    words = [", ".join(each) or "nothing" for each in ways]
    return " or ".join(words) if len(words) < 4 else f"{words[0]} to {words[-1]}"


def _again(limit: int | None) -> str:
    return "back to the last checkpoint" if limit is None else f"at most {limit}" if limit else "none"


def _print(outcome: Outcome) -> None:
    result = outcome.to_json()
    expected, seen = result["expected"], result["seen"]
    output.result(f"fault       {outcome.fault.name} after step {outcome.at_step}: {outcome.fault.what}")
    output.result(f"{'':<12}{'expected':<44}seen")
    rows = [
        ("noticed", " or ".join(expected["noticed"]) or "nothing to notice", ", ".join(seen["noticed"]) or "nothing"),
        ("done", _either(expected["done"]), ", ".join(seen["done"]) or "nothing"),
        ("redone", _again(expected["redone_steps"]), seen["redone_steps"]),
        ("cost", "", f"L = {seen['lost_s']:.2f} s" if seen["lost_s"] is not None else "it did not continue"),
        ("exit code", _none(expected["exit_code"]), _none(seen["exit_code"])),
        ("invariants", "I1-I8 hold", "hold" if not outcome.invariants else f"{len(outcome.invariants)} broken"),
    ]
    for name, wanted, was in rows:
        output.result(f"{name:<12}{wanted!s:<44}{was}")
    for text in outcome.sentences:
        output.result(f"  {text}")
    for text in outcome.failures:
        output.result(f"NOT AS EXPECTED: {text}")
    output.result("as expected" if outcome.as_expected else f"the run's folder: {outcome.run.path}")


def _none(code: int | None) -> str:
    return "it continues to train" if code is None else str(code)
