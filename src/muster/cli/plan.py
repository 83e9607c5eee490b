"""The verbs of planning: init, plan, prices, calibrate. ``register`` adds them."""

from __future__ import annotations

import os
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Literal

import typer

from muster.app import api
from muster.cli import output
from muster.cli.inspect_commands import JSON
from muster.cli.run_commands import OVERRIDES, RUN_FILE, names_in

_FROM = typer.Option(None, "--from", metavar="FILE_OR_HUB", help="Rows: a file, a glob, a folder, or OWNER/DATASET.")
_MODEL = typer.Option(
    None, "--model", metavar="FOLDER_OR_HUB", help="Fine-tune this; default: a small one from scratch."
)
_OUT = typer.Option("run.yaml", "--out", "-o", help="The file to write; never overwritten.")
_YES = typer.Option(False, "--yes", "-y", help="Ask nothing.")
prices_app = typer.Typer(help="List prices: what ships, what was fetched, what is yours.")


def init(source: str | None = _FROM, model: str | None = _MODEL, out: Path = _OUT, yes: bool = _YES) -> None:
    """Look at your rows and write a run file that trains on them.

    Asks at most three questions on a terminal: rows, base model, adapters or all weights.
    """
    from muster.app.planning import draft as use_case

    use_case.free(out)
    asks = not yes and sys.stdin.isatty()
    if source is None and asks:
        source = _asked("Rows: a file, a folder, or OWNER/DATASET", use_case.one_data_file(Path()))
    source = source or use_case.data_here(Path())
    if model is None and asks:
        model = _asked("Base model: a folder, or OWNER/MODEL; Enter trains a small one from scratch")
    base = use_case.base_of(model) if model else None
    lora = base is not None and (base.parameters or 0) >= use_case.LORA_FROM
    if base is not None and asks:
        lora = _asked("Train adapters (LoRA) instead of all weights? y or n", "y" if lora else "n")[:1].lower() == "y"
    made = use_case.draft(source, base, lora=lora, gpus=use_case.gpus_here())
    use_case.write(out, made.text)
    output.result(str(out))
    for sentence in made.assumed:
        output.info(f"  {sentence}")
    output.info(f"hint: muster data {out} (what is learned), muster plan {out} (how long), muster train {out}")


def _asked(question: str, default: str | None = None) -> str:
    """The answer, typed after the question on stderr: typer's own prompts leave a blank in stdout."""
    from rich.prompt import Prompt

    console = api.Console(stderr=True, highlight=False)
    try:
        if default is None:
            return Prompt.ask(question, console=console, default="", show_default=False)
        return Prompt.ask(question, console=console, default=default)
    except EOFError:
        raise typer.Abort from None


def plan(
    run_file: str = RUN_FILE,
    overrides: list[str] | None = OVERRIDES,
    json: bool = JSON,
    why: bool = typer.Option(False, "--why", help="Explain the choice in sentences."),
    fastest: bool = typer.Option(
        False, "--fastest", help="Choose the fastest plan within the limits, not the cheapest."
    ),
    trace: bool = typer.Option(False, "--trace", help="Check the memory with a run on fake tensors (imports torch)."),
    out: str | None = typer.Option(None, "--out", help="Write the plan to a .json file, for train and submit."),
    html: str | None = typer.Option(None, "--html", metavar="FILE", help="Write a page with cost against time."),
    all_offers: bool = typer.Option(False, "--all", help="Show every offer that was not taken."),
    no_calibration: bool = typer.Option(False, "--no-calibration", help="Without the figures of your own runs."),
    places: str | None = typer.Option(None, "--backends", metavar="A,B", help="Compare places: gke,vertex,gce."),
    devices: str | None = typer.Option(None, "--devices", metavar="A,B", help="GPU or TPU? Compare: gpu,tpu."),
) -> None:
    """Predict whether it fits, how fast, how long and how much.

    And how likely, where, and what would be cheaper.
    """
    from muster.app.planning import plan as use_case
    from muster.cli.drawn import plan_table

    if places is not None and devices is not None:
        raise api.UsageError("--backends and --devices compare different things: give one")
    if no_calibration and (places or devices):
        raise api.UsageError("--no-calibration is of one plan: give it without --backends and --devices")
    if places is not None or devices is not None:
        _compared(run_file, overrides or [], places, devices, fastest=fastest, json=json)
        return
    if out is not None and not out.endswith(".json"):
        raise api.UsageError(f"--out {out}: a plan's name ends in .json, by which train and submit know it")
    reasons = why or json or html is not None
    result = use_case.plan(run_file, overrides or [], fastest=fastest, reasons=reasons, calibrated=not no_calibration)
    answer = dict(result.to_json())
    compared = None
    if trace:
        from muster.app.planning.memory_trace import compare

        compared = compare(result)
        answer["trace"] = asdict(compared)
    if out is not None:
        _write(out, answer)
        output.info(f"plan written to {out}; muster train {out} runs it")
    if html is not None:
        from muster.app.planning import rehearsal_page

        output.info(f"page: {rehearsal_page.write(result, html)}")
    if json:
        output.as_json(answer)
        return
    for line in plan_table.lines(result, every=all_offers):
        output.result(line)
    for sentence in result.plan.why if why else ():
        output.result(f"* {sentence}")
    if compared is not None:
        for line in plan_table.trace_lines(compared):
            output.result(line)


