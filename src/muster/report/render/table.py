"""The report for a terminal."""

from __future__ import annotations

import io
from itertools import zip_longest

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from muster.report.ledger.step_budget import StepBudget
from muster.report.render.document import Document, next_steps
from muster.report.render.sentences import format_duration, lever_in_words, money
from muster.report.render.terminal import Console

_BAR = 12
_WIDE = 100
"""From so many columns on there is room for bars next to the words."""
_DIM = "dim"
_UNKNOWN = "unknown"


def render(document: Document, *, width: int = 100, color: bool = False) -> str:
    """The document as text, at most ``width`` columns wide; ANSI colours where ``color``."""
    return printed(_page(document, width), width=width, color=color)


def printed(drawn: RenderableType, *, width: int, color: bool) -> str:
    """What a terminal of that width would show."""
    target = io.StringIO()
    Console(file=target, width=width, force_terminal=color, no_color=not color, highlight=False).print(drawn)
    return target.getvalue()


def _page(document: Document, width: int) -> Group:
    parts: list[RenderableType] = [
        _heading(document),
        _figures(document),
        Text(),
        _categories(document, bars=width >= _WIDE),
    ]
    if document.step_budget is not None:
        parts += [Text(), *_step_budget(document.step_budget)]
    if document.incidents:
        parts += [Text(), Text("Incidents", style="bold"), *_incidents(document)]
    if document.checkpoint_exposure:
        parts += [Text(), _exposure(document)]
    for line in [*document.log.problems, *document.notes]:
        parts.append(Text(f"! {line}", style="yellow"))
    if lines := next_steps(document):
        parts += [Text(), Text("What to do next", style="bold"), *(Padding(Text(line), (0, 0, 0, 2)) for line in lines)]
    return Group(*parts)


def _heading(document: Document) -> Text:
    outcome = document.outcome or "not finished"
    text = Text(document.run_id, style="bold")
    text.append(f"  {outcome}", style={"succeeded": "green", "failed": "red"}.get(outcome, "yellow"))
    if document.reason and outcome != "succeeded":
        text.append(f": {document.reason}")
    text.append(f"\n{format_duration(document.wall_s)}, last event {document.newest_event}", style=_DIM)
    return text


def figure(value: float | int | None, form: str = "{:,.0f}") -> str:
    """A number in words; ``unknown`` for None."""
    return _UNKNOWN if value is None else form.format(value)


def _figures(document: Document) -> Table:
    """Left what was learned, how long it took and what it cost; right how well the machines were used."""
    table = Table.grid(padding=(0, 2))
    for _ in range(2):
        table.add_column(style=_DIM)
        table.add_column(justify="right")
    for left, right in zip_longest(_outcome(document), _use(document), fillvalue=("", "")):
        table.add_row(*left, *right)
    return table


def _outcome(document: Document) -> list[tuple[str, str]]:
    accuracy, baseline, cost = document.execution_accuracy, document.baseline_accuracy, document.cost
    rows = [("held-out loss", figure(document.heldout_loss, "{:.4f}"))] if document.heldout_loss is not None else []
    rows.append(("training loss", figure(document.final_loss, "{:.4f}")))
    if accuracy is not None:
        against = f" (baseline {baseline:.1%})" if baseline is not None else ""
        rows.append(("execution accuracy", f"{accuracy:.1%}{against}"))
    rows.append(("time", format_duration(document.wall_s)))
    if not free(document):
        rows += [("cost", money(cost.usd)), ("$/M tokens", money(cost.usd_per_million_tokens))]
    return [*rows, ("steps", figure(document.steps)), ("tokens", figure(document.tokens))]


def _use(document: Document) -> list[tuple[str, str]]:
    goodput, reference = document.goodput, document.goodput.reference
    rows = [("tokens/s", figure(document.tokens_per_s)), ("step", format_duration(document.speed.step_s))]
    if document.mfu is not None or not free(document):
        rows.append(("MFU", figure(document.mfu, "{:.1%}")))
    if goodput.active == goodput.purchased:
        rows.append(("goodput", figure(goodput.active, "{:.2%}")))
    else:
        rows.append(("goodput, active hosts", figure(goodput.active, "{:.2%}")))
        rows.append(("goodput, purchased hosts", figure(goodput.purchased, "{:.2%}")))
    rows.append(("host-time productive", figure(goodput.time, "{:.2%}")))
    if reference is not None:
        rows.append(("reference tokens/s", f"{reference.tokens_per_s:,.0f}"))
    if goodput.fault_tolerance_overhead is not None:
        rows.append(("fault-tolerance overhead", f"{goodput.fault_tolerance_overhead:.2%}"))
    if document.cost.usd_per_goodput_point:
        rows.append(("one goodput point is worth", money(document.cost.usd_per_goodput_point)))
    return rows


