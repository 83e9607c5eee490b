"""Commands that read: status, logs, events, profile, report, checkpoints, show, data. Each has JSON output too."""

from __future__ import annotations

import typer

from muster.app import api
from muster.app.completion import run_ids
from muster.cli import output
from muster.cli.run_commands import OVERRIDES, RUN, RUN_FILE

KIND = typer.Option([], "--kind", help="Only this kind (docs/reference/events.md lists them); may be repeated.")
RUNS = typer.Argument(
    ..., metavar="RUN...", help="Id, folder, or `last`; several: side by side.", autocompletion=run_ids
)
TWO_RUNS = typer.Argument(..., metavar="RUN RUN...", help="Ids, folders, `last`, or a sweep.", autocompletion=run_ids)
JSON = typer.Option(False, "--json", help="Print JSON.")


def status(
    run: str | None = typer.Argument(
        None, metavar="[RUN]", help="Default: all of this machine.", autocompletion=run_ids
    ),
    json: bool = JSON,
) -> None:
    """Show where a run is and why, or a sweep's trials, or list this machine's runs, newest first."""
    import time

    from muster.app.inspect import status as use_case
    from muster.app.inspect import sweeps
    from muster.cli import tables

    if run is not None and (named := sweeps.find(run)) is not None:
        if json:
            output.as_json(named.to_json())
        for line in () if json else (tables.sweep_line(named), *tables.sweep_trials(named, output.width())):
            output.result(line)
        return
    if run is not None:
        result = use_case.status(run)
        output.damaged(result.damaged)
        if json:
            output.as_json(result.to_json())
        else:
            for line in tables.one_run(result, time.time_ns()):
                output.result(line)
        return
    unreadable: list[str] = []
    every = use_case.all_runs(
        on_unreadable=lambda run_id, reason: unreadable.append(f"{run_id} cannot be read: {reason}")
    )
    if json:
        output.as_json([status_row.to_json() for status_row in every])
    elif not every and not unreadable:
        output.info("no runs on this machine")
    for status_row in every:
        output.damaged(status_row.damaged)
    trials, others = sweeps.grouped(every) if not json else ([], every)
    if others and not json:
        for line in tables.runs(others, time.time_ns(), output.width()):
            output.result(line)
    for each in trials:
        output.folded(tables.sweep_line(each), 2)
    for line in unreadable:
        output.info(line)


def logs(
    run: str = RUN,
    follow: bool = typer.Option(False, "--follow", "-f", help="Follow until the run has ended."),
    rank: int | None = typer.Option(None, "--rank", help="Only this rank."),
    task: str | None = typer.Option(None, "--task", help="Only this process: supervisor, agent, prepare..."),
) -> None:
    """Print the output of the run's processes. Ctrl-C does not stop the run."""
    rest: dict[str, str] = {}
    alone = rank is not None or task is not None
    with output.looking():
        for chunk in api.logs(run, follow=follow, rank=rank, task=task):
            *lines, rest[chunk.task] = (rest.get(chunk.task, "") + chunk.text).split("\n")
            for line in lines:
                output.written(line if alone else f"{chunk.task} | {line}")
    for name, line in rest.items():
        if line:
            output.written(line if alone else f"{name} | {line}")


def events(
    run: str = RUN,
    follow: bool = typer.Option(False, "--follow", "-f", help="Follow until the run has ended."),
    kind: list[str] = KIND,
    json: bool = typer.Option(False, "--json", help="One JSON object a line; what was left out comes last."),
) -> None:
    """Print the run's events, oldest first, times in UTC. Ctrl-C does not stop the run."""
    import json as writer

    damaged: list[api.Damage] = []
    with output.looking():
        for event in api.events(run, follow=follow, kinds=tuple(kind), on_damage=damaged.append):
            output.result(writer.dumps(event.to_json(), ensure_ascii=False) if json else _event_line(event))
    output.damaged(damaged)
    if json and damaged:
        output.result(writer.dumps({"damaged": [damage.to_json() for damage in damaged]}, ensure_ascii=False))


def _event_line(event: api.Event) -> str:
    """``12:00:01.250 a1 host-0/1     step  ...``."""
    import json
    import time

    from muster.app.inspect.event_format import line as event_text
    from muster.app.inspect.event_format import one_line

    at = time.strftime("%H:%M:%S", time.gmtime(event.wall_ns / 1e9)) + f".{event.wall_ns // 10**6 % 1000:03d}"
    origin = event.host if event.rank is None else f"{event.host}/{event.rank}"
    text = event_text(event) or one_line(json.dumps(dict(event.detail), ensure_ascii=False), 160)
    phase = f" {event.phase}" if event.phase else ""
    return f"{at} a{event.attempt} {origin:<12} {event.kind}{phase}  {text}"


