"""``muster simulate``: rehearse a run's days in seconds, with the policy that will run."""

from __future__ import annotations

import contextlib
import sys
from typing import Any

import typer

from muster.cli import output
from muster.cli.inspect_commands import JSON
from muster.cli.run_commands import OVERRIDES, RUN_FILE


def simulate(
    run_file: str = RUN_FILE,
    overrides: list[str] = OVERRIDES,
    hosts: int | None = typer.Option(None, "--hosts", min=1, help="Instead of the file's resources.hosts."),
    spares: int | None = typer.Option(None, "--spares", min=0, help="Hosts kept as spares."),
    min_hosts: int | None = typer.Option(None, "--min-hosts", min=1, help="Continue with as few."),
    hours: float | None = typer.Option(None, "--hours", help="Length of a rehearsal; default 40, or the trace's."),
    failures_per_day: float = typer.Option(5.0, "--failures-per-day", help="Failures of the whole job per day."),
    seeds: int = typer.Option(100, "--seeds", help="Rehearsals."),
    paired: int = typer.Option(20, "--paired", help="Seeds for each comparison; 0: no comparisons."),
    policy: str | None = typer.Option(None, "--policy", help="default, conservative, or a Python file of yours."),
    profile: str | None = typer.Option(None, "--profile", help="Stage times: a shipped table, or a run to measure."),
    trace: str | None = typer.Option(None, "--trace", help="Spot capacity over time, instead of failures a day."),
    detection: str = typer.Option("fast", "--detection", help="fast or slow: how soon faults are detected."),
    repair_h: float = typer.Option(4.0, "--repair-hours", help="Mean time until a broken host is back."),
    weibull_shape: float = typer.Option(1.0, "--weibull-shape", help="Below 1 failures cluster."),
    correlated_per_day: float = typer.Option(
        0.0, "--correlated-per-day", help="Correlated (rack-level) failures per day."
    ),
    correlated_hosts: int = typer.Option(8, "--correlated-hosts", min=1, help="Hosts lost in each."),
    maintenance_per_day: float = typer.Option(
        0.0, "--maintenance-per-day", help="Hosts taken for 2 h of maintenance per day."
    ),
    false_alarms_per_day: float = typer.Option(
        0.0, "--false-alarms-per-day", help="False-positive hang reports per day."
    ),
    slow_per_day: float = typer.Option(0.0, "--slow-per-day", help="Episodes of a slow host per day."),
    step_s: float | None = typer.Option(None, "--step-s", help="Seconds per step; default: the plan's."),
    usd: float | None = typer.Option(None, "--usd-per-host-hour", help="Price; default: the plan's."),
    json: bool = JSON,
    html: str | None = typer.Option(None, "--html", metavar="FILE", help="Write a page: all, and one as a report."),
) -> None:
    """Rehearse failures of this run on a virtual cluster.

    Shows goodput, where the time goes, and what would improve it.
    """
    from muster.app.planning import simulate as use_case
    from muster.cli.live import preparing

    asked = use_case.Asked(
        hosts=hosts, spares=spares, min_hosts=min_hosts, hours=hours, failures_per_day=failures_per_day,
        detection=detection, repair_h=repair_h, weibull_shape=weibull_shape, correlated_per_day=correlated_per_day,
        correlated_hosts=correlated_hosts, maintenance_per_day=maintenance_per_day,
        false_alarms_per_day=false_alarms_per_day, slow_per_day=slow_per_day, policy=policy, profile=profile,
        trace=trace, step_s=step_s, usd_per_host_hour=usd,
    )  # fmt: skip
    scenario = use_case.scenario_of(run_file, overrides or [], asked)
    output.damaged(scenario.profile.damaged)
    with preparing() if sys.stderr.isatty() else contextlib.nullcontext() as show:
        progress = (lambda done, total: show("rehearsing", done, total)) if show is not None else None
        study = use_case.simulate(scenario, seeds=seeds, paired=paired, progress=progress)
    result = use_case.to_json(study)
    if json:
        output.as_json(result)
    else:
        _print(result)
    if html is not None:
        from muster.app.planning.rehearsal_page import write_page

        output.info(f"page: {write_page(study, html)}")


def _print(result: dict[str, Any]) -> None:
    world = result["scenario"]
    rate = f"{world['failures_per_day']:g} failures a day" if world["trace"] is None else f"trace {world['trace']}"
    every = world["checkpoint_every_s"]
    output.result(
        f"{world['hosts']} hosts ({world['gpus']} GPUs), {world['spares']} spares, {world['hours']:g} h, {rate}, "
        f"policy {world['policy']}, saves {'never' if every is None else f'every {every:.0f} s'}, "
        f"stage times {result['profile']['name']}, {result['seeds']} seeds"
    )
    price = world["usd_per_host_hour"]
    money = "" if price is None else f"; ${price:,.2f} a host-hour ({world['price_source']})"
    output.result(f"a step takes {world['step_s']:.3g} s ({world['step_source']}){money}")
    output.result(f"{'goodput':<24}{'mean':>9}{'sd':>9}{'p5':>9}{'p50':>9}{'p95':>9}")
    for key, label in (("goodput_active", "of active hosts"), ("goodput_purchased", "of purchased hosts")):
        row = result[key]
        output.result(
            f"  {label:<22}" + "".join(f"{row[name] * 100:>8.2f}%" for name in ("mean", "sd", "p5", "p50", "p95"))
        )
    output.result(f"{'went to':<24}{'share':>9}{'host-hours':>12}")
    for name, row in result["categories"].items():
        if row["share"] > 5e-6:
            output.result(f"  {name:<22}{row['share'] * 100:>8.3f}%{row['host_s'] / 3600:>12,.1f}")
    if result["lost_s"]:
        output.result(f"{'lost per interruption':<24}{'count':>9}{'p50':>10}{'p95':>10}")
        for kind, row in result["lost_s"].items():
            output.result(f"  {kind:<22}{row['count']:>9}{row['p50']:>9.1f}s{row['p95']:>9.1f}s")
    _choices("without", result["contributions"], None)
    for title, key, which in (
        ("spares", "spares", "spares"),
        ("saves every", "intervals", "interval"),
        ("policy", "policies", "policy"),
    ):
        _choices(title, result[key], result["best"][which])
    if result["gave_up"]:
        output.result(
            f"the run ended by its own decision {result['gave_up']:.2f} times a rehearsal, and was started again"
        )
    output.info(result["note"])


def _choices(title: str, rows: list[dict[str, Any]], best: str | None) -> None:
    if not rows:
        return
    output.result(f"{title:<24}{'active':>9}{'purchased':>11}{'points':>9}{'±':>7}")
    for row in rows:
        mark = "  <- most of what is paid for" if row["name"] == best else ""
        output.result(
            f"  {row['name']:<22}{row['active'] * 100:>8.2f}%{row['purchased'] * 100:>10.2f}%"
            f"{row['change_active'] * 100:>+9.2f}{row['error'] * 100:>7.2f}  {row['about']}{mark}"
        )
