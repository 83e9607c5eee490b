"""The report for a terminal."""

from __future__ import annotations

import io

from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from muster.report.ledger.step_budget import StepBudget
from muster.report.render.document import Document
from muster.report.render.next_steps import next_steps
from muster.report.render.sentences import format_duration, lever_in_words, money

_BAR = 12
_DIM = "dim"
_UNKNOWN = "unknown"


def render(document: Document, *, width: int = 100, color: bool = False) -> str:
    """The document as text, at most ``width`` columns wide; ANSI colours where ``color``."""
    return printed(_page(document), width=width, color=color)


def printed(drawn: RenderableType, *, width: int, color: bool) -> str:
    """What a terminal of that width would show."""
    target = io.StringIO()
    Console(file=target, width=width, force_terminal=color, no_color=not color, highlight=False).print(drawn)
    return target.getvalue()


def _page(document: Document) -> Group:
    parts: list[RenderableType] = [_heading(document), _figures(document), Text(), _categories(document)]
    if document.step_budget is not None:
        parts += [Text(), *_step_budget(document.step_budget)]
    if document.incidents:
        parts += [Text(), Text("Incidents", style="bold"), *_incidents(document)]
    if document.checkpoint_exposure:
        parts += [Text(), _exposure(document)]
    for line in [*document.log.problems, *document.notes]:
        parts.append(Text(f"! {line}", style="yellow"))
    if lines := next_steps(document):
        parts += [Text(), Text("What to do next", style="bold"), *(Text(f"  {line}") for line in lines)]
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
    goodput, cost, reference = document.goodput, document.cost, document.goodput.reference
    table = Table.grid(padding=(0, 2))
    for _ in range(2):
        table.add_column(style=_DIM)
        table.add_column(justify="right")
    accuracy, baseline = document.execution_accuracy, document.baseline_accuracy
    overhead, usd_per_million = goodput.fault_tolerance_overhead, cost.usd_per_million_tokens
    rows = [
        ("steps", figure(document.steps), "goodput, active hosts", figure(goodput.active, "{:.2%}")),
        ("tokens", figure(document.tokens), "goodput, purchased hosts", figure(goodput.purchased, "{:.2%}")),
        ("tokens/s", figure(document.tokens_per_s), "host-time productive", figure(goodput.time, "{:.2%}")),
        (
            "MFU",
            figure(document.mfu, "{:.1%}"),
            "reference tokens/s",
            _UNKNOWN if reference is None else f"{reference.tokens_per_s:,.0f}",
        ),
        ("step", format_duration(document.speed.step_s), "fault-tolerance overhead", figure(overhead, "{:.2%}")),
        ("final loss", figure(document.final_loss, "{:.4f}"), "cost", money(cost.usd)),
        ("held-out loss", figure(document.heldout_loss, "{:.4f}"), "$/M tokens", money(usd_per_million)),
        (
            "execution accuracy",
            figure(accuracy, "{:.1%}") + (f" (baseline {baseline:.1%})" if baseline is not None else ""),
            "one goodput point is worth",
            money(cost.usd_per_goodput_point),
        ),
    ]
    for row in rows:
        table.add_row(*row)
    return table


def _categories(document: Document) -> Table:
    host_time = document.host_time
    table = Table(
        title=f"{host_time.purchased_host_s:,.1f} host-seconds purchased"
        + (f", after {format_duration(host_time.queue_s)} in the queue" if host_time.queue_s > 0 else ""),
        title_justify="left",
        title_style="bold",
        box=None,
        pad_edge=False,
        expand=True,
    )
    table.add_column("category", min_width=12)
    table.add_column("host-s", justify="right", min_width=7)
    table.add_column("share", justify="right", min_width=7)
    table.add_column("", min_width=_BAR)
    table.add_column("cost", justify="right", min_width=7)
    table.add_column("", style=_DIM, overflow="ellipsis", no_wrap=True, ratio=1)
    for name, spent in document.categories.items():
        if not spent.host_ns:
            continue
        share = spent.share or 0.0
        bar = Text("█" * max(1, round(share * _BAR)), style="green" if name == "productive" else "yellow")
        table.add_row(name, f"{spent.host_s:,.1f}", f"{share:.2%}", bar, money(spent.usd), spent.meaning)
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
