"""``muster watch``: a run's hosts, ranks, tiers and incidents, live on a terminal, as lines in a pipe."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import TYPE_CHECKING

import typer

from muster.app import api
from muster.cli import output
from muster.cli.inspect_commands import RUNS

if TYPE_CHECKING:
    from rich.console import Group, RenderableType
    from rich.table import Table

    from muster.app.inspect.watch import HostView, View

#: In a pipe, seconds between two lines about the run's progress, besides events.
LINE_EVERY_S = 5.0
_SHOWN = (
    "attempt.started", "attempt.adopted", "attempt.abandoned", "run.message", "run.restarted", "run.held",
    "incident.detected", "incident.decided", "incident.resolved", "termination.notice", "host.lost", "host.set_aside",
    "host.readmitted", "checkpoint.committed", "checkpoint.failed", "checkpoint.rejected", "snapshot.rejected",
    "snapshot.interval", "connection.refused", "eval", "run.finished",
)  # fmt: skip
_STYLES = {"training": "green", "spare": "cyan", "lost": "red", "quarantined": "red", "released": "dim"}


def watch(
    runs: list[str] = RUNS,
    every: float = typer.Option(0.5, "--every", min=0.1, help="Seconds between looks."),
    web: bool = typer.Option(False, "--web", help="In a browser on this machine, with charts; several runs at once."),
    port: int | None = typer.Option(None, "--port", min=1, max=65535, help="With --web; default: any that is free."),
) -> None:
    """Show a run live: hosts, ranks, step, checkpoints, incidents.

    Ctrl-C does not stop the run.
    """
    if web:
        _served(runs, every, port or 0)
        return
    if port is not None:
        raise api.UsageError("--port goes with --web")
    if len(runs) > 1:
        raise api.UsageError("a terminal shows one run", hint=f"muster watch --web {' '.join(runs)}")
    with output.looking():
        (_live if sys.stdout.isatty() else _lines)(api.watch(runs[0], every_s=every))


def _served(runs: list[str], every: float, port: int) -> None:
    """Until Ctrl-C. Addresses go to stdout, where a program may take them."""
    import threading

    page = api.watch_page(runs, every_s=every, port=port, address=output.result)
    output.info("open this address on this machine; for a second page take the next one that is printed")
    with output.looking():
        page.begin()
        try:
            threading.Event().wait()
        finally:
            page.end()


def _live(views: Iterable[View]) -> None:
    from rich.live import Live

    with Live(console=api.Console(), auto_refresh=False) as live:
        for view in views:
            live.update(_render(view), refresh=True)


def _lines(views: Iterable[View]) -> None:
    """Events, and the run's progress at intervals."""
    from muster.app.inspect.event_format import Narrator

    line, said, since_s, damaged = Narrator(), "", LINE_EVERY_S, 0
    before_ns = None
    for view in views:
        output.damaged(view.damaged[damaged:])
        damaged = len(view.damaged)
        for event in view.news:
            text = line(event) if event.kind in _SHOWN else None
            if text is not None:
                output.result(text)
        now_ns = max((event.wall_ns for event in view.news), default=before_ns)
        since_s += (now_ns - before_ns) / 1e9 if now_ns and before_ns else 0.0
        before_ns = now_ns
        text = summary(view)
        if text != said and (since_s >= LINE_EVERY_S or view.ended):
            output.result(text)
            said, since_s = text, 0.0


def summary(view: View) -> str:
    """The run in one line."""
    parts = [f"step {view.step}" + (f"/{view.total_steps}" if view.total_steps else ""), f"attempt {view.attempt}"]
    hosts = sum(host.state == "training" for host in view.hosts.values())
    parts.append(f"{_counted(view.world_size, 'rank')} on {_counted(hosts, 'host')}")
    parts += [f"{tier.tier} step {tier.step}" for tier in view.tiers if tier.step is not None]
    if view.account is not None and view.account.goodput_active is not None:
        parts.append(f"goodput {view.account.goodput_active:.1%}")
    return "  ".join([*parts, view.sentence])