def free(document: Document) -> bool:
    """On hosts that cost nothing dollars say nothing."""
    return document.cost.usd == 0


def _categories(document: Document, *, bars: bool) -> Table:
    host_time = document.host_time
    table = Table(
        title=f"{host_time.purchased_host_s:,.1f} host-seconds purchased"
        + (
            f"; the first host was held {format_duration(host_time.queue_s)} after the submit"
            if host_time.queue_s > 0
            else ""
        ),
        title_justify="left",
        title_style="bold",
        box=None,
        pad_edge=False,
        expand=True,
    )
    table.add_column("category", min_width=12)
    table.add_column("host-s", justify="right", min_width=7)
    table.add_column("share", justify="right", min_width=7)
    if bars:
        table.add_column("", min_width=_BAR)
    if not free(document):
        table.add_column("cost", justify="right", min_width=7)
    table.add_column("", style=_DIM, overflow="ellipsis", no_wrap=True, ratio=1)
    for name, spent in document.categories.items():
        if not spent.host_ns:
            continue
        share = spent.share or 0.0
        style = "green" if name == "productive" else "yellow"
        bar = [Text("█" * round(share * _BAR) or "▏", style=style)] if bars else []
        usd = [] if free(document) else [money(spent.usd)]
        table.add_row(name, f"{spent.host_s:,.1f}", f"{share:.2%}", *bar, *usd, spent.meaning)
    return table


def _step_budget(budget: StepBudget) -> list[RenderableType]:
    title = Text(f"A step of {format_duration(budget.step_s)} (rank 0, mean of {budget.steps:,})", style="bold")
    planned = budget.planned_step_s is not None
    table = Table(box=None, pad_edge=False)
    for name in ("part", "ms", "share", "planned ms")[: 4 if planned else 3]:
        table.add_column(name, justify="left" if name == "part" else "right")
    for part, seconds in budget.parts_s.items():
        row = [part, f"{seconds * 1e3:,.1f}", f"{seconds / budget.step_s:.1%}"]
        foreseen = budget.planned_s.get(part)
        table.add_row(*row, *(["" if foreseen is None else f"{foreseen * 1e3:,.1f}"] if planned else []))
    if not budget.levers:
        return [title, table, Text("nothing but arithmetic is worth 1 % of a step", style=_DIM)]
    return [title, table, Text(lever_in_words(budget.levers[0]))]


def _incidents(document: Document) -> list[RenderableType]:
    parts: list[RenderableType] = []
    for incident in document.incidents:
        line = Text(f"{format_duration(incident.at_s):>12}  ", style=_DIM)
        line.append(incident.kind, style="bold")
        parts.append(line)
        parts.append(Padding(Text(incident.sentence, style="default"), (0, 0, 0, 14)))
    total = document.incident_kinds.get("all")
    if total:
        lost, detect = (
            f"p50 {format_duration(p50)}, p95 {format_duration(p95)}"
            for p50, p95 in ((total.lost_s_p50, total.lost_s_p95), (total.detect_s_p50, total.detect_s_p95))
        )
        recovered = f"({total.recovered} of {total.count} recovered)"
        parts.append(Text(f"lost per incident: {lost} {recovered}; noticed after {detect}"))
    return parts


def _exposure(document: Document) -> Table:
    table = Table(title="Age of the newest restorable state", title_justify="left", title_style="bold", box=None)
    for name in ("tier", "versions", "newest step", "mean", "greatest", "at the end"):
        table.add_column(name, justify="left" if name == "tier" else "right")
    for tier, ages in document.checkpoint_exposure.items():
        durations = map(format_duration, (ages.mean_age_s, ages.greatest_age_s, ages.last_age_s))
        table.add_row(tier, str(ages.versions), str(ages.newest_step), *durations)
    return table