def profile(
    run: str = RUN,
    steps: int = typer.Option(3, "--steps", min=1, max=100, help="Steps in each trace."),
    rank: str = typer.Option("0", "--rank", metavar="RANKS", help="Of which ranks: 0,7 or 0-3, or all."),
    stacks: bool = typer.Option(False, "--stacks", help="Instead: what every rank does now, equal stacks together."),
    json: bool = JSON,
) -> None:
    """Trace a few steps of a run that trains, without a restart, or show the stacks of its ranks."""
    from muster.app.inspect import profile as use_case

    if stacks:
        seen = use_case.stacks(run)
        if json:
            output.as_json(seen.to_json())
        for line in () if json else seen.lines():
            output.result(line)
        return
    failed: list[use_case.Trace] = []
    found: list[use_case.Trace] = []
    with output.looking():
        for trace in use_case.traces(run, steps=steps, ranks=use_case.ranks_of(rank)):
            found.append(trace)
            if trace.problem is not None:
                failed.append(trace)
            if not json:
                (output.result if trace.problem is None else output.info)(trace.line)
    if json:
        output.as_json([trace.to_json() for trace in found])
    if failed:
        raise api.MusterError(f"{len(failed)} of {len(found)} traces were not written", hint="muster logs, muster why")
    if found and not json:
        output.info("  hint: https://ui.perfetto.dev opens them")


def metrics(
    run: str = RUN,
    scrape_config: bool = typer.Option(False, "--scrape-config", help="What Prometheus needs to scrape it: a secret."),
) -> None:
    """Print the run's figures as Prometheus sees them (metrics.port of the run file)."""
    from muster.app.run import metrics_page

    output.result((metrics_page.scrape_config if scrape_config else metrics_page.fetch)(run).rstrip("\n"))


def report(
    runs: list[str] = RUNS,
    json: bool = JSON,
    html: bool = typer.Option(False, "--html", help="Write one self-contained page."),
    target: str | None = typer.Option(None, "--output", "-o", help="File of the page; default: in the run's folder."),
    reference: float | None = typer.Option(
        None, "--reference-tokens-per-s", help="Rate that goodput divides by, measured with fault tolerance off."
    ),
) -> None:
    """Account for the run: time by category, figures, dollars. Needs the run's folder alone."""
    from muster.app.inspect import report as use_case

    if target is not None and not html:
        raise api.UsageError("--output goes with --html", hint="muster report RUN --html --output PAGE.html")
    if target is not None and len(runs) > 1:
        raise api.UsageError("--output names one page, and there are several runs", hint="leave it out: one page a run")
    result = [use_case.report(run, reference_tokens_per_s=reference) for run in runs]
    for run_report in result:
        output.damaged(run_report.damaged)
    if html:
        for run, run_report in zip(runs, result, strict=True):
            output.result(str(use_case.write_page(run_report, run, target)))
    elif json:
        output.as_json(use_case.to_json(result))
    else:
        output.drawn(use_case.table(result))


def compare(runs: list[str] = TWO_RUNS, json: bool = JSON) -> None:
    """Compare runs: what differs in their run files, loss at equal step and equal tokens, speed, cost."""
    from muster.app.inspect import compare as use_case
    from muster.cli import tables

    found = use_case.compare(runs)
    if json:
        output.as_json(found.to_json())
        return
    for line in tables.comparison(found):
        output.result(line)


def checkpoints(run: str = RUN, json: bool = JSON) -> None:
    """List checkpoints in every tier, and which one a restart uses."""
    from muster.cli.tables import catalogue

    result = api.checkpoints(run)
    output.damaged(result.damaged)
    if json:
        output.as_json(result.to_json())
        return
    for line in catalogue(result):
        output.result(line)
    for uri, reason in result.skipped:
        output.info(f"passed over: {uri}: {reason}")
    if result.unseen:
        newest = (
            ", ".join(f"{tier} held step {step}" for tier, step in result.reported)
            or "the run has not said what it holds"
        )
        output.info(
            f"not on this machine: the memory of {', '.join(result.unseen)} (at the last step heard of: {newest})"
        )
    if result.used is None:
        output.info("nothing to restart from: the run would start from the beginning")


def show(
    run_file: str | None = typer.Argument(None, metavar="RUN.yaml", help="The run file."),
    overrides: list[str] = OVERRIDES,
    json: bool = JSON,
    schema: bool = typer.Option(False, "--schema", help="Print the JSON schema of run files, for editors."),
) -> None:
    """Print the run file with every default filled in."""
    from muster.app.inspect.show import resolved_json, resolved_yaml, run_file_schema
    from muster.app.planning.auto_layout import laid_out

    if schema:
        output.result(run_file_schema().rstrip("\n"))
        return
    if run_file is None:
        raise api.UsageError("no run file given", hint="muster show RUN.yaml, or muster show --schema")
    loaded = api.load(run_file, overrides or [])
    output.warnings(loaded.warnings)
    spec, why = laid_out(loaded.spec)
    if why is not None:
        output.info(why)
    for key, origin in loaded.stood_in.items():
        output.info(f"{key} is from {origin.source}:{origin.line}")
    if json:
        output.as_json(resolved_json(spec))
    else:
        output.result(resolved_yaml(spec).rstrip("\n"))


def data(
    run_file: str = RUN_FILE,
    overrides: list[str] = OVERRIDES,
    examples: int = typer.Option(3, "--examples", "-n", min=0, help="Documents to show."),
    json: bool = JSON,
) -> None:
    """Prepare the run's data and show a few documents.

    What is learned is green, or between [[ and ]] where there is no colour; the rest is dimmed.
    """
    import sys

    from muster.app.planning.data import prepare_and_preview
    from muster.cli.live import preparing

    loaded = api.load(run_file, overrides or [])
    output.warnings(loaded.warnings)
    with preparing() as progress:
        result = prepare_and_preview(loaded, examples=examples, progress=progress)
    if json:
        output.as_json(result.to_json())
        return
    from muster.app.planning.data import render

    api.Console(file=sys.stdout, soft_wrap=True, highlight=False).print(render(result))


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