def _counted(count: int, noun: str) -> str:
    return f"{count} {noun}{'' if count == 1 else 's'}"


def _render(view: View) -> Group:
    from rich.console import Group
    from rich.padding import Padding
    from rich.text import Text

    from muster.app.inspect.event_format import step_figures

    axes = " x ".join(f"{axis} {size}" for axis, size in view.layout.items() if size != 1) or "one rank"
    head = Text(f"{view.run.run_id}  ", style="bold")
    head.append(f"{view.state}: {view.sentence}", style="red" if view.state == "failed" else "")
    step = Text(f"step {view.step}" + (f" of {view.total_steps}" if view.total_steps else ""), style="bold green")
    ago = [] if view.step_age_s is None or view.ended else [f"{output.age(view.step_age_s)} ago"]
    step.append("  ".join(["", *_eta(view), *step_figures(view.numbers), *ago]), style="")
    ranks = f"attempt {view.attempt}  {_counted(view.world_size, 'rank')} ({axes})"
    parts: list[RenderableType] = [
        head,
        step,
        *([Text("  ".join(figures))] if (figures := [*_learned(view), *_spent(view)]) else []),
        Text(ranks),
        _hosts(view),
        _tiers(view),
        *(Text(text) for text in (goodput(view), losses(view)) if text),
    ]
    parts += [Text(f"event log: {sentence}", style="red") for sentence in api.damage_in_words(view.damaged)]
    if view.incidents:
        parts.append(Text("last incidents", style="bold"))
        parts += [Padding(Text(sentence), (0, 0, 0, 2)) for sentence in view.incidents]
    return Group(*parts)


def _eta(view: View) -> list[str]:
    from muster.app.inspect.event_format import short_time

    every = view.step_every_s
    if view.ended or view.total_steps is None or not every:
        return []
    return [f"ETA {short_time((view.total_steps - view.step) * every)}"]


def _learned(view: View) -> list[str]:
    """The last evaluation's."""
    from muster.app.inspect.event_format import eval_figures

    last = max(view.evals, default=None)
    return [] if last is None else [f"{label} {figure}" for label, figure in eval_figures(view.evals[last])]


def _spent(view: View) -> list[str]:
    return [f"${view.account.usd:,.2f} so far"] if view.account is not None and view.account.usd else []


def goodput(view: View) -> str:
    """By the ledger so far; empty where it is not known yet."""
    result = view.account
    if result is None or result.goodput_active is None or result.goodput_purchased is None:
        return ""
    if result.goodput_active == result.goodput_purchased:
        return f"goodput {result.goodput_active:.1%}"
    return f"goodput {result.goodput_active:.1%} of active, {result.goodput_purchased:.1%} of purchased hosts"


def losses(view: View) -> str:
    """What else host time went to; empty where nothing did."""
    if view.account is None or not view.account.losses:
        return ""
    return "not training: " + ", ".join(f"{name} {share:.1%}" for name, share in view.account.losses)


def _hosts(view: View) -> Table:
    table = _table("host", "state", "ranks")
    for host in sorted(view.hosts.values(), key=lambda host: (len(host.name), host.name)):
        style = _STYLES.get(host.state, "")
        table.add_row(host.name, f"[{style}]{host.state}[/]" if style else host.state, _ranks(host))
    return table


def _ranks(host: HostView) -> str:
    return ", ".join(f"{rank.rank} {rank.phase} (pid {rank.pid})" for _, rank in sorted(host.ranks.items())) or "-"


def _tiers(view: View) -> Table:
    table = _table("tier", "newest whole step", "age")
    for tier in view.tiers:
        table.add_row(tier.tier, "none" if tier.step is None else str(tier.step), output.age(tier.age_s))
    return table


def _table(*columns: str) -> Table:
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for column in columns:
        table.add_column(column)
    return table
