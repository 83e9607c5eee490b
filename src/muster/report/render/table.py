"""The report for a terminal."""

from __future__ import annotations

import io
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from muster.report.render.sentences import span

_BAR = 12
_DIM = "dim"
_UNKNOWN = "unknown"


def render(found: dict[str, Any], *, width: int = 100, color: bool = False) -> str:
    """The document as text, at most ``width`` columns wide; ANSI colours where ``color``."""
    return printed(_page(found), width=width, color=color)


def printed(drawn: RenderableType, *, width: int, color: bool) -> str:
    """What a terminal of that width would show."""
    target = io.StringIO()
    Console(file=target, width=width, force_terminal=color, no_color=not color, highlight=False).print(drawn)
    return target.getvalue()


def _page(found: dict[str, Any]) -> Group:
    parts: list[RenderableType] = [_heading(found), _figures(found), Text(), _categories(found)]
    if found["incidents"]:
        parts += [Text(), Text("Incidents", style="bold"), *_incidents(found)]
    if found["checkpoint_exposure"]:
        parts += [Text(), _exposure(found)]
    for line in [*found["log"]["problems"], *found["notes"]]:
        parts.append(Text(f"! {line}", style="yellow"))
    return Group(*parts)


def _heading(found: dict[str, Any]) -> Text:
    outcome = found["outcome"] or "not finished"
    text = Text(found["run_id"], style="bold")
    text.append(f"  {outcome}", style={"succeeded": "green", "failed": "red"}.get(outcome, "yellow"))
    if found["reason"] and outcome != "succeeded":
        text.append(f": {found['reason']}")
    text.append(f"\n{span(found['wall_s'])}, last event {found['newest_event']}", style=_DIM)
    return text


def figure(value: float | int | None, form: str = "{:,.0f}") -> str:
    """A number in words; ``unknown`` for None."""
    return _UNKNOWN if value is None else form.format(value)


def _figures(found: dict[str, Any]) -> Table:
    goodput, cost, reference = found["goodput"], found["cost"], found["goodput"]["reference"]
    table = Table.grid(padding=(0, 2))
    table.add_column(style=_DIM)
    table.add_column(justify="right")
    table.add_column(style=_DIM)
    table.add_column(justify="right")
    accuracy, baseline = found["execution_accuracy"], found["baseline_accuracy"]
    rows = [
        ("steps", figure(found["steps"]), "goodput, active hosts", figure(goodput["active"], "{:.2%}")),
        ("tokens", figure(found["tokens"]), "goodput, purchased hosts", figure(goodput["purchased"], "{:.2%}")),
        ("tokens/s", figure(found["tokens_per_s"]), "host-time productive", figure(goodput["time"], "{:.2%}")),
        (
            "MFU",
            figure(found["mfu"], "{:.1%}"),
            "reference tokens/s",
            _UNKNOWN if reference is None else f"{reference['tokens_per_s']:,.0f}",
        ),
        ("step", span(found["speed"]["step_s"]), "tax of fault tolerance", figure(goodput["tax"], "{:.2%}")),
        ("final loss", figure(found["final_loss"], "{:.4f}"), "cost", money(cost["usd"])),
        ("held-out loss", figure(found["heldout_loss"], "{:.4f}"), "$/M tokens", money(cost["usd_per_million_tokens"])),
        (
            "execution accuracy",
            figure(accuracy, "{:.1%}") + (f" (baseline {baseline:.1%})" if baseline is not None else ""),
            "one goodput point is worth",
            money(cost["usd_per_goodput_point"]),
        ),
    ]
    for row in rows:
        table.add_row(*row)
    return table


def money(usd: float | None) -> str:
    """Dollars with as many digits as matter; ``unknown`` for None."""
    if usd is None:
        return _UNKNOWN
    return f"${usd:,.2f}" if usd >= 1 or usd == 0 else f"${usd:.4f}"


def _categories(found: dict[str, Any]) -> Table:
    host_time = found["host_time"]
    table = Table(
        title=f"{host_time['purchased_host_s']:,.1f} host-seconds purchased"
        + (f", after {span(host_time['queue_s'])} in the queue" if host_time["queue_s"] > 0 else ""),
        title_justify="left",
        title_style="bold",
        box=None,
        pad_edge=False,
        expand=True,
    )
    table.add_column("went to", min_width=12)
    table.add_column("host-s", justify="right", min_width=7)
    table.add_column("share", justify="right", min_width=7)
    table.add_column("", min_width=_BAR)
    table.add_column("cost", justify="right", min_width=7)
    table.add_column("", style=_DIM, overflow="ellipsis", no_wrap=True, ratio=1)
    for name, spent in found["categories"].items():
        if not spent["host_ns"]:
            continue
        share = spent["share"] or 0.0
        bar = Text("█" * max(1, round(share * _BAR)), style="green" if name == "productive" else "yellow")
        table.add_row(name, f"{spent['host_s']:,.1f}", f"{share:.2%}", bar, money(spent["usd"]), spent["meaning"])
    return table


def _incidents(found: dict[str, Any]) -> list[RenderableType]:
    parts: list[RenderableType] = []
    for incident in found["incidents"]:
        line = Text(f"{span(incident['at_s']):>12}  ", style=_DIM)
        line.append(incident["kind"], style="bold")
        parts.append(line)
        parts.append(Padding(Text(incident["sentence"], style="default"), (0, 0, 0, 14)))
    total = found["incident_kinds"].get("all")
    if total:
        parts.append(
            Text(
                f"lost per incident: p50 {span(total['lost_s_p50'])}, p95 {span(total['lost_s_p95'])} "
                f"({total['recovered']} of {total['count']} recovered); "
                f"noticed after p50 {span(total['detect_s_p50'])}, p95 {span(total['detect_s_p95'])}"
            )
        )
    return parts


def _exposure(found: dict[str, Any]) -> Table:
    table = Table(title="Age of the newest restorable state", title_justify="left", title_style="bold", box=None)
    for name in ("tier", "versions", "newest step", "mean", "greatest", "at the end"):
        table.add_column(name, justify="left" if name == "tier" else "right")
    for tier, ages in found["checkpoint_exposure"].items():
        table.add_row(
            tier,
            str(ages["versions"]),
            str(ages["newest_step"]),
            span(ages["mean_age_s"]),
            span(ages["greatest_age_s"]),
            span(ages["last_age_s"]),
        )
    return table