def _compared(
    run_file: str, overrides: list[str], places: str | None, devices: str | None, *, fastest: bool, json: bool
) -> None:
    from muster.app.planning import places as use_case
    from muster.app.planning.plan import format
    from muster.cli.drawn import plan_table
    from muster.cli.tables import aligned

    names = names_in(places or devices or "")
    by: Literal["backend", "device"] = "backend" if places is not None else "device"
    found = use_case.places(run_file, overrides, names=names, by=by, fastest=fastest)
    if json:
        output.as_json([each.to_json() for each in found])
        return
    rows = [("place" if places is not None else "device", "machines", "time", "cost", "")]
    for each in found:
        if each.planned is None:
            rows.append((each.name, "-", "-", "-", each.reason))
            continue
        chosen = each.planned.chosen
        time, cost = format.duration(chosen.cost.hours_p50), format.dollars(chosen.cost.usd_p50)
        rows.append((each.name, chosen.title, time, cost, each.reason))
    for line in aligned(rows, left=(0, 1, 4)):
        output.result(line)
    for each in found if devices is not None else ():
        if each.planned is not None:
            output.result("")
            for line in plan_table.compared(each.name, each.planned):
                output.result(line)


def calibrate(
    run_dir: str = typer.Argument(..., metavar="RUN", help="A run or its folder."), json: bool = JSON
) -> None:
    """Fit the plan's constant to a measured run.

    Prints how far the model was off.
    """
    from muster.app.planning.calibrate import calibrate_run

    path = Path(run_dir)
    result = calibrate_run(path if path.is_dir() else api.find_run(run_dir).path)
    output.damaged(result.damaged)
    if json:
        output.as_json(result.to_json())
        return
    fit = result.calibration
    output.result(
        f"{result.run_id} on {result.accelerator}: {fit.measured_step_s:.4g} s a step ({fit.steps} steps, spread "
        f"{fit.spread:.1%}); the model said {fit.predicted_step_s:.4g} s ({fit.off:+.0%}); "
        f"efficiency {fit.efficiency:.3f}"
    )
    output.info(f"kept in {result.path}")


def gpus(
    region: str | None = typer.Option(None, "--region", help="Only what is priced there: us-central1."),
    gpu: str | None = typer.Option(None, "--gpu", help="Only accelerators with this in their name: h100."),
    json: bool = JSON,
) -> None:
    """List what can be rented: GPUs, memory, price with its date, where. From the catalogue, offline."""
    from dataclasses import asdict

    from muster.app.planning.prices import rentable
    from muster.cli.tables import aligned

    found = rentable(region=region, gpu=gpu)
    if json:
        output.as_json(
            [{**asdict(each.offer), "price": None if each.price is None else asdict(each.price)} for each in found]
        )
        return
    rows = [("GPUs", "memory each", "machine", "mode", "$/GPU h", "$/h", "where", "price dated")]
    for each in found:
        offer, usd = each.offer, each.offer.usd_per_node_hour
        price = ("-", "-") if usd is None else (f"{usd / offer.gpus_per_node:.2f}", f"{usd:.2f}")
        dated = "unknown" if each.price is None else each.price.date or "your file"
        gpu_words = (f"{offer.gpus_per_node} x {offer.accelerator}", f"{offer.gpu_memory_bytes / 1e9:.0f} GB")
        rows.append((*gpu_words, offer.machine, offer.mode, *price, offer.location, dated))
    for line in aligned(rows, left=(0, 2, 3, 6, 7)):
        output.result(line)
    output.info("list prices, not offers: capacity shows when it is asked for; muster prices list has their sources")


@prices_app.command()
def update(json: bool = JSON) -> None:
    """Fetch Google's list prices with your credentials; without them nothing changes."""
    from muster.app.planning.prices import update as use_case

    result = use_case(api_key=os.environ.get("MUSTER_BILLING_API_KEY"))
    if json:
        output.as_json(
            {"path": str(result.path), "prices": len(result.prices), "skus": result.skus, "missing": result.missing}
        )
        return
    output.result(f"{len(result.prices)} prices of {result.skus} SKUs in {result.path}")
    if result.missing:
        output.info("not found: " + ", ".join(result.missing))


@prices_app.callback(invoke_without_command=True)
def _prices(context: typer.Context, json: bool = JSON) -> None:
    if context.invoked_subcommand is None:
        list_prices(json)


@prices_app.command(name="list")
def list_prices(json: bool = JSON) -> None:
    """Show every price a plan would use, with its date and source."""
    from dataclasses import asdict

    from muster.app.planning.prices import all_prices

    result = all_prices()
    if json:
        output.as_json([asdict(price) for price in result])
        return
    for price in result:
        spread = "" if price.low == price.high else f" ({price.low:g}-{price.high:g})"
        output.result(
            f"{price.machine:<20} {price.mode:<12} {price.region:<16} ${price.usd_per_gpu_hour:<8.4g}{spread:<18} "
            f"{price.date:<11} {price.reliability:<12} {price.source}"
        )


def _write(path: str, answer: object) -> None:
    import json as writer

    try:
        Path(path).write_text(writer.dumps(answer, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    except OSError as error:
        raise api.UsageError(f"cannot write {path}: {error.strerror}") from error
